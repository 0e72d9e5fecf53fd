"""Page tables of all batch slots on the device, kept up to date by what changes."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import numpy.typing as npt
import torch

from baton.engine.plan import PlanRow


class PageTables:
    """int32 [slots + 1, width] in `table`; the last row belongs to padding and names the spare page alone.

    A sequence's table only grows, so that a row's change is its new end; a slot that has passed to another
    sequence is written whole. Nothing is ever read back.
    """

    def __init__(self, slots: int, width: int, spare_page: int, device: torch.device) -> None:
        self.table = torch.full((slots + 1, width), spare_page, dtype=torch.int32, device=device)
        self._width = width
        self._known: list[tuple[int, ...]] = [()] * slots

    def changes(self, rows: Iterable[PlanRow]) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int32]] | None:
        """Entries of the flattened table to write, and their values; None: all is known.

        The caller must write them before the next step, in the order of the calls.
        """
        entries: list[int] = []
        values: list[int] = []
        for row in rows:
            pages, known = row.pages, self._known[row.slot]
            if pages == known:
                continue
            count = len(known)
            first = count if pages[:count] == known else 0
            self._known[row.slot] = pages
            fresh = pages[first : self._width]
            start = row.slot * self._width + first
            entries += range(start, start + len(fresh))
            values += fresh
        if not values:
            return None
        return np.array(entries, np.int64), np.array(values, np.int32)

    def forget(self) -> None:
        """What was to be written may not have been: every row is written anew."""
        self._known = [()] * len(self._known)

    def write(self, entries: torch.Tensor, values: torch.Tensor) -> None:
        self.table.view(-1).index_copy_(0, entries, values)
