"""What admission counts: batch slots, and pages that are reserved."""

from __future__ import annotations

import heapq

from baton.engine.request import Sequence
from baton.kvcache import KvCacheManager


class BatchSlots:
    """Batch slots. A slot becomes free when the last step that uses it has retired (design rule 5)."""

    def __init__(self, count: int) -> None:
        self.count = count
        self._free = list(range(count))
        self._leaving: list[tuple[int, int]] = []
        self._retired = 0

    @property
    def free(self) -> int:
        return len(self._free)

    @property
    def in_use(self) -> int:
        return self.count - len(self._free)

    def is_free(self, slot: int) -> bool:
        return slot in self._free

    def take(self) -> int:
        return heapq.heappop(self._free)

    def give_back(self, slot: int, after_step: int) -> None:
        heapq.heappush(self._leaving, (after_step, slot))
        self.retire(self._retired)

    def retire(self, step: int) -> None:
        self._retired = max(self._retired, step)
        while self._leaving and self._leaving[0][0] <= self._retired:
            heapq.heappush(self._free, heapq.heappop(self._leaving)[1])


class Reservations:
    """The sum of pages reserved and not yet taken."""

    def __init__(self, cache: KvCacheManager) -> None:
        self._cache = cache
        self.total = 0

    @property
    def headroom(self) -> int:
        """Pages that may be reserved or taken beyond all reservations."""
        return self._cache.available - self.total

    def set(self, sequence: Sequence, pages: int) -> None:
        self.total += pages - sequence.reserved
        sequence.reserved = pages

    def use(self, sequence: Sequence, pages: int) -> None:
        """The sequence has taken `pages` pages, from its reservation as far as that goes."""
        self.set(sequence, max(0, sequence.reserved - pages))
