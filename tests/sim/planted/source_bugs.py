"""A bug in what workers borrow from each other's prefix trees, to be planted into the real core."""

from __future__ import annotations

from dataclasses import replace

from baton.handoff.messages import ChunkAnnounced
from baton.kvcache.kv_events import content_digest
from baton.worker.sources.borrower import Borrower, Borrowing
from planted.planting import Wrong, bug


@bug("other-tokens", "lent pages are pulled whatever their tokens are", 200, Borrower, "_lent", seed=82)
def _(lent: Wrong, borrower: Borrower, borrowing: Borrowing, chunk: ChunkAnnounced, now: float) -> None:
    cache = borrower._cache
    rows = chunk.groups[0].first + len(chunk.groups[0].pages)
    key = cache.encode(borrowing.prompt[: rows * cache.page_size])
    content = content_digest(cache.page_size, borrowing.request.namespace, key)
    lent(borrower, borrowing, replace(chunk, content=content), now)
