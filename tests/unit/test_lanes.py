"""Test files in lanes (tests/lanes.py): a small suite, run by a pytest of its own."""

from __future__ import annotations

import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

SUITE = {
    "conftest.py": """
import os, pathlib, pytest
pytest_plugins = ["lanes"]
LOG = pathlib.Path(__file__).with_name("log")

def note(what):
    with LOG.open("a") as log:
        log.write(f"{what} {os.getpid()}\\n")

@pytest.fixture(scope="session")
def lane():
    note("made")
    yield
    note("ended")
""",
    **{
        f"test_{name}.py": f"""
import os, pytest
from conftest import note

def test_first(lane):
    note("test")

@pytest.mark.parametrize("number", range(3))
def test_more(lane, number):
    print("said by {name}")
    note("test")

def test_last(lane):
    {last}

@pytest.mark.alone
def test_alone(lane):
    note("alone")
"""
        for name, last in {
            "good": 'note("test")',
            "bad": "assert not 'what'",
            "ends": "os._exit(7)",
            "more": 'note("test")',
        }.items()
    },
}


REPEATS = """
import contextlib, time, warnings, pytest

tries = []

@pytest.mark.flaky(reruns=1)
def test_the_second_time():
    tries.append(None)
    assert len(tries) == 2

@pytest.mark.timeout(1)
def test_hangs():
    with contextlib.suppress(Exception):
        time.sleep(60)

def test_next():
    class Odd(DeprecationWarning):
        pass

    warnings.warn("an old way", DeprecationWarning)
    warnings.warn("an odd way", Odd)
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("suite")
    for name, text in SUITE.items():
        (folder / name).write_text(text)
    (folder / "pytest.ini").write_text("[pytest]\nmarkers = alone\n")
    return folder


def run(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    path = os.pathsep.join([str(Path(__file__).parents[1]), *sys.path])
    command = [sys.executable, "-m", "pytest", "-q", "-rA", "-p", "no:cacheprovider", *arguments]
    return subprocess.run(
        command,
        cwd=folder,
        env={**os.environ, "PYTHONPATH": path, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"},
        capture_output=True,
        text=True,
        timeout=120,
    )


def test_every_test_runs_once_and_is_reported(folder: Path) -> None:
    done = run(folder, "--lanes", "2")
    assert done.returncode == 1, done.stdout
    words = done.stdout.splitlines()
    assert words[-1].startswith("2 failed, 22 passed"), done.stdout
    failed = {word.split()[1] for word in words if word.startswith("FAILED")}
    assert failed == {"test_bad.py::test_last", "test_ends.py::test_last"}
    assert "ended with exit code 7" in done.stdout and "assert not 'what'" in done.stdout
    log = [line.split() for line in (folder / "log").read_text().splitlines()]
    noted = Counter(what for what, _ in log)
    assert noted["test"] == 4 * 4 + 2 and noted["alone"] == 4
    # A lane makes what is of the session once and ends it, but for the one that died.
    # `alone` has its own lane.
    assert noted["made"] == len({pid for _, pid in log}) == noted["ended"] + 1
    alone = {pid for what, pid in log if what == "alone"}
    assert len(alone) == 1 and not alone & {pid for what, pid in log if what == "test"}
    assert next(i for i, (what, _) in enumerate(log) if what == "alone") > max(
        i for i, (what, _) in enumerate(log) if what == "test"
    )


@pytest.mark.thorough
def test_no_more_begin_after_a_failure_that_is_the_last(folder: Path) -> None:
    done = run(folder, "--lanes", "1", "-x", "test_bad.py", "test_good.py", "test_more.py")
    assert done.returncode == 1 and "1 failed" in done.stdout.splitlines()[-1], done.stdout
    assert "test_more.py" not in done.stdout


@pytest.mark.thorough
def test_repeats_limits_and_warnings_are_as_without_lanes(tmp_path: Path) -> None:
    (tmp_path / "conftest.py").write_text('pytest_plugins = ["lanes"]\n')
    (tmp_path / "pytest.ini").write_text("[pytest]\nmarkers = alone\n")
    (tmp_path / "test_it.py").write_text(REPEATS)
    plugins = ("-p", "pytest_rerunfailures", "-p", "pytest_timeout")
    done = run(tmp_path, "--lanes", "1", *plugins)
    words = done.stdout.splitlines()
    assert words[-1].startswith("1 failed, 2 passed, 2 warnings, 1 rerun"), done.stdout
    assert "DeprecationWarning: an old way" in done.stdout
    assert "UserWarning: Odd: an odd way" in done.stdout
    assert "Timeout (>1.0s)" in done.stdout


FLAKY = """
import os, pathlib

