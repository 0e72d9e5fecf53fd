"""The host's mirror of a step's batch (`layers.batch.Batch`): its rows as arrays, made of the plan."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from baton.engine.plan import PlanRow

Ints = npt.NDArray[np.int64]
Lane = npt.NDArray[np.int32]


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
    last: Lane
    """[samples]: the token whose logits are sampled from."""

    @classmethod
    def of(cls, rows: Sequence[PlanRow]) -> HostBatch:
        counts = [row.count for row in rows]
        order = sorted(range(len(rows)), key=lambda i: counts[i] > 1)
        ids: list[int] = []
        positions: list[int] = []
        ends = [0]
        end_of = [0] * len(rows)
        ordered = [rows[i] for i in order]
        for i, row in zip(order, ordered, strict=True):
            if row.tokens is None:
                ids.append(-1)
                positions.append(row.start)
            else:
                ids += row.tokens
                positions += range(row.start, row.start + counts[i])
            ends.append(len(ids))
            end_of[i] = len(ids)
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
                [row.start + count for row, count in zip(rows, counts, strict=True) for _ in row.sample],
                np.int64,
            ),
            last=np.array(
                [end - 1 for row, end in zip(rows, end_of, strict=True) for _ in row.sample], np.int32
            ),
        )

    @property
    def tokens(self) -> int:
        return len(self.ids)


def longest_first(starts: Ints) -> tuple[Ints, list[int]] | None:
    """The order in which a GPU should begin rows of one token, and each row's place in it; None: the one they
    have. Attention begins rows in their order, and a long one that begins last makes all others wait."""
    if (starts[1:] <= starts[:-1]).all():
        return None
    order = np.argsort(-starts, kind="stable")
    places = np.empty_like(order)
    places[order] = np.arange(len(order))
    return order, places.tolist()
