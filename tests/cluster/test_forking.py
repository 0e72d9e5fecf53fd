"""Forked processes are started, told and ended as executed ones are."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess

import psutil
import pytest
from forking import Forked, forks
from polling import wait
from process import ENVIRONMENT
from spare_children import SPARES

TOKENIZER = ("serve", "tokenizer", "--lifeline", "--port", "0", "--http-port", "none")


def start(log, *arguments: str, **environment: str) -> Forked:
    with log.open("wb") as stderr:
        given = {**os.environ, **environment}
        return forks(**ENVIRONMENT).start([*TOKENIZER, *arguments], stderr=stderr, environment=given)


def test_one_that_cannot_start_says_so(tmp_path):
    process = start(tmp_path / "log", "--model", "./none")
    assert process.wait(90) == 2 and process.stdout.read() == b""
    assert "./none" in (tmp_path / "log").read_text()


def test_its_environment_is_its_own(tmp_path):
    log = tmp_path / "log"
    assert start(log, BATON_LOG_LEVEL="shout").wait(90) == 2 and "shout" in log.read_text()
    assert start(log, "--model", "./none", BATON_LOG_LEVEL="info").wait(90) == 2
    assert "shout" not in log.read_text()


def test_signals_and_exit_codes(tmp_path):
    killed, asked = (start(tmp_path / name) for name in ("killed", "asked"))
    for process in (killed, asked):
        words = process.stdout.readline().split()
        assert words[0] == b"ready" and words[-1] == f"pid={process.pid}".encode()
        assert process.poll() is None
    killed.send_signal(signal.SIGKILL)
    assert killed.wait(60) == -signal.SIGKILL
    with pytest.raises(subprocess.TimeoutExpired):
        asked.wait(0.01)
    asked.stdin.close()  # its lifeline
    assert asked.wait(60) == 0
    asked.send_signal(signal.SIGTERM)  # of one that is gone: as with subprocess.Popen, nothing


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_spare_children_end_with_their_command(tmp_path, number):
    up = ("up", "--port", "0", "--http-port", "0", "--kv-tokens", "4096", "--log-dir", str(tmp_path / "logs"))
    with (tmp_path / "log").open("wb") as log:
        process = forks(**ENVIRONMENT).start_command(up, stdout=log, stderr=log, environment=os.environ)
    try:
        wait(lambda: "starting" in (tmp_path / "log").read_text(), "some of them are its children")
        family = psutil.Process(process.pid).children(recursive=True)
        assert len(family) >= SPARES  # and processes that workers try grammars in
        process.send_signal(number)
        process.wait(60)
    finally:
        process.kill()
    if number == signal.SIGTERM:
        assert not living(family)  # it has waited for them
    wait(lambda: not living(family), "all have ended")


def living(processes: list[psutil.Process]) -> list[psutil.Process]:
    found = []
    for each in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            if each.status() != psutil.STATUS_ZOMBIE:
                found.append(each)
    return found
