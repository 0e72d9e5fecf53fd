"""Bugs of workers: schedulers, pages, hand-offs, ranks."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import replace
from typing import Any

from baton.engine.capacity import BatchSlots
from baton.engine.plan import StepPlan, StepResult
from baton.engine.request import Sequence as EngineSequence
from baton.engine.request import SequencePhase, TokenEvent
from baton.engine.scheduler import Scheduler
from baton.engine.step_builder import Step, StepBuilder
from baton.handoff.fetch import Fetch, Fetches
from baton.handoff.lease import Lease, Leases
from baton.handoff.messages import AttemptName, ChunkAnnounced, LeaseFinished, PrefillOutput, ReleaseLease
from baton.handoff.pulls import Pull, Pulls
from baton.kvcache import BlockTable, KvCacheManager, PageAllocator
from baton.kvcache.tree_node import PageRow
from baton.kvcache.window_pages import WindowPages
from baton.layers.cache_spec import CacheSpec
from baton.sim.ranks import Collective, SimRanks
from baton.sim.transport import SimPull as SimPull
from baton.worker.decode.core import DecodeCore
from baton.worker.prefill.core import PrefillCore
from baton.worker.ranks.plan_codec import PlanDecoder, Table, Tables
from baton.worker.ranks.runner import RankedRunner, RanksLost
from planted.planting import Wrong, bug

# --- leases and attempts ------------------------------------------------------------------------------------

TIMER_SECONDS = 0.1


@bug("lease-timer", "a lease ends on a timer although a pull runs", 100, Leases, "tick")
def _(tick: Wrong, leases: Leases[Lease], now: float) -> None:
    tick(leases, now)
    for lease in leases.running.values():
        if lease.complete_since is not None and now - lease.complete_since > TIMER_SECONDS:
            lease.free()


@bug("no-attempt", "messages are matched by request, whatever the attempt", 100, Fetches, "of", seed=31)
def _(of: Wrong, fetches: Fetches[Fetch], address: str, message: PrefillOutput, now: float) -> Fetch | None:
    for name in fetches.running:
        if (name.gateway, name.request) == (message.name.gateway, message.name.request):
            message = replace(message, name=name)
            break
    found: Fetch | None = of(fetches, address, message, now)
    return found


@bug("silent-failure", "a failure before the first token is not announced", 100, Leases, "_fail", seed=14)
def _(fail: Wrong, leases: Leases[Lease], lease: Lease, code: str, reason: str, message: str) -> None:
    fail(leases, lease, code, reason, message)
    if lease.complete_since is None:
        leases.outputs.pop()


def _any_release_stood(release: Wrong, leases: Leases[Lease], holder: Hashable, name: AttemptName) -> None:
    if name in leases.running:
        release(leases, holder, name)
    else:
        leases.outputs.append((holder, LeaseFinished(name, stood=True)))


ANY_RELEASE_STOOD = (Leases, "release", _any_release_stood)


@bug(
    "unknown-reference",
    "a release with an unknown name is confirmed (vLLM #52234, 1)",
    100,
    Fetches,
    "peer_down",
    ANY_RELEASE_STOOD,
    seed=2,
)
def _(peer_down: Wrong, fetches: Fetches[Fetch], address: str, reason: str) -> None:
    """Fetches are tied to an address, not to an incarnation of the process there."""


@bug(
    "expired-lease",
    "an expired lease is still confirmed (vLLM #52234, 5)",
    200,
    Leases,
    "_fail",
    ANY_RELEASE_STOOD,
    seed=57,
)
def _(fail: Wrong, leases: Leases[Lease], lease: Lease, code: str, reason: str, message: str) -> None:
    fail(leases, lease, code, reason, message)
    if reason == "LEASE_EXPIRED":
        leases.outputs.pop()


# --- pulls --------------------------------------------------------------------------------------------------


@bug(
    "free-at-cancel",
    "a pull's target is freed when its request is cancelled",
    25,
    Fetches,
    "_forget",
    seed=5,
)
def _(forget: Wrong, fetches: Fetches[Fetch], fetch: Fetch) -> None:
    forget(fetches, fetch)
    if fetch.pull is not None:
        fetches.pulls.end(fetch.pull)


@bug(
    "late-generation",
    "the expected generation is read when the copy starts",
    2600,
    SimPull,
    "_begin",
    seed=908,
)
def _(begin: Wrong, pull: SimPull) -> None:
    core = pull._node.core
    fetches = [core.fetches] if isinstance(core, DecodeCore) else []
    for known in (p for f in (*fetches, core.sharing.borrower.fetches) for p in f.pulls.running.values()):
        if set(known.targets) == pull.targets and pull._pool is not None:
            known.generations = tuple(pull._pool.generations[source] for source, _ in pull._pairs)
    begin(pull)


@bug("free-overdue", "a pull's target is freed when the pull is overdue", 400, Pulls, "expire", seed=14)
def _(expire: Wrong, pulls: Pulls[Fetch], now: float) -> list[Pull[Fetch]]:
    late = [number for number, pull in pulls.running.items() if pull.due <= now]
    return [pull for number in late if (pull := pulls.end(number)) is not None]


@bug("unconfirmed", "nothing is confirmed after the copy", 1600, Fetches, "pull_ended", seed=1192)
def _(
    ended: Wrong, fetches: Fetches[Fetch], number: int, error: str | None, generations: Any, now: float
) -> None:
    pull = fetches.pulls.running.get(number)
    ended(fetches, number, error, pull.generations if pull is not None else None, now)


@bug("failed-pull", "a pull that failed counts as done (vLLM #52234, 2)", 50, Fetches, "pull_ended", seed=12)
def _(
    ended: Wrong, fetches: Fetches[Fetch], number: int, error: str | None, generations: Any, now: float
) -> None:
    pull = fetches.pulls.running.get(number)
    if error is not None and pull is not None:
        error, generations = None, pull.generations
    ended(fetches, number, error, generations, now)


@bug("consumed-reference", "pages are read after their release (vLLM #52234, 3)", 25, Fetches, "advance")
def _(advance: Wrong, fetches: Fetches[Fetch], fetch: Fetch, now: float) -> None:
    advance(fetches, fetch, now)
    if fetch.pull is not None and fetch.announced_all and fetch.done and not fetch.released:
        fetch.released = True
        fetches.effects.append(ReleaseLease(fetch.address, fetch.name))


@bug("early-retired", "a step counts as retired when it is planned", 100, PrefillCore, "plan", seed=4)
def _(plan: Wrong, core: PrefillCore, now: float) -> Step | None:
    step: Step | None = plan(core, now)
    if step is not None:
        core.shell.retire(step.plan.number)
    return step


@bug(
    "unwaited",
    "pages announced ahead are pulled without waiting for their step",
    100,
    Fetches,
    "_announced",
    seed=4,
)
def _(announced: Wrong, fetches: Fetches[Fetch], fetch: Fetch, chunk: ChunkAnnounced, now: float) -> None:
    announced(fetches, fetch, replace(chunk, step=0), now)


@bug("never-stopped", "an unwanted pull keeps waiting for its step", 400, Fetches, "_stop", seed=464)
def _(stop: Wrong, fetches: Fetches[Fetch], pull: int, address: str) -> None:
    pass


@bug(
    "stale-reference",
    "a reused page keeps its generation (vLLM #52234, 4)",
    1600,
    PageAllocator,
    "take",
    seed=1192,
)
def _(take: Wrong, allocator: PageAllocator, count: int) -> list[int]:
    pages: list[int] = take(allocator, count)
    for page in pages:
        allocator._generations[page] = 1
    return pages


# --- steps --------------------------------------------------------------------------------------------------


@bug(
    "free-at-abort",
    "pages are freed while the batch that uses them is in flight",
    25,
    KvCacheManager,
    "release",
)
def _(release: Wrong, cache: KvCacheManager, block_table: BlockTable, after_step: int) -> None:
    release(cache, block_table, 0)


@bug("row-reuse", "a batch slot is reused before its step has retired", 25, BatchSlots, "give_back")
def _(give_back: Wrong, slots: BatchSlots, slot: int, after_step: int) -> None:
    give_back(slots, slot, 0)


@bug(
    "after-end",
    "a token in flight is emitted after the end of its sequence",
    50,
    Scheduler,
    "commit",
    seed=11,
)
def _(commit: Wrong, scheduler: Scheduler, step: Step, result: StepResult, *seconds: float) -> None:
    for record, row in zip(step.records, result.rows, strict=True):
        sequence = record.sequence
        if sequence.phase is SequencePhase.ENDED and sequence.finish is not None and row.tokens:
            scheduler.events.append(TokenEvent(sequence, row.tokens[0], None, None))
    commit(scheduler, step, result, *seconds)


# --- KV groups ----------------------------------------------------------------------------------------------


@bug("window-early", "a window page is given up one position early", 25, CacheSpec, "keeps", seed=3)
def _(keeps: Wrong, spec: CacheSpec, position: int, page_size: int) -> int:
    return spec.sees(position + 1, page_size)


@bug("window-gone", "a prefix is used whose window pages are gone", 25, WindowPages, "usable", seed=3)
def _(usable: Wrong, pages: WindowPages, rows: Sequence[PageRow], position: int | None) -> int:
    return len(rows)


@bug("window-at-launch", "window pages are given up when a step is launched", 25, Scheduler, "plan", seed=3)
def _(plan: Wrong, scheduler: Scheduler) -> Step | None:
    step: Step | None = plan(scheduler)
    for record in step.records if step is not None else ():
        if record.sequence.block_table is not None:
            scheduler.cache.drop(record.sequence.block_table, record.end)
    return step


@bug(
    "window-free",
    "a window page is freed although the prefix tree holds it",
    25,
    KvCacheManager,
    "_leave",
    seed=3,
)
def _(leave: Wrong, cache: KvCacheManager, block_table: BlockTable, pages: Sequence[int]) -> None:
    cached = [page for page in pages if page not in block_table.owned]
    leave(cache, block_table, pages)
    cache._allocator.drop_cached(cached)


@bug(
    "other-group",
    "pages are pulled into the tables of the wrong groups",
    25,
    Fetches,
    "_announced",
    seed=3,
)
def _(announced: Wrong, fetches: Fetches[Fetch], fetch: Fetch, chunk: ChunkAnnounced, now: float) -> None:
    if len(chunk.groups) > 1 and len(chunk.groups[0].pages) == len(chunk.groups[1].pages):
        one, other, *rest = chunk.groups
        swapped = replace(other, first=one.first), replace(one, first=other.first)
        chunk = replace(chunk, groups=(*swapped, *rest))
    announced(fetches, fetch, chunk, now)


@bug("lost-matcher", "a sequence that gets a slot begins its grammar anew", 25, StepBuilder, "_init_slot")
def _(init: Wrong, builder: StepBuilder, sequence: EngineSequence, last_token: int | None) -> None:
    """Whether it comes from a prefill node, is resumed, or has been retracted."""
    init(builder, sequence, last_token)
    if sequence.request.grammar is not None:
        builder._inits[-1] = replace(builder._inits[-1], output=())


# --- ranks --------------------------------------------------------------------------------------------------


@bug(
    "one-rank", "a step is complete when rank 0 alone has written its pages", 25, SimRanks, "complete", seed=5
)
def _(complete: Wrong, ranks: SimRanks, found: Collective) -> bool:
    return 0 in found.values


@bug(
    "follower-behind",
    "a follower is a sequence behind, and reuses its pages",
    25,
    PlanDecoder,
    "_change",
    seed=5,
)
def _(change: Wrong, decoder: PlanDecoder, slot: int, changes: Sequence[tuple[int, Table]]) -> Tables:
    """Page tables are taken to grow only."""
    before = decoder._tables.get(slot) or ((),) * len(changes)
    now = change(decoder, slot, changes)
    decoder._tables[slot] = tuple(
        was[: len(table)] + table[len(was) :] for was, table in zip(before, now, strict=True)
    )
    return decoder._tables[slot]


@bug(
    "plans-differ",
    "ranks go on after a step that rank 0 alone has not launched",
    200,
    RankedRunner,
    "launch",
    seed=433,
)
def _(launch: Wrong, runner: RankedRunner, plan: StepPlan) -> Any:
    try:
        return launch(runner, plan)
    except RanksLost as error:
        if error.by_step:
            raise RuntimeError(str(error)) from error
        raise
