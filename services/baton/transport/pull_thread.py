"""The thread in which a receiver copies. Pulls wait there for earlier pulls and for the owner's step."""

from __future__ import annotations

import asyncio
import contextlib
import heapq
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field

from baton.transport.base import TransportError, nothing, until_done

LEAST_POLL_SECONDS = 1e-4
MOST_POLL_SECONDS = 1e-3
POLL_SHARE = 0.005
"""Pause between two polls for a retired step, as a fraction of the time waited so far."""
REHEARSAL_SECONDS = 2e-3
"""Pause between two rehearsals while a pull waits."""
REHEARSALS_SECONDS = 1.0
"""Rehearsals stop after this time: for a longer step, milliseconds do not matter."""
QUIET_SECONDS = 1e-3
"""Pause between the end of a pull and the wake-up of the event loop, unless another pull waits. The work
itself has informed the step thread, which launches a step with the pages; waking the event loop at once
would delay that launch."""

Work = Callable[[threading.Event], None]
"""The work of a pull in the thread. It may end early once the event is set."""


@dataclass(order=True, slots=True)
class _Job:
    step: int
    serial: int
    work: Work = field(compare=False)
    rehearse: Callable[[], None] = field(compare=False)
    stop: threading.Event = field(compare=False, default_factory=threading.Event)
    ended: Future[None] = field(compare=False, default_factory=Future)

    def give_up(self) -> None:
        """Keeps the work from starting, or ends it early."""
        self.stop.set()
        self.ended.cancel()


class PullThread:
    """One pull runs at a time. Of the waiting pulls the one of the owner's earliest step is next, and none
    begins before its step has retired."""

    def __init__(self, name: str, retired: Callable[[], int] = lambda: 0) -> None:
        """`retired` returns the number of the owner's last retired step; called in the thread."""
        self._retired = retired
        self._changed = threading.Condition()
        self._queue: list[_Job] = []
        self._closed = False
        self._serial = 0
        self._running: dict[asyncio.Future[None], _Job] = {}
        self._thread = threading.Thread(target=self._serve, name=name, daemon=True)
        self._thread.start()

    async def run(self, work: Work, step: int = 0, rehearse: Callable[[], None] = nothing) -> None:
        """Runs `work` in the thread once the owner's `step` has retired (0: now). Returns QUIET_SECONDS after
        its end, and raises what it raises. `rehearse` is called there periodically while it waits for that
        step; its errors are ignored.

        A cancellation ends the wait, or the work early; either way it is passed on once the work does not run
        any more. Raises TransportError where `settle` came before its turn.
        """
        with self._changed:
            self._serial += 1
            job = _Job(step, self._serial, work, rehearse)
            heapq.heappush(self._queue, job)
            self._changed.notify()
        ended = asyncio.wrap_future(job.ended)
        self._running[ended] = job
        ended.add_done_callback(self._ended)
        await until_done([ended], job.give_up)
        if ended.cancelled():
            raise TransportError("the receiver was closed before the pages were there")
        ended.result()

    async def settle(self) -> None:
        """Ends waiting pulls and waits for the running one."""
        running = dict(self._running)
        for job in running.values():
            job.ended.cancel()
        await until_done(list(running))

    def close(self) -> None:
        """Ends the thread. Nothing may be running or waiting."""
        with self._changed:
            self._closed = True
            self._changed.notify()
        self._thread.join()

    def _ended(self, ended: asyncio.Future[None]) -> None:
        del self._running[ended]
        if not ended.cancelled():
            ended.exception()  # retrieved also if the pull was cancelled, so that asyncio logs nothing

    # --- in the thread ----------------------------------------------------------------------------------

    def _serve(self) -> None:
        while (job := self._take()) is not None:
            if not job.ended.set_running_or_notify_cancel():
                continue
            try:
                job.work(job.stop)
            except BaseException as error:
                job.ended.set_exception(error)
            else:
                if not job.stop.is_set():
                    self._rest()
                job.ended.set_result(None)
            del job  # drops references to the work before the next job

    def _rest(self) -> None:
        with self._changed:
            self._changed.wait_for(lambda: bool(self._queue) or self._closed, QUIET_SECONDS)

    def _take(self) -> _Job | None:
        """The next job that may run or was given up; None once closed."""
        while True:
            with self._changed:
                while not self._queue:
                    if self._closed:
                        return None
                    self._changed.wait()
                first = self._queue[0]
                if self._ready(first):
                    return heapq.heappop(self._queue)
            self._await(first)

    def _ready(self, job: _Job) -> bool:
        return job.step <= self._retired() or job.ended.cancelled()

    def _await(self, first: _Job) -> None:
        """Waits until the job is ready, or no longer the first. Each poll is short: other threads need the
        interpreter."""
        since = rehearsed = time.monotonic()
        while self._queue[0] is first and not self._ready(first):
            now = time.monotonic()
            if now - rehearsed >= REHEARSAL_SECONDS and now - since < REHEARSALS_SECONDS:
                rehearsed = now
                with contextlib.suppress(Exception):  # the pull itself will fail likewise
                    first.rehearse()
            time.sleep(min(max(POLL_SHARE * (now - since), LEAST_POLL_SECONDS), MOST_POLL_SECONDS))
