"""Receivers that copy in a thread of their own. Pulls wait there for earlier ones and for their step."""

from __future__ import annotations

import asyncio
import contextlib
import heapq
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Self

from baton.transport.base import (
    EndpointRefused,
    PageStore,
    TransportError,
    check_pairs,
    check_step,
    ignore_time,
    nothing,
    until_done,
)

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

CopyWork = Callable[[threading.Event], None]
"""The work of a pull in the thread. It may end early once the event is set."""


@dataclass(order=True, slots=True)
class _Job:
    step: int
    serial: int
    work: CopyWork = field(compare=False)
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

    async def run(self, work: CopyWork, step: int = 0, rehearse: Callable[[], None] = nothing) -> None:
        """Runs `work` in the thread once the owner's `step` has retired (0: now). Returns QUIET_SECONDS after
        its end, and raises what it raises. `rehearse` is called there periodically while it waits for that
        step; its errors are ignored.

        A cancellation ends the wait, or the work early; either way it is passed on once the work does not run
        any more. Raises TransportError where `drain` came before its turn.
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

    async def drain(self, stop: bool = False) -> None:
        """Ends waiting pulls and waits for the running one. stop: ends that one early too."""
        running = dict(self._running)
        for job in running.values():
            job.ended.cancel()
            if stop:
                job.stop.set()
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
        while True:
            try:
                job = self._take()
            except BaseException as error:  # as where the owner's steps cannot be seen: no pull may hang
                self._fail_waiting(error)
                continue
            if job is None:
                return
            if not job.ended.set_running_or_notify_cancel():
                continue
            try:
                job.work(job.stop)
                if not job.stop.is_set():
                    self._rest()
            except BaseException as error:
                job.ended.set_exception(error)
            else:
                job.ended.set_result(None)
            del job  # drops references to the work before the next job

    def _fail_waiting(self, error: BaseException) -> None:
        with self._changed:
            waiting, self._queue = self._queue, []
        for job in waiting:
            if job.ended.set_running_or_notify_cancel():
                text = f"pages cannot be waited for: {type(error).__name__}: {error}"
                job.ended.set_exception(TransportError(text))

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
        # In this order: the owner's memory may be unmapped, but not while anybody wants its pages.
        return job.ended.cancelled() or job.step <= self._retired()

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


class ThreadReceiver:
    """A Receiver whose pulls run one at a time in a thread of its own; others wait their turn."""

    kind = ""
    stops_at_close = False
    """Whether `close` ends the running pull early."""

    def __init__(self, local: PageStore, peer_pages: int, retired: Callable[[], int] | None = None) -> None:
        """retired: the number of the owner's last retired step; None: it cannot be seen."""
        self.sees_steps = retired is not None
        self._local = local
        self._peer_pages = peer_pages
        self._thread = PullThread(f"baton-{self.kind}", retired or (lambda: 0))
        self._closing: asyncio.Task[None] | None = None

    async def pull(
        self,
        pairs: Sequence[tuple[int, int]],
        step: int = 0,
        copied: Callable[[float], None] = ignore_time,
    ) -> None:
        self._require_open()
        check_pairs(pairs, self._peer_pages, self._local.num_pages)
        check_step(step, self)
        copies = list(pairs)

        def work(stop: threading.Event) -> None:
            began = time.monotonic()
            self._copy(copies, stop)
            if not stop.is_set():
                copied(time.monotonic() - began)

        await self._thread.run(work, step, self._rehearse)

    def generations(self, pages: Sequence[int]) -> list[int] | None:
        """None: the owner's generations cannot be read over this transport."""
        return None

    async def close(self) -> None:
        """Raises TransportError when the memory cannot be unmapped."""
        if self._closing is None:
            self._closing = asyncio.create_task(self._close())
        await asyncio.shield(self._closing)

    async def _connected(self) -> Self:
        """Runs `_connect` in the thread. Raises EndpointRefused, and closes, if that fails."""
        try:
            await self._thread.run(lambda stop: self._connect())
        except BaseException as error:
            await self.close()
            if isinstance(error, TransportError) and not isinstance(error, EndpointRefused):
                raise EndpointRefused(str(error)) from error
            raise
        return self

    async def _close(self) -> None:
        await self._thread.drain(stop=self.stops_at_close)
        try:
            await self._thread.run(lambda stop: self._disconnect())
        finally:
            self._thread.close()

    def _require_open(self) -> None:
        if self._closing is not None:
            raise TransportError("the receiver is closed")

    # --- in the receiver's thread -----------------------------------------------------------------------

    def _connect(self) -> None:
        """Maps or connects. Raises TransportError."""

    def _copy(self, pairs: list[tuple[int, int]], stop: threading.Event) -> None:
        """Copies pages (peer's, local). May return early once `stop` is set."""
        raise NotImplementedError

    def _rehearse(self) -> None:
        """Called periodically while a pull waits for a step."""

    def _disconnect(self) -> None:
        """Unmaps or disconnects. Raises TransportError."""
