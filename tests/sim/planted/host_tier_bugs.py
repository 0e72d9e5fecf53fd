"""Bugs of the host tier that can be planted: see `bugs`."""

from __future__ import annotations

from baton.engine.request import SequencePhase
from baton.engine.scheduler import Scheduler
from baton.engine.step_builder import Step
from baton.kvcache.host_tier import HostTier, TierCopy
from baton.kvcache.kv_groups import NO_PAGE
from planted.planting import Wrong, bug


@bug(
    "promoted-unchecked",
    "generations are not compared after a promotion",
    100,
    HostTier,
    "_unchanged",
    seed=651,
)
def _(unchanged: Wrong, tier: HostTier, copy: TierCopy) -> int:
    return len(copy.sources) if copy.up else int(unchanged(tier, copy))


@bug(
    "demoted-unchecked", "generations are not compared after a demotion", 100, HostTier, "_unchanged", seed=77
)
def _(unchanged: Wrong, tier: HostTier, copy: TierCopy) -> int:
    return int(unchanged(tier, copy)) if copy.up else len(copy.sources)


@bug("demoted-early", "pages are demoted whose step has not retired", 100, Scheduler, "plan", seed=16)
def _(plan: Wrong, scheduler: Scheduler) -> Step | None:
    step: Step | None = plan(scheduler)
    tier = scheduler.cache.tier
    for record in step.records if step is not None and tier is not None else ():
        sequence, size = record.sequence, scheduler.cache.page_size
        assert tier is not None
        if (
            tier._demotion is None
            and sequence.block_table is not None
            and sequence.phase is SequencePhase.PROMPT
        ):
            rows = list(zip(*sequence.block_table.tables, strict=True))[: record.end // size]
            if rows and not any(NO_PAGE in row for row in rows):
                key = scheduler.cache.encode(sequence.tokens[: len(rows) * size])
                tier._demote_path(sequence.request.namespace, key, rows)
    return step


@bug("failed-copy", "a copy between the tiers that failed counts as done", 100, HostTier, "copied", seed=16)
def _(copied: Wrong, tier: HostTier, number: int, error: str | None) -> None:
    copied(tier, number, None)
