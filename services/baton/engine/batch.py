"""The host's mirror of a step's batch (`layers.batch.Batch`): its rows as arrays, made of the plan."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from baton.engine.image_spans import looks_at, rotary_shift
from baton.engine.plan import PlanRow
from baton.kvcache.page_keys import is_placeholder

Ints = npt.NDArray[np.int64]
Lane = npt.NDArray[np.int32]


@dataclass(slots=True)
class HostBatch:
    """Rows of one token come first, then chunks; tokens in the order of their rows.

    Where a row follows drafts that have not been read (PlanRow.ahead), only the device knows its positions:
    `DeviceSlots.settle` adds how many of those drafts were right.
    """

    order: list[int]
    """Each row's index in the plan."""
    rows: list[PlanRow]
    single: int
    """Rows of one token."""
    longest: int
    """Tokens of the longest row."""
    follows: bool
    """Whether any row follows drafts that have not been read."""
    ids: Lane
    """[tokens]: -1: the last token of the row's slot; -2 - n: entry n of `drafts`, at least."""
    positions: Lane
    """[tokens]: -1 - p: p, at least."""
    token_slots: Lane
    row_slots: Lane
    """[rows]"""
    lengths: Lane
    """[rows]: keys of each row's last token; -n: n, at least."""
    starts: Lane
    """[rows + 1]: where each row's tokens start."""
    drafts: Lane
    """Drafts of the rows that follow unread ones, and of those whose drafts only the device knows."""
    guesses: Ints
    """[2, n]: entries of `drafts` that only the device knows, and which of its guesses each is."""
    slots: Ints
    """[samples], in the order of the plan: where what is sampled goes to."""
    targets: Ints
    """[samples]: position of the first token that is sampled, at least."""
    depths: Ints
    """[samples]: tokens that are sampled, one behind the other: more than one where there are drafts."""
    logits_indices: Lane
    """[sum of depths]: the tokens whose logits are sampled from."""

    @classmethod
    def of(cls, rows: Sequence[PlanRow]) -> HostBatch:
        counts = [row.count for row in rows]
        order = sorted(range(len(rows)), key=lambda i: counts[i] > 1)
        ids: list[int] = []
        positions: list[int] = []
        drafts: list[int] = []
        unknown: list[int] = []
        ends = [0]
        last_indices = [0] * len(rows)
        """The token that each row first samples from."""
        ordered = [rows[i] for i in order]
        for i, row in zip(order, ordered, strict=True):
            start, count = row.start, counts[i]
            if row.tokens is None:
                last_indices[i] = len(ids)
                if row.ahead or (row.drafts and row.drafts[0] < 0):
                    first = -2 - len(drafts)
                    ids += (-1, *range(first, first + 1 - count, -1))
                    if not row.ahead:
                        unknown += range(len(drafts), len(drafts) + len(row.drafts))
                    drafts += row.drafts
                else:
                    ids += (-1, *row.drafts)
            else:
                ids += [0 if is_placeholder(t) else t for t in row.tokens] if row.images else row.tokens
                last_indices[i] = len(ids) - 1
            known = range(start, start + count)
            positions += [-1 - position for position in known] if row.ahead else known
            ends.append(len(ids))
        ahead = [row.ahead for row in ordered]
        depths = [
            count if row.tokens is None else 1
            for row, count in zip(rows, counts, strict=True)
            for _ in row.sample
        ]
        firsts = [at for row, at in zip(rows, last_indices, strict=True) for _ in row.sample]
        logits_indices = np.array(firsts, np.int32)
        if max(depths, default=0) > 1:
            logits_indices = logits_indices.repeat(depths) + _within(depths).astype(np.int32)
        row_slots = np.array([row.slot for row in ordered], np.int32)
        starts = np.array(ends, np.int32)
        lengths = np.array([row.start + row.count for row in ordered], np.int32)
        return cls(
            order=order,
            rows=ordered,
            single=counts.count(1),
            longest=max(counts),
            follows=any(ahead),
            ids=np.array(ids, np.int32),
            positions=np.array(positions, np.int32),
            token_slots=row_slots.repeat(np.diff(starts)),
            row_slots=row_slots,
            lengths=np.where(ahead, -lengths, lengths),
            starts=starts,
            drafts=np.array(drafts, np.int32),
            guesses=np.array([unknown, [-1 - drafts[at] for at in unknown]], np.int64),
            slots=np.array([slot for row in rows for slot in row.sample], np.int64),
            targets=np.array(
                [
                    row.start + (1 if row.tokens is None else count)
                    for row, count in zip(rows, counts, strict=True)
                    for _ in row.sample
                ],
                np.int64,
            ),
            depths=np.array(depths, np.int64),
            logits_indices=logits_indices,
        )

    @property
    def tokens(self) -> int:
        return len(self.ids)

    @property
    def looks(self) -> bool:
        """Whether any of its tokens is one of an image."""
        return any(looks_at(row.images, row.start, row.count) for row in self.rows if row.images)

    @property
    def shifts(self) -> Lane:
        """[tokens]: by how much the rotation of tokens of text is behind their positions, for images."""
        return row_shifts(self.rows).repeat(np.diff(self.starts))

    @property
    def chained(self) -> bool:
        """Whether samples follow on others, or on unread ones."""
        return self.follows or len(self.logits_indices) > len(self.slots)


def row_shifts(rows: Sequence[PlanRow]) -> Lane:
    """[rows]: see `HostBatch.shifts`."""
    return np.array([rotary_shift(row.images, row.start) if row.images else 0 for row in rows], np.int32)


def _within(depths: Sequence[int]) -> Ints:
    """0, 1, ... of each sample."""
    ends = np.cumsum(np.array(depths, np.int64))
    return np.arange(int(ends[-1]), dtype=np.int64) - (ends - depths).repeat(depths)


def longest_first(starts: Ints) -> tuple[Ints, list[int]] | None:
    """The order in which a GPU should begin rows of one token, and each row's index in it; None: the one they
    have. Attention begins rows in their order, and a long one that begins last makes all others wait."""
    if (starts[1:] <= starts[:-1]).all():
        return None
    order = np.argsort(-starts, kind="stable")
    inverse = np.empty_like(order)
    inverse[order] = np.arange(len(order))
    return order, inverse.tolist()
