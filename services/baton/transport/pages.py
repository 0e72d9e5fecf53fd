"""Shared by the transports: a pool on the host, the check of page ids, waiting for copies."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from baton.transport.base import Receiver, TransportError


class HostPages:
    """A pool on the host (a PageStore): reads and writes are plain copies."""

    def __init__(self, memory: memoryview, page_bytes: int) -> None:
        """`memory`: whole pages; read-only memory can be read only. Raises ValueError."""
        if page_bytes < 1 or memory.nbytes % page_bytes:
            raise ValueError(f"{memory.nbytes} bytes are no whole pages of {page_bytes}")
        self.page_bytes = page_bytes
        self.num_pages = memory.nbytes // page_bytes
        self._memory = memory.cast("B")

    def rows(self) -> npt.NDArray[np.uint8]:
        """A writable view [page, byte]. Raises ValueError when the memory is read-only."""
        if self._memory.readonly:
            raise ValueError("the local pool is read-only")
        return np.frombuffer(self._memory, np.uint8).reshape(-1, self.page_bytes)

    def reader(self) -> HostPages:
        return self

    async def read(self, page: int) -> memoryview:
        return self._memory[page * self.page_bytes : (page + 1) * self.page_bytes]

    def writer(self) -> _HostWriter:
        return _HostWriter(self.rows())

    def close(self) -> None:
        """There is nothing to free."""


class _HostWriter:
    def __init__(self, rows: npt.NDArray[np.uint8]) -> None:
        self._rows = rows

    def write(self, page: int, offset: int, data: bytes) -> None:
        self._rows[page][offset : offset + len(data)] = np.frombuffer(data, np.uint8)

    async def finish(self) -> None:
        """`write` is synchronous: there is nothing left to do."""


def check_pairs(pairs: Sequence[tuple[int, int]], peer_pages: int, local_pages: int) -> None:
    """Raises TransportError for a page id that is out of range."""
    for source, target in pairs:
        if not 0 <= source < peer_pages:
            raise TransportError(f"page {source} is not one of the peer's {peer_pages}")
        if not 0 <= target < local_pages:
            raise TransportError(f"page {target} is not one of the local pool's {local_pages}")


def check_step(step: int, receiver: Receiver) -> None:
    """Raises TransportError for a step that the receiver cannot see."""
    if step and not receiver.sees_steps:
        raise TransportError(f"the peer's steps cannot be seen over {receiver.kind}")


async def until_done(
    copies: Collection[asyncio.Future[Any]], cancelled: Callable[[], None] = lambda: None
) -> None:
    """Waits until none of the copies is running, also if they fail. A cancellation is passed on only then,
    because the caller may then reuse the destinations; `cancelled` is called at once."""
    stopped = False
    while running := [copy for copy in copies if not copy.done()]:
        try:
            await asyncio.wait(running)
        except asyncio.CancelledError:
            stopped = True
            cancelled()
    if stopped:
        raise asyncio.CancelledError
