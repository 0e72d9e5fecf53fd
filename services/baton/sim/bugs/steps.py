"""Bugs of batches: what steps in flight use, and what they still yield."""

from __future__ import annotations

from collections.abc import Callable

from baton.engine.batch import Step
from baton.engine.plan import StepResult
from baton.engine.request import Phase, TokenEvent
from baton.engine.scheduler import Scheduler
from baton.engine.scheduler_state import Slots
from baton.kvcache import Holding, KvCache
from baton.sim.bugs.patching import Bug, Patch


def _free_at_abort(patch: Patch) -> None:
    def make(release: Callable[[KvCache, Holding, int], None]) -> Callable[[KvCache, Holding, int], None]:
        def wrong(cache: KvCache, holding: Holding, after_step: int) -> None:
            release(cache, holding, 0)

        return wrong

    patch(KvCache, "release", make)


def _row_reuse(patch: Patch) -> None:
    def make(give_back: Callable[[Slots, int, int], None]) -> Callable[[Slots, int, int], None]:
        def wrong(slots: Slots, slot: int, after_step: int) -> None:
            give_back(slots, slot, 0)

        return wrong

    patch(Slots, "give_back", make)


def _after_end(patch: Patch) -> None:
    def make(
        commit: Callable[[Scheduler, Step, StepResult], None],
    ) -> Callable[[Scheduler, Step, StepResult], None]:
        def wrong(scheduler: Scheduler, step: Step, result: StepResult) -> None:
            for record, row in zip(step.records, result.rows, strict=True):
                sequence = record.sequence
                if sequence.phase is Phase.ENDED and sequence.finish is not None and row.samples:
                    late = row.samples[0].token
                    scheduler.events.append(TokenEvent(sequence, late, None, None))
            commit(scheduler, step, result)

        return wrong

    patch(Scheduler, "commit", make)


STEP_BUGS = (
    Bug("free-at-abort", "pages are freed while the batch that uses them is in flight", 25, _free_at_abort),
    Bug("row-reuse", "a batch slot is reused before its step has retired", 25, _row_reuse),
    Bug("after-end", "a token in flight is emitted after the end of its sequence", 50, _after_end),
)
