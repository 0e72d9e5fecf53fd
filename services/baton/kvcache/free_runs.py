"""Free pages as runs of adjacent ids. What is taken together shall lie together: a transport copies a run at
once."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import pairwise


class FreeRuns:
    """Segregated fit (Wilson et al., "Dynamic storage allocation: a survey and critical review", 1995): runs
    sorted by the power of two that they reach, neighbours merged as they come back. A class hands out its
    youngest run first, so that a pool in light use touches little of its memory.
    """

    def __init__(self, total: int) -> None:
        """Pages 0 .. total - 1, all of them free."""
        self._ends: dict[int, int] = {}
        """Of each run: first page -> the page behind its last."""
        self._starts: dict[int, int] = {}
        """The same, the other way."""
        self._classes: list[dict[int, None]] = [{} for _ in range(total.bit_length())]
        """First pages of the runs of 2^class to 2^(class + 1) - 1 pages, oldest first."""
        self._count = 0
        self._insert(0, total)

    def __len__(self) -> int:
        """Pages."""
        return self._count

    def __iter__(self) -> Iterator[int]:
        """Each page once."""
        for start, end in self._ends.items():
            yield from range(start, end)

    def take(self, count: int) -> list[int]:
        """`count` of the free pages: in one run if there is one so long, else in the longest there are; each
        run's in ascending order. There must be so many."""
        taken: list[int] = []
        while count:
            start = self._fitting(count)
            if start is None:
                start = next(reversed(next(runs for runs in reversed(self._classes) if runs)))
            end = self._remove(start)
            cut = min(end, start + count)
            if cut < end:
                self._insert(cut, end)
            taken.extend(range(start, cut))
            count -= cut - start
        return taken

    def add(self, pages: Iterable[int]) -> None:
        """Pages that are not among the free ones."""
        ordered = sorted(pages)
        if not ordered:
            return
        breaks = [0, *(i + 1 for i, (a, b) in enumerate(pairwise(ordered)) if b != a + 1), len(ordered)]
        for first, behind in pairwise(breaks):
            start, end = ordered[first], ordered[behind - 1] + 1
            if start in self._starts:
                start = self._starts[start]
                self._remove(start)
            if end in self._ends:
                end = self._remove(end)
            self._insert(start, end)

    def _fitting(self, count: int) -> int | None:
        """The start of a run of at least `count` pages, the youngest in the lowest class that has one."""
        own = count.bit_length() - 1
        for start in reversed(self._classes[own]):
            if self._ends[start] - start >= count:
                return start
        for runs in self._classes[own + 1 :]:
            if runs:
                return next(reversed(runs))
        return None

    def _insert(self, start: int, end: int) -> None:
        self._ends[start] = end
        self._starts[end] = start
        self._classes[(end - start).bit_length() - 1][start] = None
        self._count += end - start

    def _remove(self, start: int) -> int:
        end = self._ends.pop(start)
        del self._starts[end]
        del self._classes[(end - start).bit_length() - 1][start]
        self._count -= end - start
        return end
