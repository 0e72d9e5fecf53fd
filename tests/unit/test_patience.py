"""When a step counts as stuck, by what steps took before."""

from __future__ import annotations

import pytest

from baton.engine.patience import FACTOR, FIRST_SECONDS, Patience


def test_the_first_step_has_time():
    patience = Patience()
    assert patience.limit(512, 20.0) == FIRST_SECONDS
    assert patience.limit(512, 2 * FIRST_SECONDS) == 2 * FIRST_SECONDS


def test_nothing_that_is_computed_has_the_floor():
    patience = Patience()
    patience.took(512, 30.0)
    assert patience.limit(0, 20.0) == 20.0


def test_quick_steps_leave_the_floor():
    patience = Patience()
    patience.took(512, 0.05)
    assert patience.limit(512, 20.0) == 20.0


def test_slow_steps_raise_it():
    patience = Patience()
    patience.took(512, 15.0)
    assert patience.limit(512, 20.0) == pytest.approx(FACTOR * 15.0)
    assert patience.limit(1, 20.0) == pytest.approx(FACTOR * 15.0), "no longer than one of more tokens"
    assert patience.limit(1024, 20.0) == pytest.approx(FACTOR * 30.0), "no longer than two of half its tokens"


def test_the_tightest_bound_counts():
    patience = Patience()
    patience.took(1, 0.3)
    assert patience.limit(512, 0.0) == pytest.approx(FACTOR * 0.3 * 512)
    patience.took(512, 10.0)
    assert patience.limit(512, 0.0) == pytest.approx(FACTOR * 10.0)
    assert patience.limit(1, 0.0) == pytest.approx(FACTOR * 0.3)


def test_sizes_are_few():
    patience = Patience()
    for tokens in range(1, 10_000):
        patience.took(tokens, 1.0)
    assert len(patience._seconds) == (9_999).bit_length()


def test_one_slow_step_is_not_the_rule():
    patience = Patience()
    for _ in range(10):
        patience.took(512, 1.0)
    patience.took(600, 21.0)
    assert FACTOR * 1.0 < patience.limit(512, 0.0) <= FACTOR * 2.001
