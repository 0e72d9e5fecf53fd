"""What a transport is: a receiver pulls pages from a peer's pool. It knows nothing of requests or leases."""

from __future__ import annotations

import enum
from collections.abc import Callable, Sequence
from typing import Protocol


class TransportError(Exception):
    """A pull failed or the endpoint is gone. The destination pages hold garbage; no copy into them is running
    any more once the call that raised this has returned."""


class Refusal(enum.Enum):
    """Why an endpoint cannot be opened from here."""

    NO_CUDA = "no CUDA here"
    HOST_POOL = "the local pool is not on a GPU"
    GPU_POOL = "the local pool is on a GPU"
    OTHER_HOST = "the peer is on another host"
    SAME_PROCESS = "the peer is this process"
    SAME_PID = "the peer has our process id in another PID namespace"
    PAGE_BYTES = "the peer's pages have another size"
    NO_NIXL = "nixl is not here"
    NOT_REACHED = "the peer's agent cannot be reached"
    NOT_MAPPED = "the peer's memory cannot be mapped"


class EndpointRefused(TransportError):
    """The endpoint is not for us; another one of the same peer may be."""

    def __init__(self, refusal: Refusal, message: str) -> None:
        super().__init__(message)
        self.refusal = refusal


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
        """Gives up what it takes beside the pool. What is read or written now fails with TransportError."""
        ...


def nothing() -> None:
    """What a pull does where there is nothing to do."""


def unheard(seconds: float) -> None:
    """For callers of `pull` that only wait for its return."""


class Receiver(Protocol):
    """One opened endpoint of a peer's pool; lives on an event loop."""

    kind: str
    """"shm", "grpc", ...; reported in statistics."""

    @property
    def sees_steps(self) -> bool:
        """Whether it sees which of the peer's steps have retired, so that a pull can wait for one."""
        ...

    async def pull(
        self,
        pairs: Sequence[tuple[int, int]],
        step: int = 0,
        copied: Callable[[float], None] = unheard,
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
        """The peer's generations of these pages, read now; None when they cannot be seen from here (the
        answer to the lease's release tells then)."""
        ...

    async def close(self) -> None:
        """Unmaps or disconnects; waits for running copies, and for no step. Idempotent."""
        ...
