"""Pages of this worker's prefix tree, lent to other workers. Pure."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass

from baton.engine.scheduler import Scheduler
from baton.handoff.lease import Lease, Leases
from baton.handoff.messages import AttemptName, PrefillFailed
from baton.kvcache import NO_PAGE, BlockTable, KvCacheManager

LEND_SECONDS = 30.0
"""Pages are lent for so long at most; a pull takes much less."""
MOST_LENT = 0.5
"""Part of the pool that may be lent to one holder before it gets no more."""


@dataclass(slots=True, eq=False, kw_only=True)
class CacheLease(Lease):
    """Cached pages, locked in the tree. Nobody writes them any more."""

    cache: KvCacheManager
    holding: BlockTable

    @property
    def importance(self) -> tuple[int, int]:
        return 0, 0

    @property
    def tables(self) -> Sequence[Sequence[int]]:
        return self.holding.tables

    def free(self) -> None:
        self.cache.release(self.holding, 0)


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
        """Of leases that were released."""

    def lend(
        self, holder: Hashable, name: AttemptName, tokens: Sequence[int], namespace: str, now: float
    ) -> None:
        """Lends the longest beginning of `tokens` that is cached, in whole pages, or says why not."""
        self._scheduler.cache_pending_prefixes()
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
            holding=cache.hold(key, namespace, rows, position=rows * size),
        )
        if self._scheduler.reservations.headroom < 0:
            lease.free()
            self._refuse(holder, name, "RESOURCE_EXHAUSTED", "NO_PAGES", "the pages are promised to prompts")
        elif len(lease.holding) < rows or self._lacks(lease):
            # A window group has given up what the last page border sees.
            lease.free()
            self._refuse(
                holder, name, "NOT_FOUND", "NOTHING_CACHED", "the prompt is cached here only in part"
            )
        elif self.leases.begin(lease, now):
            self.leases.announce(lease, lease.tokens, True, now, content=cache.content(lease.holding))
            self.leases.complete(lease, lease.holding.held, now)

    def _lacks(self, lease: CacheLease) -> bool:
        pairs = zip(lease.tables, lease.holding.dropped, strict=True)
        return any(NO_PAGE in table[dropped:] for table, dropped in pairs)

    def _refuse(self, holder: Hashable, name: AttemptName, code: str, reason: str, message: str) -> None:
        self.leases.outputs.append((holder, PrefillFailed(name, code, reason, message)))

    def release(self, holder: Hashable, name: AttemptName) -> None:
        lease = self.leases.running.get(name)
        if lease is not None and lease.holder == holder:
            self.lent_pages += lease.pages
        self.leases.release(holder, name)

    def cancel(self, holder: Hashable, name: AttemptName) -> None:
        lease = self.leases.cancel(holder, name)
        if lease is not None:
            self.leases.say_failed(lease, "CANCELLED", "CANCELLED", "cancelled by its holder")
