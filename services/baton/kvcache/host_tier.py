"""The host tier: a second pool of the same process, which keeps what the first one is about to evict.

It has pages, generations and a prefix tree of its own, so that a page index is held at most once a tier.
Pages are *demoted* to it before the first pool evicts them, and *promoted* from it while a request waits.
Both are pulls between the two pools, as between two nodes: the receiver takes pages of its own, somebody
copies, and the sources' generations are compared afterwards. Nothing is locked at the source: what it has
reused meanwhile is dropped. Pure, for one thread.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import count as counter
from math import inf
from typing import TYPE_CHECKING, NamedTuple, Protocol

from baton.kvcache.block_table import BlockTable
from baton.kvcache.eviction import Policy
from baton.kvcache.kv_cache_manager import KvCacheManager
from baton.kvcache.kv_groups import NO_PAGE
from baton.kvcache.page_allocator import require
from baton.kvcache.tree_node import PageRow

if TYPE_CHECKING:
    from baton.kvcache.disk_tier import DiskTier

PROMOTION_SECONDS = 5.0
"""A request waits no longer for its pages; then it is computed."""
LOOK_SECONDS = 0.05
"""Least time between two looks for pages to write to a disk."""


class PageCopier(Protocol):
    """Copies pages between the two pools, elsewhere than in the step thread."""

    def copy(self, number: int, pairs: Sequence[tuple[int, int]], up: bool) -> None:
        """Begins to copy (source, target) pages; must not block. `up`: from the tier to the first pool. When
        no copy of this number is running any more, HostTier.copied is called with it, in the step thread.
        """


@dataclass(slots=True, eq=False)
class TierCopy:
    """A demotion or a promotion."""

    number: int
    up: bool
    namespace: str
    key: bytes
    """Tokens of the rows of `block_table`, 4 bytes each."""
    block_table: BlockTable
    """The receiver's."""
    begin: int
    """First row that is copied."""
    sources: list[PageRow]
    """The source's pages of each row from `begin` on that are copied; NO_PAGE for others."""
    generations: dict[int, int]
    """Generations of the sources before the copy."""
    running: bool = True
    """Whether a request waits for it."""
    kept: int = 0
    """Page indexes that have come."""
    spoiled: bool = False
    """What it copies is known to be damaged."""
    due: float = inf


class CachedTiers(NamedTuple):
    """Cached tokens of a prompt that were not in the pool."""

    host: int = 0
    disk: int = 0
    peers: int = 0
    """Other nodes."""


IN_POOL = CachedTiers()


@dataclass(slots=True)
class TierCounters:
    demoted_pages: int = 0
    promoted_pages: int = 0
    promotions: int = 0
    """Requests for which pages were promoted."""
    dropped: int = 0
    """Promotions and demotions of which pages were reused meanwhile, or that failed."""


def keep_what_returns(rows: int) -> Policy:
    """Evicts the least recently used, where what was used again counts as used `rows` page indexes later: a
    scan of as many does not flush it."""
    return lambda node: (node.last_used + (rows if node.hits else 0),)