HERE = pathlib.Path(__file__).parent

def first(name):
    try:
        (HERE / name).touch(exist_ok=False)
    except FileExistsError:
        return False
    return True

def test_fails_once():
    print("said before the failure")
    assert not first("once")

def test_dies_once():
    if first("died"):
        os._exit(7)

def test_fails_always():
    assert not "always"

def test_passes():
    pass
"""


@pytest.mark.thorough
def test_what_failed_runs_once_more_and_is_named_as_flaky_if_it_passes(tmp_path: Path) -> None:
    (tmp_path / "conftest.py").write_text('pytest_plugins = ["lanes"]\n')
    (tmp_path / "pytest.ini").write_text("[pytest]\nmarkers = alone\n")
    (tmp_path / "test_it.py").write_text(FLAKY)
    done = run(tmp_path, "--lanes", "1", "--rerun-failed")
    words = done.stdout.splitlines()
    assert done.returncode == 1 and words[-1].startswith("1 failed, 3 passed, 2 flaky"), done.stdout
    assert [word.split(":")[0] for word in words if word.startswith("FLAKY")] == [
        "FLAKY test_it.py",
        "FLAKY test_it.py",
    ]
    assert "test_fails_once: failed, and passed" in done.stdout
    assert "said before the failure" in done.stdout and "ended with exit code 7" in done.stdout
    done = run(tmp_path, "--lanes", "1", "--rerun-failed", "-k", "not always")
    assert done.returncode == 0 and "flaky" not in done.stdout, done.stdout
    for name in ("once", "died"):
        (tmp_path / name).unlink()
    done = run(tmp_path, "--lanes", "1", "--rerun-failed", "-k", "not always")
    assert done.returncode == 0 and "3 passed, 1 deselected, 2 flaky" in done.stdout, done.stdout


TIMED = """
import os, pathlib, time

def test_it():
    with pathlib.Path(__file__).with_name("log").open("a") as log:
        log.write(f"{pathlib.Path(__file__).stem}\\n")
    while time.process_time() < BUSY:
        pass
"""


@pytest.mark.thorough
def test_files_that_took_longest_come_first_and_what_they_took_is_recorded(tmp_path: Path) -> None:
    (tmp_path / "conftest.py").write_text('pytest_plugins = ["lanes"]\n')
    (tmp_path / "pytest.ini").write_text("[pytest]\nmarkers = alone\n")
    for name in "abcd":
        (tmp_path / f"test_{name}.py").write_text(TIMED.replace("BUSY", "2" if name == "a" else "0"))
    record = tmp_path / "tests" / "last_run.txt"
    record.parent.mkdir()
    record.write_text("commit old\ntest_a.py 1.0 0.5\ntest_b.py 2.5 0.1\ntest_c.py 9 9\ntest_gone.py 7 7\n")
    done = run(tmp_path, "--lanes", "1", "--record", "new")
    assert done.returncode == 0, done.stdout
    assert (tmp_path / "log").read_text().split() == ["test_d", "test_c", "test_b", "test_a"]
    _, commit, *lines = [line.split() for line in record.read_text().splitlines()]
    assert commit == ["commit", "new"]
    assert [name for name, _, _ in lines] == ["test_a.py", "test_b.py", "test_c.py", "test_d.py"]
    assert float(lines[0][2]) > 0.5 > max(float(used) for _, _, used in lines[1:])

    (tmp_path / "test_d.py").write_text("def test_it():\n    assert not 1\n")
    assert run(tmp_path, "--lanes", "1", "--record", "newer", "test_d.py").returncode == 1
    _, commit, *again = [line.split() for line in record.read_text().splitlines()]
    assert commit == ["commit", "new"] and again[:3] == lines[:3]
