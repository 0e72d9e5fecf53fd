"""Bugs in what the scheduler does with drafts, that can be planted: see `bugs`."""

from __future__ import annotations

from dataclasses import replace

from baton.engine.plan import Logprobs, RowResult, StepResult
from baton.engine.request import Sequence, TokenEvent
from baton.engine.scheduler import Scheduler
from baton.engine.step_builder import Record, Step
from planted.planting import Wrong, bug


@bug(
    "rejected-kv",
    "what was computed for rejected drafts counts as final",
    50,
    Scheduler,
    "_commit_decode",
    seed=25,
)
def _(commit: Wrong, scheduler: Scheduler, record: Record, row: RowResult) -> None:
    commit(scheduler, record, row)
    record.sequence.retired += 1 + record.drafts - len(row.tokens)


@bug(
    "draft-count",
    "what was counted for rejected drafts is not taken back",
    50,
    Scheduler,
    "_commit_decode",
    seed=25,
)
def _(commit: Wrong, scheduler: Scheduler, record: Record, row: RowResult) -> None:
    commit(scheduler, record, row)
    wrong = 1 + record.drafts - len(row.tokens)
    if wrong and record.sequence.finish is None:
        record.sequence.computed += wrong
        record.sequence.unread += wrong


@bug(
    "stop-in-drafts",
    "what follows a stop token inside accepted drafts is delivered",
    50,
    Scheduler,
    "_take_token",
    seed=25,
)
def _(take: Wrong, scheduler: Scheduler, sequence: Sequence, token: int, logprobs: Logprobs | None) -> None:
    take(scheduler, sequence, token, logprobs)
    if sequence.finish is not None and sequence.unread == 0 and scheduler.drafts is not None:
        event = scheduler.events[-1]
        assert isinstance(event, TokenEvent)
        scheduler.events[-1:] = [replace(event, finish=None), event]


@bug("window-by-drafts", "rejected drafts give window pages up", 100, Scheduler, "_commit_decode", seed=29)
def _(commit: Wrong, scheduler: Scheduler, record: Record, row: RowResult) -> None:
    commit(scheduler, record, row)
    sequence = record.sequence
    if record.drafts and scheduler.cache.has_windows and sequence.block_table is not None:
        scheduler.cache.drop(sequence.block_table, record.end)


@bug("last-draft", "drafts are accepted one too far", 50, Scheduler, "commit", seed=25)
def _(commit: Wrong, scheduler: Scheduler, step: Step, result: StepResult, *seconds: float) -> None:
    rows = list(result.rows)
    for i, (planned, row) in enumerate(zip(step.plan.rows, rows, strict=True)):
        if planned.drafts and len(row.tokens) < planned.count and not row.error:
            rows[i] = RowResult((*row.tokens, planned.drafts[len(row.tokens) - 1]))
    commit(scheduler, step, replace(result, rows=tuple(rows)), *seconds)
