"""What a transport is: a receiver pulls pages from a peer's pool. It knows nothing of requests or leases."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol


class TransportError(Exception):
    """A pull failed or the endpoint is gone. The destination pages hold garbage; no copy into them is running
    any more once the call that raised this has returned."""


class Receiver(Protocol):
    """One opened endpoint of a peer's pool; lives on an event loop."""

    kind: str
    """"shm", "grpc", ...; reported in statistics."""

    async def pull(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Copies pages (source id in the peer's pool, destination id in the local pool).

        Returns when this host has seen the copy complete. Raises TransportError, also for a page id that
        is out of range. A cancelled call returns (by CancelledError) only after no copy is running into the
        destinations any more.
        """
        ...

    def generations(self, pages: Sequence[int]) -> list[int] | None:
        """The peer's generations of these pages, read now; None when they cannot be seen from here (the
        answer to the lease's release tells then)."""
        ...

    async def close(self) -> None:
        """Unmaps or disconnects; waits for running copies. Idempotent."""
        ...
