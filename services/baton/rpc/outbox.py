"""The server's side of a long-lived stream: its first message, and its outbox."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable
from typing import Any, Generic, TypeVar

import grpc.aio

from baton.rpc.errors import deadline_exceeded, invalid

T = TypeVar("T")

HELLO_SECONDS = 10.0

STREAM_ENDED = (grpc.aio.AbortError, grpc.aio.UsageError, grpc.aio.InternalError)
"""Exceptions of reading from a call after its other half has ended it; no error of the reader."""


async def first_message(messages: AsyncIterator[T], method: str) -> T:
    """The first message of a stream. Raises BatonError if it does not come within HELLO_SECONDS."""
    try:
        async with asyncio.timeout(HELLO_SECONDS):
            first = await anext(aiter(messages), None)
    except TimeoutError:
        text = f"{method} was opened, and no `hello` came within {HELLO_SECONDS:g} s"
        raise deadline_exceeded(text) from None
    if first is None:
        raise invalid("hello", f"{method} was closed without its first message, `hello`")
    return first


MAX_UNSENT_BYTES = 32 * 2**20
"""Half of the largest message."""


def byte_size(message: Any) -> int:
    """Size of a protobuf message."""
    return int(message.ByteSize())


class OutboxFull(Exception):
    """The outbox holds its limit of unsent items or bytes: the peer does not read."""


class Outbox(Generic[T]):
    """Unsent items of one stream, for one reader; used on the event loop only.

    With `merge`, at most one item is ever unsent: merge(unsent, new) takes both places, and may change and
    return its first argument. Without (messages that carry one command each), items queue up to `limit`.
    Either way no more than `max_bytes` are unsent, as `size_of` counts them.
    """

    def __init__(
        self,
        merge: Callable[[T, T], T] | None,
        limit: int = 65536,
        size_of: Callable[[T], int] = lambda item: 0,
        max_bytes: int = MAX_UNSENT_BYTES,
    ) -> None:
        self._merge = merge
        self._limit = limit
        self._size_of = size_of
        self._max_bytes = max_bytes
        self._bytes = 0
        self._items: deque[T] = deque()
        self._closed = False
        self._wake = asyncio.Event()

    def __len__(self) -> int:
        return len(self._items)

    @property
    def closed(self) -> bool:
        return self._closed

    def put(self, item: T) -> bool:
        """False once closed: the item is dropped. Raises OutboxFull at the limit. Never waits."""
        if self._closed:
            return False
        size = self._size_of(item)
        if self._items and self._bytes + size > self._max_bytes:
            raise OutboxFull(f"{self._bytes} bytes are unsent")
        self._bytes += size
        if self._items and self._merge is not None:
            self._items[-1] = self._merge(self._items[-1], item)
        elif len(self._items) >= self._limit:
            raise OutboxFull(f"{len(self._items)} messages are unsent")
        else:
            self._items.append(item)
        self._wake.set()
        return True

    def close(self) -> None:
        """Unsent items are still read; then the iteration ends. Idempotent."""
        self._closed = True
        self._wake.set()

    def __aiter__(self) -> AsyncIterator[T]:
        return self

    async def __anext__(self) -> T:
        while not self._items:
            if self._closed:
                raise StopAsyncIteration
            self._wake.clear()
            await self._wake.wait()
        return self._next()

    def take(self, max_bytes: int) -> list[T]:
        """Takes items after the one just read, up to `max_bytes`."""
        taken: list[T] = []
        while self._items and (max_bytes := max_bytes - self._size_of(self._items[0])) >= 0:
            taken.append(self._next())
        return taken

    def _next(self) -> T:
        item = self._items.popleft()
        self._bytes = max(0, self._bytes - self._size_of(item)) if self._items else 0
        return item
