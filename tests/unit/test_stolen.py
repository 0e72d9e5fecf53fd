"""Runs of pytest with a clock that their tests turn: only tests of times are repeated, and then they fail."""

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

stolen.REST_SECONDS = 0.0

def pytest_configure(config):
    config.addinivalue_line("markers", "times: measures times")
    plugin = stolen.StolenTime(lambda: stolen.Clock(clock.busy, clock.stolen))
    config.pluginmanager.register(plugin)
"""
CLOCK = "busy, stolen = 0.0, 0.0\n"
TESTS = """
from collections import Counter

import pytest
import clock

attempts = Counter()

def attempt(name, stolen):
    attempts[name] += 1
    clock.busy += 1.0
    clock.stolen += stolen

def test_without_the_mark():
    attempt("mark", 0.5)
    assert False

@pytest.mark.times
def test_passes():
    attempt("passes", 0.5)

@pytest.mark.times
def test_passes_in_the_end():
    attempt("end", 0.5)
    assert attempts["end"] == 3

@pytest.mark.times
def test_calm():
    attempt("calm", 0.1)
    assert False

@pytest.mark.times
def test_busy():
    attempt("busy", 0.5)
    assert False

@pytest.mark.times
def test_calm_in_the_end():
    attempt("calm end", 0.5 * (attempts["calm end"] < 2))
    assert False
"""


@pytest.mark.parametrize(("unmeasured", "busy"), [("", "FAILED"), ("skip", "SKIPPED")])
def test_only_what_measures_times_is_repeated(tmp_path, unmeasured, busy):
    (tmp_path / "conftest.py").write_text(CONFTEST)
    (tmp_path / "clock.py").write_text(CLOCK)
    (tmp_path / "test_it.py").write_text(TESTS)
    path = os.pathsep.join([str(tmp_path), str(Path(__file__).parents[1])])
    command = [sys.executable, "-m", "pytest", "-v", "-p", "pytest_rerunfailures", "test_it.py"]
    environment = {**os.environ, "PYTHONPATH": path, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    environment["BATON_TEST_UNMEASURED"] = unmeasured
    done = subprocess.run(
        command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=280, check=False
    )
    outcomes: dict[str, list[str]] = {}
    for name, outcome in re.findall(r"^test_it.py::test_(\w+) ([A-Z]+)", done.stdout, re.MULTILINE):
        outcomes.setdefault(name, []).append(outcome)
    assert outcomes == {
        "without_the_mark": ["FAILED"],
        "passes": ["PASSED"],
        "passes_in_the_end": ["RERUN", "RERUN", "PASSED"],
        "calm": ["FAILED"],
        "busy": ["RERUN", "RERUN", busy],
        "calm_in_the_end": ["RERUN", "RERUN", "FAILED"],
    }, done.stdout + done.stderr


def test_the_clock_of_this_machine():
    clock = read_clock()
    assert clock.busy > 0 and clock.stolen >= 0
    assert Clock(3.0, 1.0).share(since=Clock(2.0, 0.0)) == 0.5
    assert Clock(3.0, 0.04).share(since=Clock(3.0, 0.0)) == 0.0
