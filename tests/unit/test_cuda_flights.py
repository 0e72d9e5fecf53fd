"""What a GPU's runner does with sampling that waits for the step before; the steps themselves need a GPU."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from baton.engine.cuda_flight import CudaFlight
from baton.engine.cuda_runner import CudaRunner


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
