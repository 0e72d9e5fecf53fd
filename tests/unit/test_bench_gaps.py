"""Gaps between kernels, from a trace."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))

from gaps import LAST_OF_STEP, Kernel, gaps, kernels_of


def steps(count: int, pause: float) -> list[Kernel]:
    """Each 100 us: two kernels of 40 and 60, less a gap of 1 between them and `pause` behind."""
    found = []
    for number in range(count):
        start = 100.0 * number
        found.append(Kernel("compute", start, start + 40))
        found.append(Kernel(LAST_OF_STEP, start + 41, start + 100 - pause))
    return found


def test_shares_of_short_and_long_gaps():
    found = gaps(steps(40, 9.0), 20)
    assert found.steps == 20 and found.kernels == 2 and found.step_us == pytest.approx(100)
    assert found.idle_share == pytest.approx(0.10) and found.long_share == pytest.approx(0.09)
    assert gaps(steps(40, 0.0), 20).long_share == 0


def test_kernels_that_overlap_leave_no_gap():
    found = steps(40, 9.0) + [Kernel("beside", 100.0 * n + 30, 100.0 * n + 101) for n in range(40)]
    assert gaps(found, 20).idle_share == 0


def test_too_few_steps():
    with pytest.raises(ValueError, match="of which 20 are wanted"):
        gaps(steps(20, 1.0), 20)


def test_only_kernels_count():
    trace = [
        {"cat": "kernel", "name": "a", "ts": 5, "dur": 2.5},
        {"cat": "gpu_memcpy", "name": "b", "ts": 6, "dur": 2},
        {"ph": "M", "name": "process_name"},
    ]
    assert kernels_of(trace) == [Kernel("a", 5.0, 7.5)]
