"""Building a step's ragged batch from the scheduler's queues."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from baton.engine.plan import PlanRow, SlotInit, StepPlan
from baton.engine.request import Phase, Sequence
from baton.kvcache import Holding

if TYPE_CHECKING:
    from baton.engine.scheduler import Scheduler


@dataclass(frozen=True, slots=True)
class Copy:
    """A page that a forked choice copies before its first row. `holding` owns the source and is pinned."""

    holding: Holding
    sequence: Sequence
    epoch: int
    source: int
    target: int


@dataclass(slots=True)
class Record:
    """What a row was for."""

    sequence: Sequence
    epoch: int
    end: int
    """Tokens whose KV is final once the row has retired."""
    targets: tuple[Sequence, ...]
    """The sequences that each sample a token from the row."""


@dataclass(frozen=True, slots=True)
class Step:
    plan: StepPlan
    records: tuple[Record, ...]
    pinned: tuple[Holding, ...]


def build_step(scheduler: Scheduler) -> Step | None:
    """One row for each running sequence, oldest first, then prompt chunks with what is left of the budget."""
    number = scheduler.step_number + 1
    rows: list[PlanRow] = []
    records: list[Record] = []
    inits: list[SlotInit] = []
    budget = scheduler.config.token_budget
    for sequence in list(scheduler.running):
        if sequence.phase is not Phase.RUNNING or not _wants_row(scheduler, sequence):
            continue
        if not scheduler.extend_or_retract(sequence, sequence.computed // scheduler.cache.page_size + 1):
            continue
        rows.append(_decode_row(sequence, inits))
        records.append(_record(sequence, sequence.computed + 1, (sequence,)))
        budget -= 1
    for sequence, count in _share(scheduler, budget):
        end = sequence.computed + count
        targets = (sequence, *sequence.followers) if end == len(sequence.tokens) else ()
        rows.append(_chunk_row(sequence, count, targets, inits))
        records.append(_record(sequence, end, targets))
    copies, pinned = _copies(scheduler)
    if not rows and not copies:
        for holding in pinned:
            scheduler.cache.unpin(holding)
        return None
    for record in records:
        record.sequence.computed = record.end
        record.sequence.last_step = number
        for sequence in record.targets:
            sequence.last_step = number
            sequence.unread += 1
    for copy in copies:
        copy.sequence.last_step = number
    scheduler.step_number = number
    pairs = tuple((copy.source, copy.target) for copy in copies)
    return Step(StepPlan(number, tuple(rows), tuple(inits), pairs), tuple(records), tuple(pinned))


def _wants_row(scheduler: Scheduler, sequence: Sequence) -> bool:
    """Whether another token is wanted, and could follow those in flight."""
    return (
        not sequence.request.paused
        and sequence.num_output < sequence.request.params.max_tokens
        and len(sequence.tokens) + sequence.unread < scheduler.config.context_length
    )


def _share(scheduler: Scheduler, budget: int) -> list[tuple[Sequence, int]]:
    """Divides a token budget among the prompts, in order of age.

    Prompts that one step could hold are computed one after the other: their first tokens then come sooner, on
    average, than if they were computed side by side. Once those that end in the step keep the device busy
    (`full_step`), younger ones wait for the next. Longer ones, however many, have half of the budget while
    short ones wait, so that neither starve; each but the last takes half of what the others have left. What
    remains goes round again. Chunks end on page borders where they can, because only full pages are announced
    to a receiver.
    """
    size = scheduler.cache.page_size
    prompts = sorted((s for s in scheduler.prompts if not s.unread), key=lambda s: s.age)
    counts = dict.fromkeys(prompts, 0)
    long = [sequence for sequence in prompts if sequence.missing > budget]
    theirs = budget // 2 if len(long) < len(prompts) else budget
    for fair in (True, False):
        ending = 0
        for sequence in prompts:
            if ending >= scheduler.config.full_step:
                break
            share = budget
            if fair and sequence in long:
                share = theirs if sequence is long[-1] else min(theirs, max(size, theirs // 2))
                share = min(share, budget)
                theirs -= share
            take = min(share, sequence.missing - counts[sequence])
            counts[sequence] += take
            budget -= take
            if counts[sequence] == sequence.missing:
                ending += counts[sequence]
    chunks: list[tuple[Sequence, int]] = []
    for sequence, count in counts.items():
        end = sequence.computed + count
        if end < len(sequence.tokens) and end // size * size > sequence.computed:
            count = end // size * size - sequence.computed
        if count and scheduler.extend(sequence, -(-(sequence.computed + count) // size)):
            chunks.append((sequence, count))
    return chunks


def _record(sequence: Sequence, end: int, targets: tuple[Sequence, ...]) -> Record:
    return Record(sequence, sequence.epoch, end, targets)


def _decode_row(sequence: Sequence, inits: list[SlotInit]) -> PlanRow:
    assert sequence.slot is not None and sequence.holding is not None
    if not sequence.slot_ready:
        inits.append(_slot_init(sequence, sequence.tokens[-1]))
    pages = tuple(sequence.holding.pages)
    return PlanRow(sequence.slot, None, sequence.computed, pages, (sequence.slot,))


def _chunk_row(
    sequence: Sequence, count: int, targets: tuple[Sequence, ...], inits: list[SlotInit]
) -> PlanRow:
    assert sequence.slot is not None and sequence.holding is not None
    params, start = sequence.request.params, sequence.computed
    inits.extend(_slot_init(target, None) for target in targets)
    wanted: tuple[int, ...] | None = None
    top = 0
    if sequence.request.wants_prompt_logprobs and params.prompt_logprobs is not None:
        wanted = sequence.request.prompt[start + 1 : start + 1 + count]
        top = params.prompt_logprobs
    return PlanRow(
        slot=sequence.slot,
        tokens=tuple(sequence.tokens[start : start + count]),
        start=start,
        pages=tuple(sequence.holding.pages),
        sample=tuple(target.slot for target in targets if target.slot is not None),
        prompt_logprobs=wanted,
        prompt_top=top,
    )


def _slot_init(sequence: Sequence, last_token: int | None) -> SlotInit:
    assert sequence.slot is not None
    request = sequence.request
    sequence.slot_ready = True
    cut = len(request.prompt)
    return SlotInit(
        slot=sequence.slot,
        params=request.params,
        seed=sequence.seed,
        prompt=request.prompt if request.params.penalized else (),
        output=tuple(sequence.tokens[cut:]),
        last_token=last_token,
    )


def _copies(scheduler: Scheduler) -> tuple[list[Copy], list[Holding]]:
    """Copies still wanted, and every holding to unpin when the step has retired."""
    copies, scheduler.copies = scheduler.copies, []
    wanted = [c for c in copies if c.epoch == c.sequence.epoch and c.sequence.phase is Phase.RUNNING]
    return wanted, [c.holding for c in copies]
