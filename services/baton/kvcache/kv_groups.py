"""KV groups: layers that see the same positions, and so keep and give up the same pages.

Every group's page holds as many layers, so that all pages have the same number of bytes: one allocator and
one pool serve all groups, and a sequence has a page table for each. So does vLLM's hybrid KV cache manager.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

NO_PAGE = -1
"""In a page table, instead of a page that no later position sees."""


@dataclass(frozen=True, slots=True)
class KvGroup:
    window: int | None = None
    """A token sees this many positions, the last of them its own; None: all."""
    layers: tuple[int, ...] = ()
    """Layers of the model, in the order of their places in a page."""

    def sees(self, position: int, page_size: int) -> int:
        """Index of the first page that the token at `position` sees."""
        return 0 if self.window is None else max(0, position - self.window + 1) // page_size

    def keeps(self, position: int, page_size: int) -> int:
        """Index of the first page that a sequence keeps which goes on at `position`: the first that the last
        page border before it sees. So the sequence can also be used as a prefix, from that border on."""
        return self.sees((position - 1) // page_size * page_size, page_size)

    def peak(self, tokens: int, page_size: int, ahead: int) -> int:
        """Most pages at a time of a sequence that grows to `tokens` tokens, of which steps that have not
        retired compute at most `ahead`."""
        pages = -(-tokens // page_size)
        if self.window is None:
            return pages
        return min(pages, -(-(self.window - 1 + ahead) // page_size) + 2)


FULL = KvGroup()
"""All layers of a model without windows."""


def places(groups: Sequence[KvGroup], layers: int) -> list[tuple[int, int]]:
    """For each of so many layers: the index of its group, and its index in the group's pages."""
    found = [(0, layer) for layer in range(layers)]
    for index, group in enumerate(groups):
        for place, layer in enumerate(group.layers):
            found[layer] = index, place
    return found


def peak(groups: Sequence[KvGroup], tokens: int, page_size: int, ahead: int) -> int:
    """Most pages at a time, of all groups: see KvGroup.peak."""
    return sum(group.peak(tokens, page_size, ahead) for group in groups)


def longest(groups: Sequence[KvGroup], pages: int, limit: int, page_size: int, ahead: int) -> int:
    """Tokens of the longest sequence, of `limit` at most, that `pages` pages are enough for."""
    low, high = 0, limit
    while low < high:
        middle = (low + high + 1) // 2
        if peak(groups, middle, page_size, ahead) <= pages:
            low = middle
        else:
            high = middle - 1
    return low


def divide_layers(windows: Sequence[int | None]) -> tuple[KvGroup, ...]:
    """Groups of a model whose layers have these windows: those that see all first, then by window.

    A page holds the number of layers for which the places that stay empty and the page tables are fewest
    together: gpt-oss (18 + 18 layers) has two groups of 18, Gemma 3 with 5 + 29 layers seven of 5, one place
    of them empty.
    """
    counts = Counter(windows)

    def cost(size: int) -> tuple[int, int]:
        """Places and page tables, and places alone."""
        groups = sum(-(-count // size) for count in counts.values())
        return groups * (size + 1), groups * size

    size = min(range(1, max(counts.values()) + 1), key=cost)
    groups: list[KvGroup] = []
    for window in sorted(counts, key=lambda window: (window is not None, window or 0)):
        layers = [layer for layer, own in enumerate(windows) if own == window]
        groups += [
            KvGroup(window, tuple(layers[start : start + size])) for start in range(0, len(layers), size)
        ]
    return tuple(groups)
