"""How long a message to a client may take to leave."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

Write = Callable[[Any], Awaitable[None]]


class _LimitedWrite:
    """A timer for each write would cost as much as the write: one timer looks at them now and then."""

    def __init__(self, write: Write, limit: asyncio.Timeout, seconds: float) -> None:
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
async def limited(write: Write, seconds: float) -> AsyncIterator[Write]:
    """`write`, but the block raises TimeoutError when one call of it has taken `seconds`, or a quarter more.
    After a call that has failed the block is to be left."""
    async with asyncio.timeout(None) as limit:
        writing = _LimitedWrite(write, limit, seconds)
        try:
            yield writing
        finally:
            writing.close()
