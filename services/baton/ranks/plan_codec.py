"""Step plans as messages to followers: what they need of a plan, and of page tables only what has changed.

Rank 0 alone samples, so parameters, seeds, penalties and grammars stay with it. Messages are `marshal`'s:
fastest for integers and tuples, and the same in all processes of one interpreter.
"""

from __future__ import annotations

import marshal
from collections.abc import Sequence
from typing import Any

from baton.engine.plan import PlanRow, SlotInit, StepPlan
from baton.engine.sampling import SamplingParams

Table = tuple[int, ...]

_UNUSED = SamplingParams()


class PlanEncoder:
    """Remembers of each slot the page tables that its last message gave."""

    def __init__(self) -> None:
        self._sent: dict[int, tuple[Table, tuple[Table, ...]]] = {}

    def encode(self, plan: StepPlan) -> bytes:
        rows: list[tuple[Any, ...]] = []
        sent = self._sent
        for row in plan.rows:
            slot, pages, more = row.slot, row.pages, row.more_pages
            before = sent.get(slot)
            changes = None
            if before is None or before[0] != pages or before[1] != more:
                changes = _changes(before, pages, more)
                sent[slot] = pages, more
            if row.tokens is None:
                rows.append((slot, row.start, changes, row.sample if row.sample != (slot,) else None))
            else:
                wanted = None if row.prompt_logprobs is None else len(row.prompt_logprobs)
                rows.append((slot, row.start, changes, row.sample, tuple(row.tokens), wanted))
        inits = [(init.slot, init.last_token) for init in plan.inits if init.last_token is not None]
        return marshal.dumps((plan.number, rows, inits, plan.copies))


def _changes(
    before: tuple[Table, tuple[Table, ...]] | None, pages: Table, more: tuple[Table, ...]
) -> list[tuple[int, Table]]:
    """Of each table how many of its first pages stay, and those that follow."""
    old = ((),) * (1 + len(more)) if before is None else (before[0], *before[1])
    changes = []
    for was, now in zip(old, (pages, *more), strict=True):
        stay = len(was) if now[: len(was)] == was else 0
        changes.append((stay, now[stay:]))
    return changes


class PlanDecoder:
    """Makes plans of an encoder's messages, in their order."""

    def __init__(self) -> None:
        self._tables: dict[int, list[Table]] = {}

    def decode(self, message: bytes) -> StepPlan:
        number, rows, inits, copies = marshal.loads(message)
        return StepPlan(
            number,
            tuple(self._row(*row) for row in rows),
            tuple(SlotInit(slot, _UNUSED, 0, (), (), last) for slot, last in inits),
            copies,
        )

    def _row(
        self,
        slot: int,
        start: int,
        changes: Sequence[tuple[int, Table]] | None,
        sample: Table | None,
        tokens: Table | None = None,
        wanted: int | None = None,
    ) -> PlanRow:
        if changes is not None:
            before = self._tables.get(slot) or [()] * len(changes)
            self._tables[slot] = [
                was[:stay] + added for was, (stay, added) in zip(before, changes, strict=True)
            ]
        pages, *more = self._tables[slot]
        return PlanRow(
            slot,
            tokens,
            start,
            pages,
            (slot,) if sample is None else sample,
            prompt_logprobs=None if wanted is None else (0,) * wanted,
            more_pages=tuple(more),
        )
