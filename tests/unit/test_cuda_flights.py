"""What a GPU's runner does with the order of rows, and with sampling that waits for the step before; the
steps themselves need a GPU."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch

from baton.engine.cuda_flight import CudaFlight
from baton.engine.cuda_runner import CudaRunner
from baton.engine.plan import PlanRow


class Done:
    """A torch.cuda.Event."""

    def __init__(self) -> None:
        self.recorded = 0

    def record(self) -> None:
        self.recorded += 1

    def synchronize(self) -> None:
        pass

    def query(self) -> bool:
        return self.recorded > 0


def flight(number: int, **state: Any) -> CudaFlight:
    return CudaFlight(number, (), Done(), **state)


def runner(late: CudaFlight | None) -> CudaRunner:
    made = object.__new__(CudaRunner)
    made._late, made._communicator = late, None
    return made


def test_it_is_enqueued_once_the_tokens_are_known():
    ran: list[int] = []
    late = flight(2, late=lambda: ran.append(2))
    made = runner(late)
    assert not made.done(flight(1))
    assert made.read(flight(1)).number == 1
    assert ran == [2] and late.done.recorded == 1
    assert made.read(late).number == 2
    assert made.read(flight(3)).number == 3 and ran == [2]


def test_it_never_runs_where_these_tokens_cannot_be_read():
    """By then its slots may belong to other sequences."""
    ran: list[int] = []
    late = flight(2, late=lambda: ran.append(2))
    made = runner(late)
    with pytest.raises(RuntimeError, match="out of memory"):
        made.read(flight(1, failed=RuntimeError("out of memory")))
    assert made.done(late), "nobody waits for what never comes"
    with pytest.raises(RuntimeError, match="the step before it failed"):
        made.read(late)
    assert made.read(flight(3)).number == 3
    assert not ran and not late.done.recorded


def test_its_error_is_that_of_its_own_step():
    def fail() -> None:
        raise RuntimeError("out of memory")

    late = flight(2, late=fail)
    made = runner(late)
    one = torch.from_numpy(np.zeros((0, 2), np.int32))
    assert made.read(flight(1, result=one)).number == 1
    with pytest.raises(RuntimeError, match="out of memory"):
        made.read(late)


class Graphs:
    """`DecodeGraphs` that sample of each row its slot, as the token and the bits of the largest logit."""

    def __init__(self) -> None:
        self.rows: list[tuple[int, int]] = []
        self.sampled = torch.zeros(0, 2, dtype=torch.int32)

    def fill(self, slots: Any, positions: Any, sampling: Any, masked: list[int]) -> None:
        self.rows = list(zip(slots.tolist(), positions.tolist(), strict=True))
        self.sampled = torch.from_numpy(np.stack((slots, slots), 1).astype(np.int32))
        assert sampling[1].tolist() == [(int(at) + 1) * 100 + slot for slot, at in self.rows]

    def replay(self, rows: int) -> None:
        pass

    def logits(self, rows: int) -> None:
        pass

    def choose(self, rows: int, words: None) -> torch.Tensor:
        return self.sampled[:rows]


def test_the_longest_row_of_a_decode_step_is_the_first(monkeypatch):
    """And each row has its own result."""
    monkeypatch.setattr("baton.engine.cuda_runner.to_host", lambda there: there)
    made, graphs = runner(None), Graphs()
    nothing = SimpleNamespace(changes=lambda rows, fresh: None)
    none = SimpleNamespace(constrained=lambda slots: [], ready=lambda slots, rows: True)
    made._slots, made._samples = cast(Any, nothing), True
    made._sampler = cast(
        Any, SimpleNamespace(grammars=none, simple=lambda slots, ends: (None, ends * 100 + slots))
    )
    for starts in ([5, 9, 700, 9, 1, 30], [9, 9, 2], [1, 2, 3], [4]):
        rows = tuple(PlanRow(7 - at, None, start, ((),), (7 - at,)) for at, start in enumerate(starts))
        launched = CudaFlight(1, rows, cast(Any, Done()))
        made._launch_graph(cast(Any, graphs), rows, {}, launched)
        assert [start for _, start in graphs.rows] == sorted(starts, reverse=True)
        assert [row.tokens for row in made.read(launched).rows] == [(row.slot,) for row in rows]
