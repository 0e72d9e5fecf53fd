"""Pages of this worker's prefix tree, lent to other workers. Pure."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass

from baton.engine.scheduler import Scheduler
from baton.handoff.lease import Lease, Leases
from baton.handoff.messages import AttemptName, PrefillFailed
from baton.kvcache import NO_PAGE, BlockTable, KvCacheManager
from baton.kvcache.host_tier import TierCopy

LEND_SECONDS = 30.0
"""Pages are lent for so long at most; a pull takes much less."""
MOST_LENT = 0.5
"""Part of the pool that may be lent to one holder before it gets no more."""


@dataclass(slots=True, eq=False, kw_only=True)
class CacheLease(Lease):
    """Cached pages, locked in the tree. Nobody writes them any more."""

    cache: KvCacheManager
    block_table: BlockTable

    @property
    def importance(self) -> tuple[int, int]:
        return 0, 0

    @property
    def tables(self) -> Sequence[Sequence[int]]:
        return self.block_table.tables

    def free(self) -> None:
        self.cache.release(self.block_table, 0)


@dataclass(frozen=True, slots=True, eq=False)
class AskedPrompt:
    """Waits for pages of this worker's host tier, to be lent."""

    holder: Hashable
    name: AttemptName
    tokens: Sequence[int]
    namespace: str
    promotion: TierCopy


def whole_in_pages(cache: KvCacheManager) -> bool:
    """Whether pages hold all there is to know of their tokens, and any whole page may end a prefix."""
    return all(group.spec.kind in ("attention", "latent") for group in cache.groups)


class CacheLender:
    """What is lent takes no page that the scheduler has promised."""

    def __init__(self, scheduler: Scheduler, grace: float) -> None:
        """`grace`: see Leases."""
        self._scheduler = scheduler
        self._cache = scheduler.cache
        most = int(MOST_LENT * self._cache.counts().total)
        self.leases: Leases[CacheLease] = Leases(self._cache, grace=grace, max_pages=most)
        self.lent_pages = 0
        """Pages of leases that were released."""
        self._asked: list[AskedPrompt] = []

    def lend(
        self, holder: Hashable, name: AttemptName, tokens: Sequence[int], namespace: str, now: float
    ) -> None:
        """Lends the longest beginning of `tokens` that is cached, in whole pages, or says why not; once what
        the host tier has of it is in the pool."""
        self._scheduler.cache_pending_prefixes()
        promotion = self._promote(tokens, namespace) if whole_in_pages(self._cache) else None
        if promotion is None:
            self._lend(holder, name, tokens, namespace, now)
        else:
            self._asked.append(AskedPrompt(holder, name, tokens, namespace, promotion))

    def _promote(self, tokens: Sequence[int], namespace: str) -> TierCopy | None:
        cache, tier = self._cache, self._cache.tier
        if tier is None:
            return None
        key, size = cache.encode(tokens), cache.page_size
        cached = cache.match_length(key, namespace) // size
        rows, _ = tier.promotable(key, namespace, cached, len(tokens) // size)
        room = self._scheduler.reservations.headroom
        return tier.promote(key, namespace, rows, room) if rows > cached and room > 0 else None

    def tick(self, now: float) -> None:
        self.leases.tick(now)
        for asked in [each for each in self._asked if not each.promotion.running]:
            self._asked.remove(asked)
            self._lend(asked.holder, asked.name, asked.tokens, asked.namespace, now)

    def _lend(
        self, holder: Hashable, name: AttemptName, tokens: Sequence[int], namespace: str, now: float
    ) -> None:
        cache, size = self._cache, self._cache.page_size
        key = cache.encode(tokens)
        rows = cache.match_length(key, namespace) // size if whole_in_pages(cache) else 0
        if not rows:
            self._refuse(holder, name, "NOT_FOUND", "NOTHING_CACHED", "nothing of the prompt is cached here")
            return
        if not self.leases.may_lend(holder):
            self._refuse(holder, name, "RESOURCE_EXHAUSTED", "NO_PAGES", "too many pages are lent already")
            return
        lease = CacheLease(
            name=name,
            holder=holder,
            tokens=rows * size,
            deadline=now + LEND_SECONDS,
            cache=cache,
            block_table=cache.hold(key, namespace, rows, position=rows * size),
        )
        if self._scheduler.reservations.headroom < 0:
            lease.free()
            self._refuse(holder, name, "RESOURCE_EXHAUSTED", "NO_PAGES", "the pages are promised to prompts")
        elif len(lease.block_table) < rows or self._lacks(lease):
            # A window group has given up what the last page border sees.
            lease.free()
            self._refuse(
                holder, name, "NOT_FOUND", "NOTHING_CACHED", "the prompt is cached here only in part"
            )
        elif self.leases.begin(lease, now):
            self.leases.announce(lease, lease.tokens, True, now, content=cache.content(lease.block_table))
            self.leases.complete(lease, lease.block_table.held, now)

    def _lacks(self, lease: CacheLease) -> bool:
        pairs = zip(lease.tables, lease.block_table.dropped, strict=True)
        return any(NO_PAGE in table[dropped:] for table, dropped in pairs)

    def _refuse(self, holder: Hashable, name: AttemptName, code: str, reason: str, message: str) -> None:
        self.leases.outputs.append((holder, PrefillFailed(name, code, reason, message)))

    def release(self, holder: Hashable, name: AttemptName) -> None:
        lease = self.leases.running.get(name)
        if lease is not None and lease.holder == holder:
            self.lent_pages += lease.pages
        self.leases.release(holder, name)

    def cancel(self, holder: Hashable, name: AttemptName) -> None:
        waits = [each for each in self._asked if (each.holder, each.name) == (holder, name)]
        for asked in waits:
            self._asked.remove(asked)
        if waits or self.leases.cancel(holder, name) is not None:
            self._refuse(holder, name, "CANCELLED", "CANCELLED", "cancelled by its holder")

    def disconnect(self, holder: Hashable) -> None:
        """The holder's stream has ended: drops all that it holds or has asked for."""
        self._asked = [each for each in self._asked if each.holder != holder]
        self.leases.disconnect(holder)
