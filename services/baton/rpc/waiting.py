"""Waiting for what may be interrupted: by an event, by a signal."""

from __future__ import annotations

import asyncio
import contextlib
import signal
from collections.abc import Iterator
from typing import Any

CANCEL_SECONDS = 10.0
"""What is cancelled may take so long to end."""


async def unless(work: Any, event: asyncio.Event, seconds: float | None = None) -> bool:
    """Awaits `work`; False, with the work cancelled, when the event is set or the time is over before."""
    task = asyncio.ensure_future(work)
    waiter = asyncio.ensure_future(event.wait())
    try:
        await asyncio.wait({task, waiter}, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            task.result()
            return True
        return False
    finally:
        for pending in (task, waiter):
            pending.cancel()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(CANCEL_SECONDS):
                await asyncio.gather(task, waiter, return_exceptions=True)


@contextlib.contextmanager
def signals(stopping: asyncio.Event, hurry: asyncio.Event, install: bool) -> Iterator[None]:
    """With `install`, SIGTERM and SIGINT set `stopping`, the second of them `hurry`."""

    def received() -> None:
        (hurry if stopping.is_set() else stopping).set()

    loop = asyncio.get_running_loop()
    numbers = (signal.SIGTERM, signal.SIGINT) if install else ()
    for number in numbers:
        loop.add_signal_handler(number, received)
    try:
        yield
    finally:
        for number in numbers:
            loop.remove_signal_handler(number)
