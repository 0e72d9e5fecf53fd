"""A pool as a picture: what each page is used for, in cells of equal size, run-length encoded."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import IntEnum
from itertools import pairwise

import numpy as np

from baton.kvcache.page_allocator import PageState


class PageUse(IntEnum):
    """The allocator's state of a page, and two uses that a hand-off makes of pages in these states."""

    FREE = PageState.FREE
    OWNED = PageState.OWNED
    CACHED = PageState.CACHED
    QUARANTINED = PageState.QUARANTINED
    LEASED = 4
    """Announced to a decode node, which may still copy it: owned or cached."""
    PULLING = 5
    """A copy from a peer's pool writes it: owned."""


@dataclass(frozen=True, slots=True)
class CellRun:
    """Adjacent cells with the same contents."""

    cells: int
    pages: tuple[int, ...]
    """Pages of each use in one of these cells, in the order of PageUse."""


@dataclass(frozen=True, slots=True)
class PageMap:
    total: int
    pages_per_cell: int
    """The last cell may have fewer."""
    runs: tuple[CellRun, ...]


def mark(uses: bytearray, pages: Iterable[int], use: PageUse) -> None:
    """Overwrites what these pages are used for, unless they are free or quarantined."""
    for page in pages:
        if uses[page] in (PageUse.OWNED, PageUse.CACHED, PageUse.LEASED):
            uses[page] = use


def page_map(uses: bytes | bytearray, max_cells: int) -> PageMap:
    """The map of a pool whose page `i` is used for `uses[i]` (a PageUse), in at most `max_cells` >= 1 cells.

    Cells of several pages say how many of them are used for what, so nothing is lost but the order of pages
    inside a cell.
    """
    total = len(uses)
    per_cell = -(-total // max_cells)
    cells = -(-total // per_cell)
    padded = np.full(cells * per_cell, len(PageUse), np.uint8)  # pages behind the last have no use
    padded[:total] = np.frombuffer(uses, np.uint8)
    grid = padded.reshape(cells, per_cell)
    counts = np.stack([(grid == use).sum(axis=1) for use in PageUse], axis=1)
    starts = np.flatnonzero(np.any(counts[1:] != counts[:-1], axis=1)) + 1
    edges = [0, *starts.tolist(), cells]
    runs = (CellRun(end - start, tuple(counts[start].tolist())) for start, end in pairwise(edges))
    return PageMap(total, per_cell, tuple(runs))
