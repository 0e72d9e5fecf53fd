"""Sequences that wait for admission, and scheduling policies."""

from __future__ import annotations

import bisect
from collections.abc import Callable, Iterator

from baton.engine.request import Sequence

POLICIES = ("fcfs", "lpm", "priority")
"""Orders of requests of equal priority; a higher one always goes first. "priority" is the same as "fcfs"."""

LPM_WINDOW = 64
"""Number of waiting sequences that longest prefix match looks at; beyond it, first come first served."""


class WaitingQueue:
    """Sequences that wait for admission, in the order of a policy.

    Those that had been admitted before (retracted or failed hand-offs) keep their arrival number and so
    come first under `fcfs`.
    """

    def __init__(self, policy: str, cached_pages: Callable[[Sequence], int]) -> None:
        if policy not in POLICIES:
            raise ValueError(f"unknown scheduling policy {policy!r}; choose {', '.join(POLICIES)}")
        self._policy = policy
        self._cached_pages = cached_pages
        self._items: list[Sequence] = []

    def add(self, sequence: Sequence) -> None:
        bisect.insort(self._items, sequence, key=lambda s: s.rank)

    def remove(self, sequence: Sequence) -> None:
        self._items.remove(sequence)

    def __len__(self) -> int:
        return len(self._items)

    def __iter__(self) -> Iterator[Sequence]:
        return iter(list(self._items))

    def in_order(self) -> list[Sequence]:
        """A snapshot, first to be admitted first."""
        if self._policy != "lpm":
            return list(self._items)
        # The oldest always goes first, so that a stream of well-cached prompts cannot starve it.
        head, window, rest = self._items[:1], self._items[1:LPM_WINDOW], self._items[LPM_WINDOW:]
        window.sort(key=lambda s: (-s.request.priority, -self._cached_pages(s), s.rank))
        return head + window + rest
