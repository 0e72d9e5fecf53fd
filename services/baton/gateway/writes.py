"""How long a message to a client may take to leave."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager


class Writing:
    """`with writing:` around each write. A timer for each of them would cost as much as the write: one timer
    looks at them now and then."""

    def __init__(self, limit: asyncio.Timeout, seconds: float) -> None:
        self._limit = limit
        self._seconds = seconds
        self._loop = asyncio.get_running_loop()
        self._since: float | None = None
        self._timer = self._loop.call_later(seconds / 4, self._look)

    def __enter__(self) -> None:
        self._since = self._loop.time()

    def __exit__(self, *_: object) -> None:
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
async def limited_writes(seconds: float) -> AsyncIterator[Writing]:
    """Raises TimeoutError when one write has taken `seconds`, or a quarter more."""
    async with asyncio.timeout(None) as limit:
        writing = Writing(limit, seconds)
        try:
            yield writing
        finally:
            writing.close()
