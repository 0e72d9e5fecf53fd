"""Sampling that waits for the step before, and the order of rows; the steps themselves need a GPU."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch

from baton.engine.cuda_sampler import CudaSampler
from baton.engine.device_slots import DeviceSlots
from baton.engine.image_spans import ImageSpan
from baton.engine.launched_step import LaunchedStep, PendingSampling
from baton.engine.model_runner import ModelRunner
from baton.engine.plan import PlanRow
from baton.engine.sampler import KernelSamples
from baton.engine.step_sampling import StepSampling

CPU = torch.device("cpu")


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


def result(*tokens: int) -> torch.Tensor:
    return torch.tensor([(token, 0) for token in tokens], dtype=torch.int32).view(-1, 2)


class GrammarSampler:
    """Samples the slot as the token; the tokens before some slots are not known yet."""

    def __init__(self) -> None:
        self.unread: set[int] = set()
        self.sampled: list[list[int]] = []
        self.error: Exception | None = None
        self.grammars = SimpleNamespace(ready=lambda slots, rows: not self.unread.intersection(slots))

    def masks(self, slots: list[int], rows: list[int]) -> Any:
        return SimpleNamespace(rows=[], errors={}, launched=lambda: None, sampled=lambda tokens: list(tokens))

    def sample(self, logits: Any, slots: Any, positions: Any, last: Any, masks: Any) -> KernelSamples:
        if self.error is not None:
            raise self.error
        self.sampled.append(slots.tolist())
        return KernelSamples(result(*slots.tolist()))


def launched(number: int, slot: int = 0, **state: Any) -> LaunchedStep:
    row = PlanRow(slot, None, 5, ((),), (slot,))
    return LaunchedStep(number, (row,), cast(Any, Done()), **state)


def pending(slot: int) -> PendingSampling:
    return PendingSampling(torch.zeros(1, 4), np.array([slot]), np.array([6]), [0])


def made(sampler: GrammarSampler) -> StepSampling:
    return StepSampling(cast(Any, sampler), DeviceSlots(8, 1, 0, CPU), None)


def begin(sampling: StepSampling, step: LaunchedStep, slot: int) -> None:
    sampling.sample(step, pending(slot))
    sampling.launched(step)


def test_it_is_enqueued_once_the_tokens_are_known():
    sampler = GrammarSampler()
    sampling, first, late = made(sampler), launched(1, 1), launched(2, 2)
    begin(sampling, first, 1)
    sampler.unread = {2}
    begin(sampling, late, 2)
    assert sampler.sampled == [[1]] and late.late is not None and not late.done.query()
    assert sampling.read(first)[0].tokens == (1,)
    assert sampler.sampled == [[1], [2]] and late.done.recorded == 1
    assert sampling.read(late)[0].tokens == (2,)


def test_it_never_runs_where_these_tokens_cannot_be_read():
    """By then its slots may belong to other sequences."""
    sampler = GrammarSampler()
    sampling, late = made(sampler), launched(2, 2)
    sampler.unread = {2}
    begin(sampling, late, 2)
    with pytest.raises(RuntimeError, match="out of memory"):
        sampling.read(launched(1, failed=RuntimeError("out of memory")))
    runner = object.__new__(ModelRunner)
    assert runner.done(late), "nobody waits for what never comes"
    with pytest.raises(RuntimeError, match="the step before it failed"):
        sampling.read(late)
    assert sampling.read(LaunchedStep(3, ())) == ()
    assert not sampler.sampled and not late.done.recorded


def test_its_error_is_that_of_its_own_step():
    sampler = GrammarSampler()
    sampling, first, late = made(sampler), launched(1, 1), launched(2, 2)
    begin(sampling, first, 1)
    sampler.unread, sampler.error = {2}, RuntimeError("out of memory")
    begin(sampling, late, 2)
    assert sampling.read(first)[0].tokens == (1,)
    with pytest.raises(RuntimeError, match="out of memory"):
        sampling.read(late)


class Graphs:
    """`DecodeGraphs` that sample of each row its slot."""

    def __init__(self) -> None:
        self.rows: list[tuple[int, int]] = []
        self.shifts: list[int] = []
        self.sampled = result()

    def fill(self, slots: Any, positions: Any, shifts: Any, sampling: Any, masked: list[int]) -> None:
        self.rows, self.shifts = list(zip(slots.tolist(), positions.tolist(), strict=True)), shifts.tolist()
        self.sampled = result(*slots.tolist())
        assert sampling[1].tolist() == [(int(at) + 1) * 100 + slot for slot, at in self.rows]

    def replay(self, rows: int) -> None:
        pass

    def logits(self, rows: int) -> torch.Tensor:
        return torch.zeros(rows, 4)

    def choose(self, rows: int, words: None) -> torch.Tensor:
        return self.sampled[:rows]


def test_the_longest_row_of_a_decode_step_is_the_first(monkeypatch):
    """And each row has its own result, and its own shift by the images before it."""
    sampler = CudaSampler(8, 50, CPU)
    monkeypatch.setattr(sampler, "simple", lambda slots, ends: (None, ends * 100 + slots))
    runner, graphs = object.__new__(ModelRunner), cast(Any, Graphs())
    runner._slots = cast(Any, SimpleNamespace(changes=lambda rows, fresh: None))
    runner._sampler, runner._tap_buffer = sampler, None
    runner._sampling = StepSampling(sampler, DeviceSlots(8, 1, 0, CPU), None)
    runner._sampling.graphs = graphs
    for starts in ([5, 9, 700, 9, 1, 30], [9, 9, 2], [1, 2, 3], [4]):
        rows = tuple(
            PlanRow(7 - at, None, start, ((),), (7 - at,), images=(ImageSpan(0, 2, 9 - at, b""),) * (at % 2))
            for at, start in enumerate(starts)
        )
        step = LaunchedStep(1, rows, cast(Any, Done()))
        runner._launch_graph(graphs, rows, {}, step)
        assert [start for _, start in graphs.rows] == sorted(starts, reverse=True)
        assert graphs.shifts == [slot % 2 - slot - 2 if slot % 2 == 0 else 0 for slot, _ in graphs.rows]
        assert [row.tokens for row in runner.read(step).rows] == [(row.slot,) for row in rows]
