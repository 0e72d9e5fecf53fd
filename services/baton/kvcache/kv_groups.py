"""KV groups: layers with equal cache declarations, which so keep and give up the same pages.

All pages have the same number of bytes: one allocator and one pool serve all groups, and a sequence has a
page table for each. A page holds as many of a group's layers as these bytes are enough for. So does vLLM's
hybrid KV cache manager.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from baton.layers.cache_spec import CacheSpec, Full, State

NO_PAGE = -1
"""In a page table, instead of a page that no later position sees."""


@dataclass(frozen=True, slots=True)
class KvGroup:
    spec: CacheSpec
    layers: tuple[int, ...] = ()
    """Layers of the model, in their order in a page."""


FULL = KvGroup(Full())
"""A group without windows."""


def layer_indices(groups: Sequence[KvGroup]) -> dict[int, tuple[int, int]]:
    """For each layer: the index of its group, and its index in the group's pages."""
    return {layer: (at, index) for at, group in enumerate(groups) for index, layer in enumerate(group.layers)}


def peak(groups: Sequence[KvGroup], tokens: int, page_size: int, ahead: int) -> int:
    """Most pages at a time, of all groups: see CacheSpec.peak."""
    return sum(group.spec.peak(tokens, page_size, ahead) for group in groups)


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


def divide_layers(
    specs: Sequence[CacheSpec], page_size: int = 1, itemsize: int = 4
) -> tuple[tuple[KvGroup, ...], int]:
    """Groups of a model whose layers have these declarations: those that see all first, then by window, then
    states. And the numbers, of `itemsize` bytes, that a page of `page_size` tokens holds of each of them: a
    multiple of `CacheSpec.values` of all groups but those of states.

    A page holds as many for which the slots that stay empty and the page tables are fewest together:
    gpt-oss (18 + 18 layers) has two groups of 18, Gemma 3 with 5 + 29 layers seven of 5, one slot of them
    empty. Where layers keep different numbers of values, a page has room for more of the smaller ones.
    """
    counts = Counter(specs)
    room = {spec: spec.room(page_size, itemsize) for spec in counts}
    of_tokens = [spec.values for spec in counts if not isinstance(spec, State)]
    least = min(of_tokens)
    common = math.lcm(*of_tokens)

    def cost(size: int) -> tuple[int, int]:
        """Values and page tables, and values alone; a page table counts as a layer of the smallest."""
        groups = sum(-(-count // (size // room[spec])) for spec, count in counts.items())
        return groups * (size + least), groups * size

    most = max(-(-count * room[spec] // common) for spec, count in counts.items())
    first = -(-max(room.values()) // common)
    size = min(range(first * common, most * common + 1, common), key=cost)
    groups: list[KvGroup] = []
    for spec in sorted(counts, key=_order):
        layers = [layer for layer, layer_spec in enumerate(specs) if layer_spec == spec]
        fit = size // room[spec]
        groups += [KvGroup(spec, tuple(layers[start : start + fit])) for start in range(0, len(layers), fit)]
    return tuple(groups), size


def _order(spec: CacheSpec) -> tuple[bool, bool, int]:
    return isinstance(spec, State), spec.window is not None, spec.window or 0
