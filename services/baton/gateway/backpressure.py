"""Clients that do not read: their requests pause and fail, and writes to them have a limit."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

from baton.gateway.runtime import Cancellable
from baton.rpc.errors import BatonError, exhausted


class SlowReader:
    """Watches how much of one request's output is unread.

    Above `limit` tokens the request pauses, at half of that it continues. After a pause of `seconds` it
    fails. Tokens under way at the pause still come, so that a little more than `limit` is kept.
    """

    def __init__(
        self,
        limit: int,
        seconds: float,
        after: Callable[[float, Callable[[], None]], Cancellable],
        pause: Callable[[bool], None],
        fail: Callable[[BatonError], None],
    ) -> None:
        """after: calls a function once so many seconds have passed."""
        self.paused = False
        self._limit = limit
        self._seconds = seconds
        self._after = after
        self._pause: Callable[[bool], None] | None = pause
        self._fail: Callable[[BatonError], None] | None = fail
        self._timer: Cancellable | None = None

    def look(self, unread: int) -> None:
        """`unread`: tokens that the client has not read. Called when it has changed."""
        if self._pause is None:
            return
        if not self.paused and unread > self._limit:
            self.paused = True
            self._timer = self._after(self._seconds, self._expire)
            self._pause(True)
        elif self.paused and unread <= self._limit // 2:
            self.close()
            self._pause(False)

    def close(self) -> None:
        self.paused = False
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def end(self) -> None:
        """The request has ended: no more callbacks, and no references to it."""
        self.close()
        self._fail = self._pause = None

    def _expire(self) -> None:
        text = f"the client has not read for {self._seconds:g} s, with more than {self._limit} tokens waiting"
        if self._fail is not None:
            self._fail(exhausted(text, "SLOW_READER"))


WriteMessage = Callable[[Any], Awaitable[None]]


class _LimitedWrite:
    """A timer for each write would cost as much as the write, so one periodic timer checks them."""

    def __init__(self, write: WriteMessage, limit: asyncio.Timeout, seconds: float) -> None:
        self._write = write
        self._limit = limit
        self._seconds = seconds
        self._loop = asyncio.get_running_loop()
        self._since: float | None = None
        self._timer = self._loop.call_later(seconds / 4, self._look)

    async def __call__(self, message: Any) -> None:
        self._since = self._loop.time()
        await self._write(message)
        self._since = None

    def _look(self) -> None:
        now = self._loop.time()
        if self._since is not None and now - self._since >= self._seconds:
            self._limit.reschedule(now)
        else:
            self._timer = self._loop.call_later(self._seconds / 4, self._look)

    def close(self) -> None:
        self._timer.cancel()


@asynccontextmanager
async def limited(write: WriteMessage, seconds: float) -> AsyncIterator[WriteMessage]:
    """Like `write`, but the block raises TimeoutError when one call has taken `seconds` (up to a quarter
    more). After a failed call the block must be left."""
    async with asyncio.timeout(None) as limit:
        writing = _LimitedWrite(write, limit, seconds)
        try:
            yield writing
        finally:
            writing.close()
