"""Few at a time: who waits is let in by turns, so that no API key keeps others waiting by asking often."""

from __future__ import annotations

import asyncio
from collections import OrderedDict, deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager


class FairSlots:
    """Used on one event loop only."""

    def __init__(self, count: int) -> None:
        self._free = count
        self._waiting: OrderedDict[bytes, deque[asyncio.Future[None]]] = OrderedDict()
        """By owner; whose turn is next comes first."""

    @asynccontextmanager
    async def slot(self, owner: bytes, seconds: float) -> AsyncIterator[None]:
        """One of them, at the owner's turn. Raises TimeoutError if that takes longer than `seconds`."""
        if self._free:
            self._free -= 1
        else:
            turn = asyncio.get_running_loop().create_future()
            self._waiting.setdefault(owner, deque()).append(turn)
            try:
                async with asyncio.timeout(seconds):
                    await turn
            except BaseException:
                if not turn.cancelled():  # it has come at the same time
                    self._leave()
                raise
        try:
            yield
        finally:
            self._leave()

    def _leave(self) -> None:
        while self._waiting:
            owner, turns = self._waiting.popitem(last=False)
            turn = turns.popleft()
            if turns:
                self._waiting[owner] = turns
            if not turn.done():
                turn.set_result(None)
                return
        self._free += 1