class HostTier:
    def __init__(
        self,
        first: KvCacheManager,
        cache: KvCacheManager,
        copier: PageCopier,
        pays: Callable[[int, int, float], bool] = lambda cached, tokens, seconds: True,
    ) -> None:
        """`first`: of the pool on the device. `cache`: of the tier. `pays(cached, tokens, seconds)`: whether
        to compute tokens `cached` to `tokens` takes longer."""
        if (first.page_size, first.groups) != (cache.page_size, cache.groups):
            raise ValueError("the pages of the two pools hold different things")
        self.cache = cache
        self.counters = TierCounters()
        self._first = first
        self._copier = copier
        self.pays = pays
        self.page_seconds = 0.0
        """Measured, to copy a page to the first pool."""
        self._numbers = counter(1)
        self._running: dict[int, TierCopy] = {}
        self._demotion: TierCopy | None = None
        self._looked = (-1, -1, -1)
        self._look_at = 0.0
        self.disk: DiskTier | None = None
        """Is given what comes to this tier; sets this itself."""
        # As many pages as two pools have half of: a smaller tier would evict what the first pool evicts next.
        self._ahead = min(first.counts().total, cache.counts().total) // 2
        first.tier = self

    @property
    def copies(self) -> int:
        """Demotions and promotions that run."""
        return len(self._running)

    # --- promotion --------------------------------------------------------------------------------------

    def promotable(
        self, tokens: bytes, namespace: str, cached: int, limit: int, *, disk: bool = False
    ) -> tuple[int, float]:
        """Page indexes of `tokens`, `limit` at most, that the first pool would hold after a promotion that
        pays, and the seconds that this takes; `cached`, as many as it holds now, where there is none.
        `disk`: a read from the disk may come first. Changes nothing."""
        size, groups = self.cache.page_size, len(self.cache.groups)
        rows = self.cache.match_length(tokens, namespace, limit) // size
        ways = [(rows, 0.0)]
        if disk and self.disk is not None:
            begin = max(rows, cached)
            end = self.disk.readable(tokens, namespace, begin, limit)
            ways.insert(0, (end, self.disk.seconds((end - rows) * groups)))
        for end, read in ways:
            seconds = read + (end - cached) * groups * self.page_seconds
            if end > cached and self.pays(cached * size, end * size, seconds):
                return end, seconds
        return cached, 0.0

    def promote(self, tokens: bytes, namespace: str, rows: int, room: int) -> TierCopy | None:
        """Begins to copy the first `rows` page indexes, as far as this tier has them and the first pool lacks
        them; at most `room` pages less are available there then. None: no room, or nothing to copy."""
        first = self._first
        rows = self.cache.match_length(tokens, namespace, rows) // self.cache.page_size
        position = self._position(rows)
        found = self.cache.find(tokens, namespace, rows, position)
        if len(found) < rows:
            return None
        locked = first.unlocked(tokens, namespace, rows, position)
        block_table = first.hold(tokens, namespace, rows, position)
        if len(block_table) == rows or locked + first.lacking(block_table, rows) > room:
            first.release(block_table, 0)
            return None
        self.counters.promotions += 1
        key = first.encode(tokens)[: rows * first.row_bytes]
        return self._begin(True, namespace, key, block_table, found)

    # --- demotion ---------------------------------------------------------------------------------------

    def tick(self, now: float) -> None:
        """Ends waits that last too long, and demotes what the first pool evicts next."""
        for copy in self._running.values():
            if copy.due == inf:
                copy.due = now + PROMOTION_SECONDS
            elif copy.due <= now:
                copy.running = False
        if self.disk is not None:
            self.disk.tick(now)
        if self._demotion is None:
            self._demote(now)

    def _demote(self, now: float) -> None:
        first = self._first
        state = first.version, first.counts().free, first.available
        if state == self._looked or now < self._look_at:
            return
        ahead = self._ahead
        if self.disk is not None:  # what it has survives the process: all that is cached
            ahead, self._look_at = first.counts().total, now + LOOK_SECONDS
        for node in first.leaving(ahead - state[1]):
            if node.demoted:
                continue
            for above in node.path():
                above.demoted = True
            namespace, key, rows = first.path_of(node)
            if rows and self._demote_path(namespace, key, rows):
                self._look_at = now
                return
        self._looked = state

    def _demote_path(self, namespace: str, key: bytes, rows: list[PageRow]) -> bool:
        cache = self.cache
        block_table = cache.hold(key, namespace, len(rows), self._position(len(rows)))
        if len(block_table) == len(rows) or cache.lacking(block_table, len(rows)) > cache.available:
            cache.release(block_table, 0)
            return False
        self._demotion = self._begin(False, namespace, key[: len(rows) * cache.row_bytes], block_table, rows)
        return True

    # --- both -------------------------------------------------------------------------------------------

    def _position(self, rows: int) -> int:
        """Where a sequence goes on that uses so many: of window groups, the pages that it sees are copied."""
        return rows * self.cache.page_size + 1

    def _begin(
        self, up: bool, namespace: str, key: bytes, block_table: BlockTable, rows: list[PageRow]
    ) -> TierCopy:
        source, target = (self.cache, self._first) if up else (self._first, self.cache)
        begin = len(block_table)
        target.extend(block_table, len(rows))
        taken = zip(*(table[begin:] for table in block_table.tables), strict=True)
        sources = [
            tuple(page if new != NO_PAGE else NO_PAGE for page, new in zip(row, row_taken, strict=True))
            for row, row_taken in zip(rows[begin:], taken, strict=True)
        ]
        pages = [page for row in sources for page in row if page != NO_PAGE]
        require(
            len(pages) == sum(new != NO_PAGE for table in block_table.tables for new in table[begin:]),
            "a page to copy is gone",
        )
        generations = {page: source.generation(page) for page in pages}
        copy = TierCopy(next(self._numbers), up, namespace, key, block_table, begin, sources, generations)
        self._running[copy.number] = copy
        self._copier.copy(copy.number, list(self._pairs(copy)), up)
        return copy

    @staticmethod
    def _pairs(copy: TierCopy) -> list[tuple[int, int]]:
        """Group by group, since the pages of a group were taken together."""
        pairs = []
        for group, table in enumerate(copy.block_table.tables):
            for row, target in zip(copy.sources, table[copy.begin :], strict=True):
                if row[group] != NO_PAGE:
                    pairs.append((row[group], target))
        return pairs

    def copied(self, number: int, error: str | None) -> None:
        """No copy of this number is running any more. `error`: why its targets hold garbage."""
        copy = self._running.pop(number)
        if copy is self._demotion:
            self._demotion = None
        copy.running = False
        target = self._first if copy.up else self.cache
        kept = 0 if error is not None or copy.spoiled else self._unchanged(copy)
        if kept < len(copy.sources):
            self.counters.dropped += 1
        copy.kept = kept
        if kept:
            rows = copy.begin + kept
            target.commit(copy.block_table, copy.key[: rows * target.row_bytes], copy.namespace)
            pages = sum(page != NO_PAGE for row in copy.sources[:kept] for page in row)
            if copy.up:
                self.counters.promoted_pages += pages
            else:
                self.counters.demoted_pages += pages
            if self.disk is not None and not copy.up:
                self.disk.offer(copy.namespace, copy.key[: rows * self.cache.row_bytes])
        target.release(copy.block_table, 0)

    def _unchanged(self, copy: TierCopy) -> int:
        """Leading rows whose sources have not been reused since the copy began."""
        source = self.cache if copy.up else self._first
        for index, row in enumerate(copy.sources):
            for page in row:
                if page != NO_PAGE and source.generation(page) != copy.generations[page]:
                    return index
        return len(copy.sources)

    def withdraw(self, namespace: str, first: bytes) -> None:
        """What begins with these tokens of one page, 4 bytes each, is damaged: nobody finds it any more."""
        self.cache.withdraw_prefix(first, namespace)
        if self.disk is not None:
            self.disk.withdraw(namespace, first)
        for copy in self._running.values():
            if copy.namespace == namespace and copy.key.startswith(first):
                copy.spoiled = True
