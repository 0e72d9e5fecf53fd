"""Planted bugs of groups of states."""

from __future__ import annotations

from dataclasses import replace

from baton.engine.plan import RowResult
from baton.engine.request import Sequence
from baton.engine.scheduler import Scheduler
from baton.engine.scheduler_state import SchedulerState
from baton.engine.step_builder import Record
from baton.handoff.fetch import Fetch, Fetches
from baton.handoff.messages import ChunkAnnounced
from baton.kvcache import NO_PAGE, BlockTable, KvCacheManager
from baton.layers.cache_spec import State
from planted.planting import Wrong, bug


@bug("state-border", "a row keeps the state of its end alone", 25, State, "stops", seed=9)
def _(stops: Wrong, start: int, end: int, page_size: int) -> list[int]:
    return [end]


@bug("state-overwritten", "steps go on in the page of a snapshot", 25, KvCacheManager, "extend", seed=3)
def _(extend: Wrong, cache: KvCacheManager, block_table: BlockTable, rows: int) -> int:
    """The snapshot stays where it was, too."""
    before = len(block_table)
    taken: int = extend(cache, block_table, rows)
    for group, table in zip(cache.groups, block_table.tables, strict=True):
        if isinstance(group.spec, State) and 0 < before < len(table) and table[before - 1] != NO_PAGE:
            block_table.owned.discard(table[-1])
            cache._allocator.give_back([table[-1]])
            table[-1] = table[before - 1]
    return taken


@bug("state-later", "a hand-off ships the state of a later position", 25, Fetches, "_announced", seed=3)
def _(announced: Wrong, fetches: Fetches[Fetch], fetch: Fetch, chunk: ChunkAnnounced, now: float) -> None:
    groups = []
    for own, each in zip(fetches.pulls._cache.groups, chunk.groups, strict=True):
        if isinstance(own.spec, State):
            each = replace(each, pages=each.pages[::-1], generations=each.generations[::-1])
        groups.append(each)
    announced(fetches, fetch, replace(chunk, groups=tuple(groups)), now)


@bug("state-uncopied", "a forked choice begins without the live state", 25, SchedulerState, "_fork", seed=3)
def _(
    fork: Wrong, state: SchedulerState, leader: Sequence, follower: Sequence, prefix: list[int], margin: int
) -> None:
    fork(state, leader, follower, prefix, margin)
    if state.copies and state.copies[-1].sequence is follower:
        pairs = zip(state.cache.groups, state.copies[-1].pairs, strict=True)
        kept = tuple(pair for group, pair in pairs if not isinstance(group.spec, State))
        state.copies[-1] = replace(state.copies[-1], pairs=kept)


@bug(
    "state-kept",
    "a retracted sequence leaves its live state as a snapshot",
    25,
    SchedulerState,
    "_vacate",
    seed=2,
)
def _(vacate: Wrong, state: SchedulerState, sequence: Sequence) -> None:
    """As if its page were full."""
    block_table = sequence.block_table
    if block_table is not None and sequence.retired:
        sequence.retired = min(len(sequence.tokens), len(block_table) * state.cache.page_size)
    vacate(state, sequence)


@bug("state-draft", "a rejected draft's update of a state stays", 50, Scheduler, "_commit_decode", seed=12)
def _(commit: Wrong, scheduler: Scheduler, record: Record, row: RowResult) -> None:
    commit(scheduler, record, row)
    record.sequence.replay = record.drafts


@bug("state-undrafted", "right drafts do not reach a state", 50, Scheduler, "_commit_decode", seed=12)
def _(commit: Wrong, scheduler: Scheduler, record: Record, row: RowResult) -> None:
    commit(scheduler, record, row)
    record.sequence.replay = 0


@bug(
    "state-draft-border",
    "a page ends with a draft, and its state is not final",
    300,
    State,
    "most_drafts",
    seed=242,
)
def _(most: Wrong, first: int, page_size: int) -> int:
    return page_size
