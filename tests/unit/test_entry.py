"""The first process of a container: process ids, signals, orphans, exit codes."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys

import pytest

from baton.cli.entrypoint import FIRST_ID, IDS, choose_id

ENTRY = [sys.executable, "-m", "baton.cli.entrypoint"]
SAY_ID = [sys.executable, "-c", "import os; print(os.getpid())"]


def test_containers_of_one_network_get_different_ids():
    ids = {choose_id(f"172.18.{third}.{last}", 0) for third in range(4) for last in range(256)}
    assert len(ids) == 4 * 256
    assert all(FIRST_ID <= each < FIRST_ID + IDS for each in ids)
    assert choose_id("fd00::7", 0) == FIRST_ID + 7
    assert choose_id("", 41) == FIRST_ID + 41


@pytest.mark.skipif(
    not (shutil.which("unshare") and os.geteuid() == 0), reason="needs root: a PID namespace of its own"
)
def test_the_command_of_a_container_has_an_id_of_its_own():
    """In a PID namespace where it is the first process, as in a container."""
    namespace = ["unshare", "--pid", "--fork", "--mount-proc"]
    bare = subprocess.run([*namespace, *SAY_ID], capture_output=True, text=True, timeout=240, check=True)
    assert int(bare.stdout) == 1
    done = subprocess.run(
        [*namespace, *ENTRY, *SAY_ID], capture_output=True, text=True, timeout=240, check=True
    )
    assert int(done.stdout) >= FIRST_ID


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_signals_are_handed_on(number):
    script = (
        "import signal, sys, time\n"
        f"signal.signal({int(number)}, lambda *_: sys.exit(42))\n"
        "print('there', flush=True)\n"
        "time.sleep(30)\n"
    )
    process = subprocess.Popen([*ENTRY, sys.executable, "-c", script], stdout=subprocess.PIPE, text=True)
    with process:
        assert process.stdout.readline() == "there\n"
        process.send_signal(number)
        assert process.wait(20) == 42


@pytest.mark.parametrize(
    ("script", "code"),
    [("raise SystemExit(2)", 2), ("pass", 0), ("import os; os.kill(os.getpid(), 9)", 128 + 9)],
)
def test_it_exits_as_the_command_did(script, code):
    assert subprocess.run([*ENTRY, sys.executable, "-c", script], timeout=240, check=False).returncode == code


@pytest.mark.parametrize(("arguments", "code", "says"), [([], 2, "baton serve"), (["/nope"], 127, "/nope")])
def test_what_cannot_be_started_is_said_in_one_line(arguments, code, says):
    done = subprocess.run([*ENTRY, *arguments], capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == code
    assert says in done.stderr and done.stderr.count("\n") == 1


@pytest.mark.skipif(
    not (shutil.which("unshare") and os.geteuid() == 0), reason="needs root: a PID namespace of its own"
)
def test_orphans_are_collected():
    """What a dead child leaves behind falls to the first process; it must not stay as a zombie."""
    script = (
        "import os, time\n"
        "if os.fork() == 0:\n"
        "    if os.fork() == 0:\n"
        "        time.sleep(0.2)\n"
        "    os._exit(0)\n"
        "os.wait()\n"
        "deadline = time.monotonic() + 10\n"
        "def others():\n"
        "    return [p for p in os.listdir('/proc') if p.isdigit() and int(p) not in (1, os.getpid())]\n"
        "assert others()\n"
        "while others() and time.monotonic() < deadline:\n"
        "    time.sleep(0.05)\n"
        "print(len(others()))\n"
    )
    command = ["unshare", "--pid", "--fork", "--mount-proc", *ENTRY, sys.executable, "-c", script]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)
    assert done.stdout == "0\n", done
