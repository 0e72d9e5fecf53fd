"""The device's page tables and last tokens of batch slots, updated by changed entries only."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import numpy as np
import numpy.typing as npt
import torch

from baton.engine.plan import PlanRow

Changes = tuple[npt.NDArray[np.int64], npt.NDArray[np.int32]]
"""Entries of the slots' memory to write, and their values."""

_ALIGNMENT = 64
"""Of the page tables, in entries."""


class DeviceSlots:
    """One block of memory, so that one upload and one kernel bring all that a launch changes of it.

    A sequence's page table only grows, so that a row's change is its new end; a slot that has passed to
    another sequence is written whole. Nothing is ever read back.
    """

    def __init__(self, slots: int, width: int, spare_page: int, device: torch.device) -> None:
        self._width = width
        self._first = -(-(slots + 1) // _ALIGNMENT) * _ALIGNMENT
        entries = self._first + (slots + 1) * width
        self._memory = torch.full((entries,), spare_page, dtype=torch.int32, device=device)
        self.last_token = self._memory[: slots + 1].zero_()
        """int32 [slots + 1]: each slot's newest token; the last entry is for padding rows."""
        self.tables = self._memory[self._first :].view(slots + 1, width)
        """int32 [slots + 1, width]: page tables; that of padding rows names only the spare page."""
        self._known: list[tuple[int, ...]] = [()] * slots
        self.unchanging = _changes([slots], [0])
        """Changes that no sequence sees: they write the padding row's token."""

    def changes(self, rows: Iterable[PlanRow], tokens: Mapping[int, int]) -> Changes | None:
        """Changes to write before these rows are computed; None: none. `tokens`: last tokens of slots that
        the device has not sampled itself.

        The caller must write it before the next step, in the order of the calls.
        """
        entries, values = list(tokens), list(tokens.values())
        for row in rows:
            pages, known = row.pages, self._known[row.slot]
            if pages == known:
                continue
            count = len(known)
            first = count if pages[:count] == known else 0
            self._known[row.slot] = pages
            fresh = pages[first : self._width]
            start = self._first + row.slot * self._width + first
            entries += range(start, start + len(fresh))
            values += fresh
        return _changes(entries, values) if values else None

    def forget(self) -> None:
        """Earlier changes may not have been written: every row's page table is written again."""
        self._known = [()] * len(self._known)

    def write(self, entries: torch.Tensor, values: torch.Tensor) -> None:
        self._memory.index_copy_(0, entries, values)


def _changes(entries: list[int], values: list[int]) -> Changes:
    return np.array(entries, np.int64), np.array(values, np.int32)
