"""asyncio: background tasks, coalesced calls, reconnection, waits that an event or a signal ends."""

from __future__ import annotations

import asyncio
import contextlib
import random
import signal
from collections.abc import Awaitable, Callable, Coroutine, Iterator
from typing import Any, NoReturn

from baton.rpc.logs import get_logger

_log = get_logger()


class Tasks:
    """Owns background tasks: holds them, logs the ones that fail, cancels the rest at close."""

    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[Any]] = set()

    def __len__(self) -> int:
        return len(self._tasks)

    def spawn(self, work: Coroutine[Any, Any, Any], name: str) -> asyncio.Task[Any]:
        task = asyncio.get_running_loop().create_task(work, name=name)
        self._tasks.add(task)
        task.add_done_callback(self._done)
        return task

    async def close(self, seconds: float = 10.0) -> None:
        """Cancels running tasks and waits at most `seconds` for their end. Idempotent."""
        running = [task for task in self._tasks if task is not asyncio.current_task()]
        for task in running:
            task.cancel()
        if running:
            _, stuck = await asyncio.wait(running, timeout=seconds)
            for task in stuck:
                _log.error("task does not end", task=task.get_name())

    def _done(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        if task.cancelled():
            return
        error = task.exception()
        if error is not None:
            _log.error("task failed", task=task.get_name(), exc_info=error)


async def wait_at_most(seconds: float, event: asyncio.Event) -> None:
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(seconds):
            await event.wait()


class CoalescedCall:
    """Runs `work` once in the next iteration of the event loop, however often it is called meanwhile."""

    def __init__(self, work: Callable[[], None]) -> None:
        self._work = work
        self._asked = False

    def __call__(self) -> None:
        if not self._asked:
            self._asked = True
            asyncio.get_running_loop().call_soon(self._run)

    def _run(self) -> None:
        self._asked = False
        self._work()


FIRST_BACKOFF_SECONDS = 0.05
LAST_BACKOFF_SECONDS = 2.0


async def keep_connected(connect: Callable[[], Awaitable[bool]]) -> NoReturn:
    """Connects again and again, until cancelled. connect: returns when its connection has ended, and whether
    it was of use: the pauses, which double, then start anew."""
    backoff = FIRST_BACKOFF_SECONDS
    while True:
        if await connect():
            backoff = FIRST_BACKOFF_SECONDS
        await asyncio.sleep(backoff * random.uniform(0.5, 1.0))
        backoff = min(2 * backoff, LAST_BACKOFF_SECONDS)


def task_is_cancelled() -> bool:
    """After a CancelledError: whether it is this task that was cancelled, rather than the call it waits
    for. (A call may deny that it was: after a failed write.) No frame of the task's own may refer to
    the task, because the error that ends it refers to these frames."""
    task = asyncio.current_task()
    return task is None or task.cancelling() > 0


CANCEL_SECONDS = 10.0
"""Longest time for cancelled work to end."""


async def unless(work: Any, event: asyncio.Event, seconds: float | None = None) -> bool:
    """Awaits `work`. Returns False and cancels it if the event is set or the time is over first."""
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
def signals(stopping: asyncio.Event, stop_now: asyncio.Event, install: bool) -> Iterator[None]:
    """With `install`, SIGTERM and SIGINT set `stopping`, the second of them `stop_now`."""

    def received() -> None:
        (stop_now if stopping.is_set() else stopping).set()

    loop = asyncio.get_running_loop()
    numbers = (signal.SIGTERM, signal.SIGINT) if install else ()
    for number in numbers:
        loop.add_signal_handler(number, received)
    try:
        yield
    finally:
        for number in numbers:
            loop.remove_signal_handler(number)
