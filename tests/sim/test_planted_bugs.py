"""The simulator bites: it finds each planted bug within a known number of seeds."""

from __future__ import annotations

import pytest
from planted import BUGS, planted

from baton.sim.run import run_scenario


def _finds(bug, seed):
    failure = run_scenario(bug.scenario(seed)).failure
    assert "planting.py" not in failure, f"the bug itself does not run: {failure}"
    return bool(failure)


@pytest.mark.thorough
@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", BUGS)
def test_a_planted_bug_is_found(name):
    bug = BUGS[name]
    with planted(name):
        found = next((seed for seed in (bug.seed, *range(bug.within)) if _finds(bug, seed)), None)
    assert found is not None, f"{name} was not found within {bug.within} seeds"
    assert not run_scenario(bug.scenario(found)).failure, "the seed fails without the bug too"
