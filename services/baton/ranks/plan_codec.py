"""Step plans as messages to followers: what they need of a plan, and of page tables only what has changed.

Rank 0 alone samples, so parameters, seeds, penalties and grammars stay with it. Messages are `marshal`'s:
fastest for integers and tuples, and the same in all processes of one interpreter.
"""

from __future__ import annotations

import marshal
from collections.abc import Sequence
from typing import Any

from baton.engine.plan import PlanRow, Pooling, SlotInit, StepPlan
from baton.engine.sampling import SamplingParams

Table = tuple[int, ...]

_UNUSED = SamplingParams()


class PlanEncoder:
    """Remembers of each slot the page tables that its last message gave, and the rows of the last plan."""

    def __init__(self) -> None:
        self._sent: dict[int, tuple[Table, tuple[Table, ...]]] = {}
        self._slots: list[int] = []
        self._next: list[int] = []
        """Where the last plan's rows would go on; empty if one had tokens of its own."""

    def encode(self, plan: StepPlan) -> bytes:
        for init in plan.inits:
            self._forget(init.slot)
        inits = [(init.slot, init.last_token) for init in plan.inits if init.last_token is not None]
        rows = self._rows(plan.rows)
        return marshal.dumps((plan.number, rows, inits, plan.copies))

    def _rows(self, rows: Sequence[PlanRow]) -> list[tuple[Any, ...]] | tuple[Any, ...]:
        """A tuple: the rows of the plan before, each one token on; whose tables have changed, and how."""
        slots, starts, decode = [row.slot for row in rows], [row.start for row in rows], True
        for row in rows:
            if row.tokens is not None or row.sample != (row.slot,):
                decode = False
                break
        again = decode and starts == self._next and slots == self._slots
        self._slots, self._next = slots, [start + 1 for start in starts] if decode else []
        if not again:
            for row in rows:
                if row.tokens is not None:
                    self._forget(row.slot)
            return [self._row(row) for row in rows]
        changes = []
        for at, row in enumerate(rows):
            sent = self._sent.get(row.slot)
            # A table that has not changed is mostly the same object: see Holding.page_tables.
            if sent is None or sent[0] is not row.pages or sent[1] != row.more_pages:
                found = self._changed(row)
                if found is not None:
                    changes.append((at, found))
        return tuple(changes)

    def _forget(self, slot: int) -> None:
        """Another sequence may follow in this slot: its tables are other objects, even if they are equal.
        Attention knows a row that goes on by its table."""
        self._sent.pop(slot, None)

    def _row(self, row: PlanRow) -> tuple[Any, ...]:
        changes = self._changed(row)
        if row.tokens is None:
            return row.slot, row.start, changes, row.sample if row.sample != (row.slot,) else None
        wanted = None if row.prompt_logprobs is None else len(row.prompt_logprobs)
        pooled = row.pooling is not None
        return row.slot, row.start, changes, row.sample, tuple(row.tokens), wanted, pooled

    def _changed(self, row: PlanRow) -> list[tuple[int, Table]] | None:
        before = self._sent.get(row.slot)
        if before is not None and before[0] == row.pages and before[1] == row.more_pages:
            return None
        self._sent[row.slot] = row.pages, row.more_pages
        return _changes(before, row.pages, row.more_pages)


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
    """Makes plans of an encoder's messages, in their order. A plan holds until the next one is made, which
    may have the same rows."""

    def __init__(self) -> None:
        self._tables: dict[int, list[Table]] = {}
        self._rows: tuple[PlanRow, ...] = ()

    def decode(self, message: bytes) -> StepPlan:
        number, rows, inits, copies = marshal.loads(message)
        if isinstance(rows, tuple):
            self._go_on(rows)
        else:
            self._rows = tuple([self._row(*row) for row in rows])
        return StepPlan(
            number,
            self._rows,
            tuple(SlotInit(slot, _UNUSED, 0, (), (), last) for slot, last in inits),
            copies,
        )

    def _go_on(self, changed: Sequence[tuple[int, Sequence[tuple[int, Table]]]]) -> None:
        for row in self._rows:
            row.start += 1
        for at, changes in changed:
            row = self._rows[at]
            row.pages, *more = self._change(row.slot, changes)
            row.more_pages = tuple(more)

    def _change(self, slot: int, changes: Sequence[tuple[int, Table]]) -> list[Table]:
        before = self._tables.get(slot) or [()] * len(changes)
        now = [was[:stay] + added for was, (stay, added) in zip(before, changes, strict=True)]
        self._tables[slot] = now
        return now

    def _row(
        self,
        slot: int,
        start: int,
        changes: Sequence[tuple[int, Table]] | None,
        sample: Table | None,
        tokens: Table | None = None,
        wanted: int | None = None,
        pooled: bool = False,
    ) -> PlanRow:
        pages, *more = self._tables[slot] if changes is None else self._change(slot, changes)
        return PlanRow(
            slot,
            tokens,
            start,
            pages,
            (slot,) if sample is None else sample,
            prompt_logprobs=None if wanted is None else (0,) * wanted,
            pooling=Pooling.LAST if pooled else None,
            more_pages=tuple(more),
        )
