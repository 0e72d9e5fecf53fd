"""What the transports share: a pool's bytes as rows, and the check of page ids."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from baton.transport.base import TransportError


def page_rows(pages: memoryview, page_bytes: int) -> npt.NDArray[np.uint8]:
    """A writable view [page, byte]. Raises ValueError when the memory is read-only or not whole pages."""
    if pages.readonly:
        raise ValueError("the local pool is read-only")
    if page_bytes < 1 or pages.nbytes % page_bytes:
        raise ValueError(f"{pages.nbytes} bytes are no whole pages of {page_bytes}")
    return np.frombuffer(pages, np.uint8).reshape(-1, page_bytes)


def check_pairs(pairs: Sequence[tuple[int, int]], peer_pages: int, local_pages: int) -> None:
    """Raises TransportError for a page id that is out of range."""
    for source, target in pairs:
        if not 0 <= source < peer_pages:
            raise TransportError(f"page {source} is not one of the peer's {peer_pages}")
        if not 0 <= target < local_pages:
            raise TransportError(f"page {target} is not one of the local pool's {local_pages}")
