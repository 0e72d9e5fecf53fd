"""How a follower notices that the process which started it has ended."""

from __future__ import annotations

import os
import subprocess
import sys
import threading

import pytest

from baton.worker.ranks import follower_main

SLEEPING = [sys.executable, "-c", "print(flush=True); import time; time.sleep(60)"]


def ended(parent: int) -> threading.Event:
    """Set once `parent` is taken to have ended."""
    event = threading.Event()

    def watch() -> None:
        follower_main.wait_for_end(parent)
        event.set()

    threading.Thread(target=watch, daemon=True).start()
    return event


def test_a_parent_has_ended_with_its_last_thread():
    """Not when it is no parent any more, as while a thread of it still ends; and before it is waited for."""
    with subprocess.Popen(SLEEPING, stdout=subprocess.PIPE) as other:
        assert other.stdout is not None and other.stdout.readline() and other.pid != os.getppid()
        event = ended(other.pid)
        assert not event.wait(0.5)
        other.kill()
        assert event.wait(5)
    assert ended(other.pid).wait(5)


def test_a_parent_that_never_ends_is_not_waited_for_without_end(monkeypatch: pytest.MonkeyPatch):
    """One that is no parent any more, as when its driver hangs."""
    monkeypatch.setattr(follower_main, "PARENT_LOST_SECONDS", 0.5)
    with subprocess.Popen(SLEEPING, stdout=subprocess.PIPE) as other:
        event = ended(other.pid)
        assert not event.wait(0.2) and event.wait(5)
        other.kill()


def test_where_no_process_can_be_waited_for_the_parent_becomes_another(monkeypatch: pytest.MonkeyPatch):
    def refuse(_: int) -> int:
        raise OSError(38, "Function not implemented")

    monkeypatch.setattr(follower_main.os, "pidfd_open", refuse)
    event = ended(os.getppid())
    assert not event.wait(0.5)
    monkeypatch.setattr(follower_main.os, "getppid", lambda: -1)
    assert event.wait(5)
