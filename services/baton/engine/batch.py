"""The host's mirror of a step's batch (`layers.batch.Batch`): its rows as arrays, made of the plan."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from baton.engine.plan import PlanRow
from baton.kvcache.page_keys import is_placeholder

Ints = npt.NDArray[np.int64]
Lane = npt.NDArray[np.int32]


@dataclass(slots=True)
class DraftRound:
    """The positions behind the first, second, ... draft of each row that has so many. What is sampled there
    counts if every draft up to there was right."""

    of: Ints
    """[n]: the rows' indices among the step's samples."""
    drafts: Ints
    """[n]: the draft in front of each position."""


@dataclass(slots=True)
class HostBatch:
    """Rows of one token come first, then chunks; tokens in the order of their rows."""

    order: list[int]
    """Each row's place in the plan."""
    rows: list[PlanRow]
    single: int
    """Rows of one token."""
    longest: int
    """Tokens of the longest row."""
    ids: Lane
    """[tokens]: -1: the last token of the row's slot."""
    positions: Lane
    token_slots: Lane
    row_slots: Lane
    """[rows]"""
    lengths: Lane
    """[rows]: keys of each row's last token."""
    starts: Lane
    """[rows + 1]: where each row's tokens start."""
    slots: Ints
    """[samples], in the order of the plan: where what is sampled goes to."""
    targets: Ints
    """[samples]: positions of what is sampled."""
    rounds: list[DraftRound]
    wanted: Lane
    """[samples, and those of the rounds]: the tokens whose logits are sampled from."""

    @classmethod
    def of(cls, rows: Sequence[PlanRow]) -> HostBatch:
        counts = [row.count for row in rows]
        order = sorted(range(len(rows)), key=lambda i: counts[i] > 1)
        ids: list[int] = []
        positions: list[int] = []
        ends = [0]
        wanted_of = [0] * len(rows)
        """The token that each row first samples from."""
        ordered = [rows[i] for i in order]
        for i, row in zip(order, ordered, strict=True):
            if row.tokens is None:
                wanted_of[i] = len(ids)
                ids += (-1, *row.drafts)
            else:
                ids += [0 if is_placeholder(t) else t for t in row.tokens] if row.images else row.tokens
                wanted_of[i] = len(ids) - 1
            positions += range(row.start, row.start + counts[i])
            ends.append(len(ids))
        wanted = [at for row, at in zip(rows, wanted_of, strict=True) for _ in row.sample]
        rounds = _rounds(rows, wanted) if any(row.drafts for row in rows) else []
        row_slots = np.array([row.slot for row in ordered], np.int32)
        starts = np.array(ends, np.int32)
        return cls(
            order=order,
            rows=ordered,
            single=counts.count(1),
            longest=max(counts),
            ids=np.array(ids, np.int32),
            positions=np.array(positions, np.int32),
            token_slots=row_slots.repeat(np.diff(starts)),
            row_slots=row_slots,
            lengths=np.array([row.start + row.count for row in ordered], np.int32),
            starts=starts,
            slots=np.array([slot for row in rows for slot in row.sample], np.int64),
            targets=np.array(
                [
                    row.start + count - len(row.drafts)
                    for row, count in zip(rows, counts, strict=True)
                    for _ in row.sample
                ],
                np.int64,
            ),
            rounds=rounds,
            wanted=np.array(wanted, np.int32),
        )

    @property
    def tokens(self) -> int:
        return len(self.ids)

    def samples(self) -> tuple[Ints, Ints]:
        """Slots and positions of the samples and of those of the rounds."""
        if not self.rounds:
            return self.slots, self.targets
        slots, targets = [self.slots], [self.targets]
        for depth, each in enumerate(self.rounds, 1):
            slots.append(self.slots[each.of])
            targets.append(self.targets[each.of] + depth)
        return np.concatenate(slots), np.concatenate(targets)


def _rounds(rows: Sequence[PlanRow], wanted: list[int]) -> list[DraftRound]:
    """Adds to `wanted`, which holds the tokens that the rows first sample from, those behind their drafts."""
    drafted, sample = [], 0
    for row in rows:
        if row.drafts:
            drafted.append((sample, wanted[sample], row.drafts))
        sample += len(row.sample)
    rounds = []
    for depth in range(max(len(drafts) for _, _, drafts in drafted)):
        part = [each for each in drafted if len(each[2]) > depth]
        of, ids = [sample for sample, _, _ in part], [drafts[depth] for _, _, drafts in part]
        rounds.append(DraftRound(np.array(of, np.int64), np.array(ids, np.int64)))
        wanted += [first + depth + 1 for _, first, _ in part]
    return rounds


def longest_first(starts: Ints) -> tuple[Ints, list[int]] | None:
    """The order in which a GPU should begin rows of one token, and each row's place in it; None: the one they
    have. Attention begins rows in their order, and a long one that begins last makes all others wait."""
    if (starts[1:] <= starts[:-1]).all():
        return None
    order = np.argsort(-starts, kind="stable")
    places = np.empty_like(order)
    places[order] = np.arange(len(order))
    return order, places.tolist()
