"""Waiting for what must happen, with a deadline."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

POLL_SECONDS = 0.01
"""Each poll asks some process, which takes time from the work that is waited for."""


async def until(condition: Callable[[], object], what: str, seconds: float = 60.0) -> float:
    """Asks again and again; returns how long it took. Fails after `seconds`."""
    started = time.monotonic()
    while not condition():
        assert time.monotonic() - started < seconds, f"not within {seconds:g} s: {what}"
        await asyncio.sleep(POLL_SECONDS)
    return time.monotonic() - started
