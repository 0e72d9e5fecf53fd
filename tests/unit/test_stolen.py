"""Runs of pytest, with a clock that their tests turn: a failure counts where no time was stolen."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from stolen import Clock, read_clock

CONFTEST = """
import clock
import stolen

def pytest_configure(config):
    config.addinivalue_line("markers", "times: measures times")
    plugin = stolen.StolenTime(lambda: stolen.Clock(clock.busy, clock.stolen))
    config.pluginmanager.register(plugin)
"""
CLOCK = "busy, stolen, attempts = 0.0, 0.0, 0\n"
TEST = """
import pytest
import clock

@pytest.fixture(scope="module")
def shared():
    yield clock

{mark}
def test_it(shared):
    clock.attempts += 1
    clock.busy += 1.0
    clock.stolen += {stolen}
    print("attempt", clock.attempts)
    assert {passes}

def test_after_it(shared):
    print("attempts", clock.attempts)
"""


@pytest.mark.parametrize(
    ("mark", "stolen", "passes", "outcome", "attempts"),
    [
        ("", "0.0", "False", "1 failed, 1 passed", 1),
        ("", "0.1", "False", "1 failed, 1 passed", 1),
        ("", "0.5", "True", "2 passed", 1),
        ("", "0.5", "clock.attempts == 2", "2 passed, 1 rerun", 2),
        ("", "0.5", "False", "1 failed, 1 passed, 3 rerun", 4),
        ("", "(0.5, 0.0)[clock.attempts - 1]", "False", "1 failed, 1 passed, 1 rerun", 2),
        ("@pytest.mark.times", "0.5", "False", "1 passed, 1 skipped, 3 rerun", 4),
        ("@pytest.mark.times", "0.0", "False", "1 failed, 1 passed", 1),
        ("@pytest.mark.times", "0.5 * (clock.attempts < 4)", "False", "1 failed, 1 passed, 3 rerun", 4),
    ],
)
def test_a_failure_counts_where_nothing_was_stolen(tmp_path, mark, stolen, passes, outcome, attempts):
    said = run(tmp_path, TEST.format(mark=mark, stolen=stolen, passes=passes))
    assert re.search(r"^=* ?(\d .*) in ", said.splitlines()[-1])[1] == outcome, said
    assert f"attempts {attempts}\n" in said
    assert ("says nothing: 33% of its time was stolen: assert False" in said) == ("skipped" in outcome)
    assert len(re.findall(r"^RERUN test_it.py::test_it - assert ", said, re.MULTILINE)) == attempts - 1


def test_a_run_repeats_only_for_so_long(tmp_path):
    said = run(tmp_path, TEST.format(mark="", stolen="0.5", passes="False"), "stolen.EXTRA_SECONDS = 0.5")
    assert "attempts 2\n" in said, "the wait for calm, of a second, has used it up"


def test_the_clock_of_this_machine():
    clock = read_clock()
    assert clock.busy > 0 and clock.stolen >= 0
    assert Clock(3.0, 1.0).share(since=Clock(2.0, 0.0)) == 0.5
    assert Clock(3.0, 0.04).share(since=Clock(3.0, 0.0)) == 0.0


def run(folder: Path, test: str, more: str = "") -> str:
    (folder / "conftest.py").write_text(CONFTEST.replace("def ", f"{more}\n\ndef ", 1))
    (folder / "clock.py").write_text(CLOCK)
    (folder / "test_it.py").write_text(test)
    path = os.pathsep.join([str(folder), str(Path(__file__).parents[1])])
    command = [sys.executable, "-m", "pytest", "-q", "-rA", "-p", "pytest_rerunfailures", "test_it.py"]
    environment = {**os.environ, "PYTHONPATH": path, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=280)
    return done.stdout or done.stderr
