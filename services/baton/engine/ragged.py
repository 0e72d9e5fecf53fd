"""A step's rows as flat arrays on the host: inputs of kernels besides weights and pages."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from baton.engine.plan import PlanRow

Ints = npt.NDArray[np.int64]
Lane = npt.NDArray[np.int32]


@dataclass(slots=True)
class Ragged:
    """Rows of one token come first, then chunks; tokens in the order of their rows."""

    order: list[int]
    """Each row's place in the plan."""
    rows: list[PlanRow]
    counts: Ints
    """[rows]: tokens."""
    single: int
    """Rows of one token."""
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
    def of(cls, rows: Sequence[PlanRow]) -> Ragged:
        order = sorted(range(len(rows)), key=lambda i: rows[i].count > 1)
        ordered = [rows[i] for i in order]
        counts = np.array([row.count for row in ordered])
        ends = np.cumsum(counts)
        sampled = [(rows[i], end - 1) for i, end in sorted(zip(order, ends.tolist(), strict=True))]
        row_slots = np.array([row.slot for row in ordered], np.int32)
        return cls(
            order=order,
            rows=ordered,
            counts=counts,
            single=int((counts == 1).sum()),
            ids=np.array([token for row in ordered for token in (row.tokens or (-1,))], np.int32),
            positions=np.concatenate(
                [np.arange(row.start, row.start + row.count, dtype=np.int32) for row in ordered]
            ),
            token_slots=np.repeat(row_slots, counts),
            row_slots=row_slots,
            lengths=np.array([row.start + row.count for row in ordered], np.int32),
            starts=np.concatenate(([0], ends)).astype(np.int32),
            slots=np.array([slot for row, _ in sampled for slot in row.sample], np.int64),
            targets=np.array([row.start + row.count for row, _ in sampled for _ in row.sample], np.int64),
            last=np.array([at for row, at in sampled for _ in row.sample], np.int32),
        )

    @property
    def tokens(self) -> int:
        return len(self.ids)
