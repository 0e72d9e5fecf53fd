"""What a transport is: a receiver pulls pages from a peer's pool. It knows nothing of requests or leases.

Also what transports share: a pool on the host, the check of page ids, waiting for copies.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt


class TransportError(Exception):
    """A pull failed or the endpoint is gone. The destination pages hold garbage; no copy into them is running
    any more once the call that raised this has returned."""


class EndpointRefused(TransportError):
    """The endpoint is not for us; another one of the same peer may be."""


class PageReader(Protocol):
    """Reads a pool's pages one after the other."""

    async def read(self, page: int) -> memoryview:
        """The bytes of a page as they are now; valid until the next call. Raises TransportError."""
        ...


class PageWriter(Protocol):
    """Writes pages that arrive in pieces."""

    def write(self, page: int, offset: int, data: bytes) -> None:
        """Takes a piece; never blocks. The pieces of a page come in order, one page after the other."""
        ...

    async def finish(self) -> None:
        """Returns when every page whose last piece came is in the pool, as the host has seen, and nothing of
        this writer is being written any more. Raises TransportError. A cancelled call returns only then."""
        ...


class PageStore(Protocol):
    """The bytes of a local pool, on the host or on a GPU."""

    @property
    def page_bytes(self) -> int: ...

    @property
    def num_pages(self) -> int: ...

    def reader(self) -> PageReader: ...

    def writer(self) -> PageWriter: ...

    def close(self) -> None:
        """Frees what it holds besides the pool. Reads and writes fail with TransportError from now on."""
        ...


def nothing() -> None:
    """What a pull does where there is nothing to do."""


def ignore_time(seconds: float) -> None:
    """For callers of `pull` that only wait for its return."""


class Receiver(Protocol):
    """One opened endpoint of a peer's pool; lives on an event loop."""

    kind: str
    """"shm", "grpc", ...; reported in statistics."""

    sees_steps: bool
    """Whether it sees which of the peer's steps have retired, so that a pull can wait for one."""

    async def pull(
        self,
        pairs: Sequence[tuple[int, int]],
        step: int = 0,
        copied: Callable[[float], None] = ignore_time,
    ) -> None:
        """Copies pages (source id in the peer's pool, destination id in the local pool), once the peer's host
        has seen `step` retire; 0: now.

        Once this host has seen the copy complete `copied` is called, once and only then, with the seconds
        since it began: in whatever thread, and sooner than a task can be woken (which may be cancelled
        meanwhile). What it raises, the pull raises. Then the pull returns, perhaps a millisecond later.
        Raises TransportError, also for a page id that is out of range, for a step where steps are not seen,
        and for a pull that still waits when the receiver is closed. A cancelled call returns (by
        CancelledError) only after no copy is running into the destinations any more.
        """
        ...

    def generations(self, pages: Sequence[int]) -> list[int] | None:
        """The peer's generations of these pages, read now; None if they cannot be read here (then the
        answer to `release` decides)."""
        ...

    async def close(self) -> None:
        """Unmaps or disconnects; waits for running copies, and for no step. Idempotent."""
        ...


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


def check_page_bytes(peer: int, local: PageStore) -> None:
    """Raises EndpointRefused for a peer whose pages have another size."""
    if peer != local.page_bytes:
        raise EndpointRefused(f"the peer's pages have {peer} bytes, not {local.page_bytes}")


def check_step(step: int, receiver: Receiver) -> None:
    """Raises TransportError for a step that the receiver cannot see."""
    if step and not receiver.sees_steps:
        raise TransportError(f"the peer's steps cannot be seen over {receiver.kind}")


def runs_of(pairs: Sequence[tuple[int, int]]) -> Iterator[tuple[int, int, int]]:
    """(source, target, pages) of each run that is adjacent on both sides, in the order of the pairs."""
    source = target = count = 0
    for a, b in pairs:
        if count and (a, b) == (source + count, target + count):
            count += 1
            continue
        if count:
            yield source, target, count
        source, target, count = a, b, 1
    if count:
        yield source, target, count


ByteRange = tuple[int, int]
"""First byte of a page, and end."""


class Piece(NamedTuple):
    """Bytes of a page that lie in one target and one source."""

    target: int
    source: int
    begin: int
    end: int


def pieces_of(targets: Sequence[ByteRange], sources: Sequence[ByteRange]) -> list[Piece]:
    """What fills each target, every byte once, where sources may overlap. Raises TransportError for bytes
    that no source has."""
    pieces = []
    for number, (at, end) in enumerate(targets):
        while at < end:
            covering = [(s[1], -i) for i, s in enumerate(sources) if s[0] <= at < s[1]]
            if not covering:
                raise TransportError(f"byte {at} of a page lies in none of {len(sources)} parts")
            until, source = max(covering)
            pieces.append(Piece(number, -source, at, min(end, until)))
            at = until
    return pieces


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
