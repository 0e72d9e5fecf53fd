"""What the device knows of the batch slots: last tokens, right drafts, page tables."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import numpy as np
import numpy.typing as npt
import torch

from baton.engine.plan import PlanRow
from baton.kvcache.kv_groups import NO_PAGE

Changes = tuple[npt.NDArray[np.int64], npt.NDArray[np.int32]]
"""Entries of the slots' memory to write, and their values."""

_ALIGNMENT = 64
"""Alignment of the page tables, in entries."""


class DeviceSlots:
    """One block of memory, so that one upload and one kernel bring all that a launch changes of it.

    A sequence's page tables only grow, so that a row's change is its new end; what has left a window stays
    as it was, and is not looked at. A slot that has passed to another sequence is written whole. Nothing is
    ever read back.
    """

    def __init__(
        self, slots: int, width: int, spare_page: int, device: torch.device, groups: int = 1
    ) -> None:
        """`width`: pages of a table; `groups`: KV groups, each of which has one."""
        self._width, self._groups, self._spare = width, groups, spare_page
        aligned = -(-(slots + 1) // _ALIGNMENT) * _ALIGNMENT
        self._first = 2 * aligned
        self._marks = self._first + (slots + 1) * groups * width
        entries = self._marks + slots + 1
        self._memory = torch.full((entries,), spare_page, dtype=torch.int32, device=device)
        self.sampled = self._memory[: self._first].zero_()
        """What sampling writes: `last_token` and `right`."""
        self.last_token = self.sampled[: slots + 1]
        """int32 [slots + 1]: each slot's newest token; the last entry is for padding rows."""
        self.right = self.sampled[aligned : aligned + slots + 1]
        """int32 [slots + 1]: how many drafts of each slot's newest row were right, if it had any."""
        self.tables = self._memory[self._first : self._marks].view(slots + 1, groups, width)
        """int32 [slots + 1, groups, width]: page tables; those of padding rows name only the spare page."""
        self.nan_flags = self._memory[self._marks :].zero_().view(torch.float32)
        """float32 [slots + 1]: NaN where values of the slot's sequence were no numbers, else 0."""
        self._known: list[tuple[tuple[int, ...], ...]] = [((),) * groups] * slots
        self._unwritten = [False] * slots
        """Whether known tables may not be the device's."""
        self._ends = [-1] * slots
        """Where each slot's newest row ended: one that does not begin there is another sequence's, as is one
        whose last token comes from the host. Further choices of a prompt begin with its last chunk."""
        self._drafts: dict[int, range] = {}
        """Where the newest rows that had drafts or followed some may end, by slot: a row that begins there
        goes on behind those that were right."""
        self.unchanging = _changes([slots], [0])
        """Changes that no sequence sees: they write the padding row's token."""

    def changes(self, rows: Iterable[PlanRow], tokens: Mapping[int, int]) -> Changes | None:
        """Changes to write before these rows are computed; None: none. `tokens`: last tokens of slots that
        the device has not sampled itself.

        The caller must write it before the next step, in the order of the calls.
        """
        entries, values = list(tokens), list(tokens.values())
        begun: list[int] = []
        ends = self._ends
        # The host waits for this loop in each step. Mostly no row changes anything.
        for row in rows:
            slot, start = row.slot, row.start
            begins = (start != ends[slot] and start not in self._drafts.get(slot, ())) or slot in tokens
            ends[slot] = end = row.longest
            if row.drafts or row.ahead:
                self._drafts[slot] = range(start + 1, end)
            elif self._drafts:
                self._drafts.pop(slot, None)
            known, whole = self._known[slot], self._unwritten[slot]
            if whole or (row.tables is not known and row.tables != known):
                self._known[slot], self._unwritten[slot] = row.tables, False
                at = self._first + slot * self._groups * self._width
                for was, pages in zip(known, row.tables, strict=True):
                    same = _continues(was, pages)
                    begins = begins or not same
                    first = len(was) if same and not whole else 0
                    fresh = pages[first : self._width]
                    entries += range(at + first, at + first + len(fresh))
                    values += (self._spare if page == NO_PAGE else page for page in fresh)
                    at += self._width
            for other in row.sample:
                if other != slot:
                    begun.append(other)
            if begins:
                begun.append(slot)
        entries += (self._marks + slot for slot in begun)
        values += (0 for _ in begun)
        return _changes(entries, values) if values else None

    def forget(self, rows: Iterable[PlanRow]) -> None:
        """A step of these rows could not be launched. Its changes may not have been written: every page table
        is written again. Its sequences have failed: what comes to their slots next is new."""
        self._unwritten = [True] * len(self._unwritten)
        for row in rows:
            for slot in (row.slot, *row.sample):
                self._ends[slot] = -1
                self._drafts.pop(slot, None)

    def write(self, entries: torch.Tensor, values: torch.Tensor) -> None:
        self._memory.index_copy_(0, entries, values)

    def tokens(self, ids: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
        """ids, int32 [tokens], with the last token of the slot where they are negative."""
        return torch.where(ids < 0, self.last_token.index_select(0, slots), ids)

    def settle(
        self,
        ids: torch.Tensor,
        positions: torch.Tensor,
        lengths: torch.Tensor,
        token_slots: torch.Tensor,
        row_slots: torch.Tensor,
        drafts: torch.Tensor,
    ) -> None:
        """Replaces what a `HostBatch` could not know by what the steps before have sampled. All int32; ids,
        positions and token_slots [tokens], lengths and row_slots [rows]; drafts: at least one. On a GPU."""
        from baton.layers.kernels import draft_steps

        lanes = ids, positions, lengths, token_slots, row_slots, drafts
        draft_steps.settle(*lanes, self.right, self.last_token)

    def unsettle(self, slots: torch.Tensor) -> None:
        """slots, int64, have been read: if the sampling of their rows fails, no draft of these was right."""
        self.right.index_fill_(0, slots, 0)


def _continues(known: tuple[int, ...], pages: tuple[int, ...]) -> bool:
    """Whether a table is another one with more pages at its end, and some that are gone."""
    count = len(known)
    return pages[:count] == known or (
        len(pages) >= count
        and NO_PAGE in pages
        and all(new in (old, NO_PAGE) for old, new in zip(known, pages, strict=False))
    )


def _changes(entries: list[int], values: list[int]) -> Changes:
    return np.array(entries, np.int64), np.array(values, np.int32)
