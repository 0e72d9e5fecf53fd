"""Waiting for what must happen, with a deadline."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from pathlib import Path

POLL_SECONDS = 0.01
"""Each poll asks some process, which takes time from the work that is waited for."""


async def until(condition: Callable[[], object], what: str, seconds: float = 60.0) -> float:
    """Asks again and again; returns how long it took. Fails after `seconds`."""
    started = time.monotonic()
    while not condition():
        assert time.monotonic() - started < seconds, f"not within {seconds:g} s: {what}"
        await asyncio.sleep(POLL_SECONDS)
    return time.monotonic() - started


def wait(condition: Callable[[], object], what: str, seconds: float = 120.0) -> None:
    """The same without an event loop, less often."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"not within {seconds:g} s: {what}"
        time.sleep(0.05)


def rows_of_up(printed: Path, ended: Callable[[], object]) -> dict[str, list[str]]:
    """Waits until `baton up` has printed its table; process name -> pid, gRPC address, HTTP address. `ended`:
    whether the command has."""
    wait(lambda: "Ctrl-C stops" in printed.read_text() or ended(), "up", 240)
    assert not ended(), printed.read_text()
    lines = [line.split() for line in printed.read_text().splitlines()]
    return {words[0]: words[1:] for words in lines if len(words) == 4 and words[1].isdigit()}
