"""Every page of a pool in exactly one state: free, owned, cached or quarantined.

Free pages are kept as runs of adjacent ids, because transports copy adjacent pages at once.
"""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Iterable, Iterator, MutableSequence
from dataclasses import dataclass
from enum import IntEnum
from itertools import pairwise


class FreeRuns:
    """Segregated fit (Wilson et al., "Dynamic storage allocation: a survey and critical review", 1995): runs
    sorted by the power of two that they reach, neighbours merged as they come back. A class hands out its
    youngest run first, so that a pool in light use touches little of its memory.
    """

    def __init__(self, total: int) -> None:
        """Pages 0 .. total - 1, all of them free."""
        self._ends: dict[int, int] = {}
        """Runs of free pages: first page -> the page behind the last."""
        self._starts: dict[int, int] = {}
        """Starts of runs by their ends."""
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
        """Takes `count` free pages: from one run if there is one long enough, else from the longest ones;
        ascending within a run. There must be as many."""
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
        size_class = count.bit_length() - 1
        for start in reversed(self._classes[size_class]):
            if self._ends[start] - start >= count:
                return start
        for runs in self._classes[size_class + 1 :]:
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


class OutOfPages(Exception):
    """Fewer pages are free than were asked for; nothing was taken."""


class AccountingError(Exception):
    """A rule of page ownership was broken. Always a bug in the caller; nothing was changed."""


def require(true: bool, message: str) -> None:
    if not true:
        raise AccountingError(message)


class PageState(IntEnum):
    FREE = 0
    OWNED = 1
    """Held by one sequence, which may write it."""
    CACHED = 2
    """Held by the prefix tree; final."""
    QUARANTINED = 3
    """Something may still write it, for all that can be proven. Not used again before the contrary is."""


_STATES = tuple(PageState)


@dataclass(frozen=True, slots=True)
class PageCounts:
    """total = free + owned + cached + quarantined."""

    total: int
    free: int
    owned: int
    cached: int
    quarantined: int


class PageAllocator:
    """States and generations of the pages 0 .. total - 1.

    A page's generation is the number of times it was taken. Peers that copy pages compare it after the copy,
    so it grows in `take`, before anyone can enqueue a write to the page.

    Methods that move pages check all of them first and raise AccountingError, having changed nothing, when
    one is out of range, repeated or in another state than the method expects.
    """

    def __init__(self, total: int, generations: MutableSequence[int] | None = None) -> None:
        """`generations`: where to keep them, `total` of them; e.g. a "Q" memoryview over shared memory."""
        if total < 1:
            raise ValueError(f"a pool needs at least one page, not {total}")
        if generations is None:
            generations = array("Q", bytes(8 * total))
        if len(generations) != total:
            raise ValueError(f"{len(generations)} generations for {total} pages")
        self._generations = generations
        self._states = bytearray(total)
        self._free = FreeRuns(total)
        self._counts = [0] * len(PageState)
        self._counts[PageState.FREE] = total

    def take(self, count: int) -> list[int]:
        """free -> owned, adjacent ones if there are. Raises OutOfPages; ValueError for a negative count."""
        if count < 0:
            raise ValueError(f"cannot take {count} pages")
        if count > len(self._free):
            raise OutOfPages(f"{count} pages wanted, {len(self._free)} free")
        pages = self._free.take(count)
        for page in pages:
            self._generations[page] += 1
        self._set(pages, PageState.FREE, PageState.OWNED)
        return pages

    def give_back(self, pages: Iterable[int]) -> None:
        """owned -> free"""
        self._free.add(self._move(pages, PageState.OWNED, PageState.FREE))

    def to_cached(self, pages: Iterable[int]) -> None:
        """owned -> cached"""
        self._move(pages, PageState.OWNED, PageState.CACHED)

    def drop_cached(self, pages: Iterable[int]) -> None:
        """cached -> free"""
        self._free.add(self._move(pages, PageState.CACHED, PageState.FREE))

    def quarantine(self, pages: Iterable[int]) -> None:
        """owned -> quarantined"""
        self._move(pages, PageState.OWNED, PageState.QUARANTINED)

    def recover(self, pages: Iterable[int]) -> None:
        """quarantined -> owned"""
        self._move(pages, PageState.QUARANTINED, PageState.OWNED)

    def generation(self, page: int) -> int:
        """Raises IndexError when the page is out of range."""
        if page < 0:
            raise IndexError(f"page {page} is negative")
        return self._generations[page]

    def state(self, page: int) -> PageState:
        return _STATES[self._states[page]]

    @property
    def free(self) -> int:
        return len(self._free)

    def states(self) -> bytearray:
        """A copy of all states, a PageState a page."""
        return bytearray(self._states)

    def counts(self) -> PageCounts:
        free, owned, cached, quarantined = self._counts
        return PageCounts(len(self._states), free, owned, cached, quarantined)

    def check(self) -> None:
        """Recounts everything, O(total). Raises AccountingError."""
        found = Counter(self._states)
        for state in PageState:
            counted = self._counts[state]
            require(found[state] == counted, f"{found[state]} pages are {state.name}, counted {counted}")
        free = list(self._free)
        same = len(free) == len(set(free)) == len(self._free) == found[PageState.FREE]
        require(same, f"{len(free)} pages in free runs, {found[PageState.FREE]} are free")
        wrong = [page for page in free if self._states[page] != PageState.FREE]
        require(not wrong, f"pages {wrong} are in a free run and not free")

    def _move(self, pages: Iterable[int], source: PageState, target: PageState) -> list[int]:
        moved = list(pages)
        step = f"{source.name} -> {target.name}"
        seen: set[int] = set()
        for page in moved:
            if not 0 <= page < len(self._states):
                raise AccountingError(f"page {page} is not one of the pool's {len(self._states)}")
            if self._states[page] != source:
                raise AccountingError(f"page {page} is {self.state(page).name}: not {step}")
            if page in seen:
                raise AccountingError(
                    f"page {page} is named twice on its way from {source.name} to {target.name}"
                )
            seen.add(page)
        self._set(moved, source, target)
        return moved

    def _set(self, pages: list[int], source: PageState, target: PageState) -> None:
        for page in pages:
            self._states[page] = target
        self._counts[source] -= len(pages)
        self._counts[target] += len(pages)
