"""A gateway's view of one node's prefix trees and load. Pure; the clock is passed in."""

from __future__ import annotations

from collections.abc import Sequence

from baton.kvcache.kv_events import PromptDigests
from baton.v1 import cache_pb2, node_pb2

FRESH_SECONDS = 5.0
"""An older load is ignored. Nodes report theirs at least once a second."""
MAX_PAGES = 2**20
"""Most pages of a node in its view; further ones are forgotten."""
MAX_PAGE_SIZE = 2**16


class Gap(Exception):
    """An update does not follow the known state: a snapshot is needed. One line."""


class CacheView:
    """Follows a node's updates. A wrong or late view only costs time."""

    def __init__(self, max_pages: int = MAX_PAGES) -> None:
        self.incarnation = 0
        self.sequence = 0
        """Number of the last change known."""
        self.page_size = 0
        """0: the node has not reported its tree yet."""
        self.load: node_pb2.Load | None = None
        self.updated = 0.0
        """When the last update came."""
        self._max_pages = max_pages
        self._held: set[int] = set()
        self._in_host: set[int] = set()

    def __len__(self) -> int:
        return len(self._held) + len(self._in_host)

    def apply(self, update: cache_pb2.CacheUpdate, now: float) -> None:
        """Applies an update. Raises Gap, having forgotten everything, if it does not fit."""
        follows = update.incarnation == self.incarnation and update.after == self.sequence
        if not 0 < update.page_size <= MAX_PAGE_SIZE or not (update.snapshot or follows):
            known, offered = (self.incarnation, self.sequence), (update.incarnation, update.after)
            self.clear()
            raise Gap(f"an update after {offered}, with pages of {update.page_size} tokens, to {known}")
        if update.snapshot:
            self._held.clear()
            self._in_host.clear()
        self._held.difference_update(update.removed)
        self._in_host.difference_update(update.host_removed)
        self._held.update(update.stored[: max(0, self._max_pages - len(self))])
        self._in_host.update(update.host_stored[: max(0, self._max_pages - len(self))])
        self.incarnation, self.sequence = update.incarnation, update.sequence
        self.page_size = update.page_size
        self.load, self.updated = update.load, now

    def clear(self) -> None:
        self.incarnation = self.sequence = self.page_size = 0
        self.load = None
        self._held.clear()
        self._in_host.clear()

    def fresh_load(self, now: float) -> node_pb2.Load | None:
        return self.load if now - self.updated <= FRESH_SECONDS else None

    def cached(self, prompt: PromptPages) -> tuple[int, int]:
        """Leading tokens of the prompt that the node's pool holds, and those that it would hold once what its
        host tier has were copied there. O(pages found)."""
        if not len(self):
            return 0, 0
        digests = prompt.digests(self.page_size)
        here = 0
        while here < digests.pages and digests[here] in self._held:
            here += 1
        found = here
        while found < digests.pages and (digests[found] in self._in_host or digests[found] in self._held):
            found += 1
        return here * self.page_size, found * self.page_size


class PromptPages:
    """A prompt's page digests for look-ups in views, computed once for all nodes, as far as needed."""

    def __init__(self, tokens: Sequence[int], namespace: str) -> None:
        self.tokens = tokens
        self._namespace = namespace
        self._by_size: dict[int, PromptDigests] = {}

    def digests(self, page_size: int) -> PromptDigests:
        if page_size not in self._by_size:
            self._by_size[page_size] = PromptDigests(self.tokens, self._namespace, page_size)
        return self._by_size[page_size]
