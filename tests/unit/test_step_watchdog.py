"""When a step counts as stuck, by what steps took before."""

from __future__ import annotations

import pytest

from baton.engine.step_stats import FIRST_STEP_SECONDS, WATCHDOG_FACTOR, StepWatchdog


def test_the_first_step_has_time():
    watchdog = StepWatchdog()
    assert watchdog.limit(512, 20.0) == FIRST_STEP_SECONDS
    assert watchdog.limit(512, 2 * FIRST_STEP_SECONDS) == 2 * FIRST_STEP_SECONDS


def test_nothing_that_is_computed_has_the_floor():
    watchdog = StepWatchdog()
    watchdog.add(512, 30.0)
    assert watchdog.limit(0, 20.0) == 20.0


def test_quick_steps_leave_the_floor():
    watchdog = StepWatchdog()
    watchdog.add(512, 0.05)
    assert watchdog.limit(512, 20.0) == 20.0


def test_slow_steps_raise_it():
    watchdog = StepWatchdog()
    watchdog.add(512, 15.0)
    assert watchdog.limit(512, 20.0) == pytest.approx(WATCHDOG_FACTOR * 15.0)
    assert watchdog.limit(1, 20.0) == pytest.approx(WATCHDOG_FACTOR * 15.0), "no longer than a larger one"
    assert watchdog.limit(1024, 20.0) == pytest.approx(WATCHDOG_FACTOR * 30.0), (
        "nor than two of half its tokens"
    )


def test_the_tightest_bound_counts():
    watchdog = StepWatchdog()
    watchdog.add(1, 0.3)
    assert watchdog.limit(512, 0.0) == pytest.approx(WATCHDOG_FACTOR * 0.3 * 512)
    watchdog.add(512, 10.0)
    assert watchdog.limit(512, 0.0) == pytest.approx(WATCHDOG_FACTOR * 10.0)
    assert watchdog.limit(1, 0.0) == pytest.approx(WATCHDOG_FACTOR * 0.3)


def test_sizes_are_few():
    watchdog = StepWatchdog()
    for tokens in range(1, 10_000):
        watchdog.add(tokens, 1.0)
    assert len(watchdog._seconds) == (9_999).bit_length()


def test_one_slow_step_is_not_the_rule():
    watchdog = StepWatchdog()
    for _ in range(10):
        watchdog.add(512, 1.0)
    watchdog.add(600, 21.0)
    assert WATCHDOG_FACTOR * 1.0 < watchdog.limit(512, 0.0) <= WATCHDOG_FACTOR * 2.001
