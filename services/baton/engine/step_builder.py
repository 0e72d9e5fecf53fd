"""Builds a step: its ragged batch, and which sequences each row belongs to. Pure functions of sequences."""

from __future__ import annotations

from dataclasses import dataclass

from baton.engine.draft.length import DraftKind
from baton.engine.plan import PlanRow, SlotInit, StepPlan
from baton.engine.request import Sequence
from baton.kvcache import BlockTable


@dataclass(frozen=True, slots=True)
class Copy:
    """Pages, one a KV group, that a forked choice copies before its first row. `block_table` owns the sources
    and is pinned."""

    block_table: BlockTable
    sequence: Sequence
    pairs: tuple[tuple[int, int], ...]
    """Source and target."""


@dataclass(slots=True)
class Record:
    """What the scheduler must do with a row's result."""

    sequence: Sequence
    epoch: int
    end: int
    """Tokens whose KV is final once the row has retired; with drafts, here or in the step before, at most."""
    targets: tuple[Sequence, ...]
    """Sequences that sample a token from the row."""
    drafts: int = 0
    """Tokens of the row that may turn out wrong."""
    kind: DraftKind = (0, 0)


@dataclass(frozen=True, slots=True)
class Step:
    plan: StepPlan
    records: tuple[Record, ...]
    pinned: tuple[BlockTable, ...]
    """To be unpinned when the step has retired."""
    copied: tuple[Sequence, ...] = ()
    """Sequences whose pages the step copies; they need not have a row in it."""


class StepBuilder:
    """Collects the rows of one step."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.records: list[Record] = []
        self.tokens = 0
        """Tokens of decode rows."""
        self._rows: list[PlanRow] = []
        self._inits: list[SlotInit] = []

    def add_decode(self, sequence: Sequence, drafts: tuple[int, ...] = ()) -> None:
        """A row for the sequence's last token, which samples the next, and for `drafts` behind it: those of
        PlanRow, which are more while some are unread."""
        assert sequence.slot is not None and sequence.block_table is not None
        if not sequence.slot_ready:
            self._init_slot(sequence, sequence.tokens[-1])
        slot, tables = sequence.slot, sequence.block_table.page_tables()
        computed, ahead = sequence.computed, sequence.drafted
        row = PlanRow(slot, None, computed - ahead, tables, (slot,), images=sequence.request.images)
        record = Record(sequence, sequence.epoch, computed + 1, (sequence,))
        if drafts or ahead or sequence.replay:  # few rows have any: there may be hundreds
            row.drafts, row.ahead, row.replay = drafts, ahead, sequence.replay
            record.drafts, record.kind = row.count - 1, (sequence.draft_kind, sequence.unread)
            record.end += record.drafts
        self._rows.append(row)
        self.records.append(record)
        self.tokens += 1 + record.drafts

    def add_chunk(self, sequence: Sequence, count: int) -> None:
        """A row for the next `count` tokens of a prompt. The last chunk samples a token for each choice."""
        assert sequence.slot is not None and sequence.block_table is not None
        request, start, end = sequence.request, sequence.computed, sequence.computed + count
        samples = end == len(sequence.tokens) and request.pooling is None
        targets = (sequence, *sequence.followers) if samples else ()
        for target in targets:
            self._init_slot(target, None)
        prompt_targets: tuple[int, ...] | None = None
        if request.wants_prompt_logprobs:
            prompt_targets = request.prompt[start + 1 : start + 1 + count]
        row = PlanRow(
            slot=sequence.slot,
            tokens=sequence.tokens[start:end],
            start=start,
            tables=sequence.block_table.page_tables(),
            sample=tuple(target.slot for target in targets if target.slot is not None),
            prompt_logprobs=prompt_targets,
            prompt_top=(request.params.prompt_logprobs or 0) if prompt_targets is not None else 0,
            pooling=request.pooling,
            hidden_layers=request.hidden_layers if samples else (),
            images=request.images,
        )
        self._rows.append(row)
        self.records.append(Record(sequence, sequence.epoch, end, targets))

    def build(self, copies: list[Copy], pinned: tuple[BlockTable, ...]) -> Step | None:
        """Returns the step and applies its changes to the sequences; None: there is nothing to compute."""
        if not self._rows and not copies:
            return None
        for record in self.records:
            sequence, drafts = record.sequence, record.drafts
            sequence.computed, sequence.replay, sequence.last_step = record.end, 0, self.number
            sequence.drafted += drafts
            for target in record.targets:
                target.last_step = self.number
                target.unread += 1 + drafts
        for copy in copies:
            copy.sequence.last_step = self.number
        pairs = tuple(pair for copy in copies for pair in copy.pairs)
        plan = StepPlan(self.number, tuple(self._rows), tuple(self._inits), pairs)
        return Step(plan, tuple(self.records), pinned, tuple(copy.sequence for copy in copies))

    def _init_slot(self, sequence: Sequence, last_token: int | None) -> None:
        assert sequence.slot is not None
        request = sequence.request
        sequence.slot_ready = True
        init = SlotInit(
            slot=sequence.slot,
            params=request.params,
            seed=sequence.seed,
            prompt=request.text_tokens if request.params.penalized else (),
            output=tuple(sequence.tokens[len(request.prompt) :]),
            last_token=last_token,
            grammar=request.grammar,
        )
        self._inits.append(init)


def divide_budget(
    prompts: list[Sequence], budget: int, page_size: int, full_step: int
) -> list[tuple[Sequence, int]]:
    """Divides a token budget among the prompts, in the order of their rank; tokens of each, at least 1.

    Prompts that fit into one step are computed one after the other: their first tokens then come sooner, on
    average, than side by side. Once those that end in the step keep the device busy (`full_step`), later ones
    wait for the next. Longer ones, however many, have half of the budget while short ones wait, so that
    neither starve; each but the last takes half of what the others have left. What remains goes round again.
    Chunks end on page borders where they can, because only full pages are announced to a receiver.
    """
    prompts = sorted((s for s in prompts if not s.unread), key=lambda s: s.rank)
    counts = dict.fromkeys(prompts, 0)
    long = [sequence for sequence in prompts if sequence.missing > budget]
    for_long = budget // 2 if len(long) < len(prompts) else budget
    for fair in (True, False):
        ending = 0
        for sequence in prompts:
            if ending >= full_step:
                break
            share = budget
            if fair and sequence in long:
                share = for_long if sequence is long[-1] else min(for_long, max(page_size, for_long // 2))
                share = min(share, budget)
                for_long -= share
            take = min(share, sequence.missing - counts[sequence])
            counts[sequence] += take
            budget -= take
            if counts[sequence] == sequence.missing:
                ending += counts[sequence]
    chunks: list[tuple[Sequence, int]] = []
    for sequence, count in counts.items():
        end = sequence.computed + count
        if end < len(sequence.tokens) and end // page_size * page_size > sequence.computed:
            count = end // page_size * page_size - sequence.computed
        if sequence.computed < sequence.diverges:
            count = min(count, sequence.diverges - sequence.computed)
        if count:
            chunks.append((sequence, count))
    return chunks
