"""Who may enter the batch: the waiting queue, batch slots and page reservations.

Reservations are numbers, not pages: `KvCache.available` (free or evictable pages) never falls below the sum
of all reservations, so an admitted prompt always finds its pages and two pools cannot deadlock on each other.
"""

from __future__ import annotations

import bisect
import heapq
from collections.abc import Callable, Iterator

from baton.engine.request import Sequence
from baton.kvcache import KvCache

POLICIES = ("fcfs", "lpm", "priority")

LPM_WINDOW = 64
"""Waiting sequences that longest-prefix-match looks at; beyond it, first come first served."""


class WaitingQueue:
    """Sequences that wait for admission, in the order of a policy.

    Those that had been admitted before (retracted or failed hand-offs) keep their arrival number and so
    come first under `fcfs`.
    """

    def __init__(self, policy: str, match_length: Callable[[Sequence], int]) -> None:
        if policy not in POLICIES:
            raise ValueError(f"unknown scheduling policy {policy!r}; choose {', '.join(POLICIES)}")
        self._policy = policy
        self._match_length = match_length
        self._items: list[Sequence] = []

    def _key(self, sequence: Sequence) -> tuple[int, tuple[int, int]]:
        return (-sequence.request.priority if self._policy == "priority" else 0, sequence.age)

    def add(self, sequence: Sequence) -> None:
        bisect.insort(self._items, sequence, key=self._key)

    def remove(self, sequence: Sequence) -> None:
        self._items.remove(sequence)

    def __len__(self) -> int:
        return len(self._items)

    def __iter__(self) -> Iterator[Sequence]:
        return iter(list(self._items))

    def in_order(self) -> list[Sequence]:
        """A snapshot, first to be admitted first."""
        if self._policy != "lpm" or len(self._items) < 2:
            return list(self._items)
        # The oldest goes first whatever it matches: a stream of well-cached prompts cannot starve it.
        head, window, rest = self._items[:1], self._items[1:LPM_WINDOW], self._items[LPM_WINDOW:]
        return head + sorted(window, key=lambda s: (-self._match_length(s), s.age)) + rest


class Slots:
    """Batch slots; one returns to the pool when the last step that uses it has retired (design rule 5)."""

    def __init__(self, count: int) -> None:
        self.count = count
        self._free = list(range(count))
        heapq.heapify(self._free)
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
    """The sum of pages promised and not yet taken."""

    def __init__(self, cache: KvCache) -> None:
        self._cache = cache
        self.total = 0

    @property
    def headroom(self) -> int:
        """Pages that may be promised or taken beyond all promises."""
        return self._cache.available - self.total

    def set(self, sequence: Sequence, pages: int) -> None:
        self.total += pages - sequence.reserved
        sequence.reserved = pages

    def use(self, sequence: Sequence, pages: int) -> None:
        """`pages` have been taken on behalf of the sequence, from its promise as far as it goes."""
        self.set(sequence, max(0, sequence.reserved - pages))
