"""`baton sim`."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

from click.testing import CliRunner
from planted import planted

from baton.cli.main import cli
from baton.sim.run import run_seed


def run(*arguments):
    return CliRunner().invoke(cli, ["sim", *arguments], standalone_mode=False)


def test_a_seed_is_run_and_traced(tmp_path):
    trace = tmp_path / "trace.txt"
    result = run("--seed", "5", "--trace", str(trace))
    assert result.return_value == 0 and result.output.startswith("seed 5: well (")
    assert "starts, life 1" in trace.read_text()


def test_a_failing_seed_says_so():
    with planted("failed-pull"):
        seed = next(seed for seed in range(40) if run("--seed", str(seed)).return_value)
        result = run("--seed", str(seed))
    assert result.return_value == 1 and f"seed {seed} FAILS: " in result.output


def test_many_seeds_and_how_to_replay_one(monkeypatch):
    well = run("--seeds", "0-9", "--jobs", "1")
    assert well.return_value == 0 and "10 runs: none failed" in well.output
    # A bug can be planted into this process alone.
    monkeypatch.setattr("baton.cli.sim.run_many", lambda seeds, **_: map(run_seed, seeds))
    with planted("free-at-abort"):
        bad = run("--seeds", "0-39")
    assert bad.return_value == 1
    assert re.search(r"FAILS: .*; replay: baton sim --seed \d+ --trace FILE", bad.output)


def test_a_failing_seed_is_shrunk_from_the_command_line():
    script = Path(__file__).parent / "shrink.py"
    command = [sys.executable, script, "--seed", "0", "--bug", "lease-timer"]
    result = subprocess.run(command, capture_output=True, text=True, timeout=240)
    assert result.returncode == 1 and "shrunk: " in result.stdout, result.stderr


def test_seconds_bound_the_time():
    # A chunk of seeds that has begun is run to its end: steps bound that.
    result = run("--seconds", "0.5", "--from", "3", "--steps", "50")
    assert result.return_value == 0 and "runs from seed 3 on: none failed" in result.output


def test_mistakes_are_told():
    for arguments, text in (
        (("--seeds", "9-3"), "no range"),
        (("--seeds", "0-9", "--seed", "1"), "give one"),
        (("--seeds", "0-9", "--trace", "x"), "give --seed"),
    ):
        assert text in str(run(*arguments).exception)
