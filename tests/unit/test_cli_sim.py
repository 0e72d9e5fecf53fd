"""`baton sim`."""

from __future__ import annotations

import re

from click.testing import CliRunner

from baton.cli.main import cli


def run(*arguments):
    return CliRunner().invoke(cli, ["sim", *arguments], standalone_mode=False)


def test_a_seed_is_run_and_traced(tmp_path):
    trace = tmp_path / "trace.txt"
    result = run("--seed", "5", "--trace", str(trace))
    assert result.return_value == 0 and result.output.startswith("seed 5: well (")
    assert "starts, life 1" in trace.read_text()


def test_a_failing_seed_says_so_and_shrinks():
    seed = next(seed for seed in range(40) if run("--seed", str(seed), "--bug", "failed-pull").return_value)
    result = run("--seed", str(seed), "--bug", "failed-pull", "--shrink")
    assert result.return_value == 1
    assert f"seed {seed} FAILS: " in result.output and "shrunk: " in result.output


def test_the_example_of_a_planted_bug_finds_it():
    example = re.search(r"baton sim (--seed \d+ --bug \S+ --shrink)", run("--help").output)
    result = run(*example[1].split())
    assert result.return_value == 1 and "shrunk: " in result.output


def test_many_seeds_and_how_to_replay_one():
    well = run("--seeds", "0-9", "--jobs", "1")
    assert well.return_value == 0 and "10 runs: none failed" in well.output
    bad = run("--seeds", "0-39", "--bug", "free-at-abort")
    assert bad.return_value == 1 and "replay: baton sim --seed" in bad.output
    assert "--bug free-at-abort --trace FILE" in bad.output


def test_seconds_bound_the_time():
    # A chunk of seeds that has begun is run to its end: steps bound that.
    result = run("--seconds", "0.5", "--from", "3", "--steps", "50")
    assert result.return_value == 0 and "runs from seed 3 on: none failed" in result.output


def test_bugs_are_listed():
    result = run("--list-bugs")
    assert result.return_value == 0 and "lease-timer" in result.output


def test_mistakes_are_told():
    for arguments, text in (
        (("--seeds", "9-3"), "no range"),
        (("--seeds", "0-9", "--seed", "1"), "give one"),
        (("--seeds", "0-9", "--shrink"), "give --seed"),
    ):
        assert text in str(run(*arguments).exception)
