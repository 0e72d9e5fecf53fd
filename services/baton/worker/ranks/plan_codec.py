"""Step plans as messages to followers: what they need of a plan, and of page tables only what has changed.

Rank 0 alone samples, so parameters, seeds, penalties and grammars stay with it. Messages are msgpack's.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from baton.engine.image_spans import ImageSpan
from baton.engine.plan import PlanRow, Pooling, SlotInit, StepPlan
from baton.engine.sampling_params import SamplingParams
from baton.kvcache.page_keys import is_placeholder

Table = tuple[int, ...]
Tables = tuple[Table, ...]
"""One a KV group."""
Changes = tuple[tuple[int, Table], ...]
"""How many of each table's first pages stay, and those that follow."""


class RowMessage(msgspec.Struct, array_like=True, gc=False):
    slot: int
    start: int
    changes: Changes | None
    """None: the slot's tables are those of its last message."""
    sample: Table | None
    """None: the slot itself."""
    tokens: Table | None = None
    num_prompt_logprobs: int | None = None
    """How many log-probabilities of the prompt."""
    pooled: bool = False
    drafts: Table = ()
    ahead: int = 0
    replay: int = 0
    images: tuple[tuple[int, int, int], ...] = ()
    """First token, rows and columns of each of the sequence's: rank 0 alone has what is in them."""


class PlanMessage(msgspec.Struct, array_like=True, gc=False):
    number: int
    rows: tuple[RowMessage, ...] | None
    """None: the rows of the plan before, each one token on."""
    changed: tuple[tuple[int, Changes], ...]
    """Which of those have other tables."""
    inits: tuple[tuple[int, int], ...]
    """Slot, its last token."""
    copies: tuple[tuple[int, int], ...]


_UNUSED = SamplingParams()
_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(PlanMessage)


class PlanEncoder:
    """Remembers of each slot the page tables that its last message gave, and the rows of the last plan."""

    def __init__(self) -> None:
        self._sent: dict[int, Tables] = {}
        self._slots: list[int] = []
        self._next: list[int] = []
        """Where the last plan's rows would go on; empty if one had tokens of its own."""

    def encode(self, plan: StepPlan) -> bytes:
        for init in plan.inits:
            self._forget(init.slot)
            self._next = []  # no row goes on with another sequence's images
        inits = [(init.slot, init.last_token) for init in plan.inits if init.last_token is not None]
        rows, changed = self._rows(plan.rows)
        return _encoder.encode((plan.number, rows, changed, inits, plan.copies))

    def _rows(self, rows: Sequence[PlanRow]) -> tuple[list[tuple[Any, ...]] | None, list[tuple[int, Any]]]:
        """A PlanMessage's `rows` and `changed`."""
        slots, starts, decode = [row.slot for row in rows], [row.start for row in rows], True
        for row in rows:
            plain = not row.drafts and not row.ahead and not row.replay
            if row.tokens is not None or not plain or row.sample != (row.slot,):
                decode = False
                break
        again = decode and starts == self._next and slots == self._slots
        self._slots, self._next = slots, [start + 1 for start in starts] if decode else []
        if not again:
            for row in rows:
                if row.tokens is not None:
                    self._forget(row.slot)
            return [self._row(row) for row in rows], []
        changes = []
        for at, row in enumerate(rows):
            # Tables that have not changed are mostly the same object: see BlockTable.page_tables.
            if self._sent.get(row.slot) is not row.tables:
                found = self._changed(row)
                if found is not None:
                    changes.append((at, found))
        return None, changes

    def _forget(self, slot: int) -> None:
        """Another sequence may follow in this slot: its tables are other objects, even if they are equal.
        Attention knows a row that goes on by its table."""
        self._sent.pop(slot, None)

    def _row(self, row: PlanRow) -> tuple[Any, ...]:
        changes = self._changed(row)
        if row.tokens is None and not (row.drafts or row.ahead or row.replay or row.images):
            return row.slot, row.start, changes, row.sample if row.sample != (row.slot,) else None
        tokens = None if row.tokens is None else tuple(row.tokens)
        if tokens is not None and row.images:
            tokens = tuple(0 if is_placeholder(token) else token for token in tokens)
        images = [(image.start, image.rows, image.columns) for image in row.images]
        num_prompt_logprobs = None if row.prompt_logprobs is None else len(row.prompt_logprobs)
        pooled = row.pooling is not None
        more = row.drafts, row.ahead, row.replay, images
        return row.slot, row.start, changes, row.sample, tokens, num_prompt_logprobs, pooled, *more

    def _changed(self, row: PlanRow) -> list[tuple[int, Table]] | None:
        """How many of each table's first pages stay, and those that follow; None: all stay."""
        before = self._sent.get(row.slot)
        if before == row.tables:
            return None
        self._sent[row.slot] = row.tables
        changes = []
        for was, now in zip(before or ((),) * len(row.tables), row.tables, strict=True):
            stay = len(was) if now[: len(was)] == was else 0
            changes.append((stay, now[stay:]))
        return changes


class PlanDecoder:
    """Makes plans of an encoder's messages, in their order. A plan holds until the next one is made, which
    may have the same rows."""

    def __init__(self) -> None:
        self._tables: dict[int, Tables] = {}
        self._rows: tuple[PlanRow, ...] = ()

    def decode(self, message: bytes) -> StepPlan:
        """Raises msgspec.DecodeError."""
        plan = _decoder.decode(message)
        if plan.rows is None:
            self._go_on(plan.changed)
        else:
            self._rows = tuple([self._row(row) for row in plan.rows])
        inits = tuple(SlotInit(slot, _UNUSED, 0, (), (), last) for slot, last in plan.inits)
        return StepPlan(plan.number, self._rows, inits, plan.copies)

    def _go_on(self, changed: Sequence[tuple[int, Changes]]) -> None:
        for row in self._rows:
            row.start += 1
        for at, changes in changed:
            row = self._rows[at]
            row.tables = self._change(row.slot, changes)

    def _change(self, slot: int, changes: Changes) -> Tables:
        before = self._tables.get(slot) or ((),) * len(changes)
        now = tuple([was[:stay] + added for was, (stay, added) in zip(before, changes, strict=True)])
        self._tables[slot] = now
        return now

    def _row(self, row: RowMessage) -> PlanRow:
        return PlanRow(
            row.slot,
            row.tokens,
            row.start,
            self._tables[row.slot] if row.changes is None else self._change(row.slot, row.changes),
            (row.slot,) if row.sample is None else row.sample,
            prompt_logprobs=None if row.num_prompt_logprobs is None else (0,) * row.num_prompt_logprobs,
            pooling=Pooling.LAST if row.pooled else None,
            drafts=row.drafts,
            replay=row.replay,
            ahead=row.ahead,
            images=tuple(ImageSpan(*image, digest=b"") for image in row.images),
        )
