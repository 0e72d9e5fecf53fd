"""Groups of states: pages for a row's end and its last border, snapshots at page borders, prefixes that end
with one."""

from __future__ import annotations

import pytest
import torch

from baton.attention.base import AttentionRows
from baton.attention.state_runs import state_runs
from baton.engine.plan import PlanRow
from baton.kvcache import NO_PAGE, KvCacheManager, KvGroup, PageAllocator, PrefixTree
from baton.kvcache.kv_groups import divide_layers
from baton.kvcache.kv_pool import PagePool, PoolLayout, default_page_size
from baton.layers.cache_spec import Full, State

PAGE = 4
SHAPES = ((2, 3), (5,))


def make(total: int = 40) -> KvCacheManager:
    groups = (KvGroup(Full()), KvGroup(State(SHAPES)))
    return KvCacheManager(PageAllocator(total), PrefixTree(PAGE, groups=groups))


def rows_with_states(table):
    return [index for index, page in enumerate(table) if page != NO_PAGE]


def test_a_row_takes_pages_for_its_end_and_its_last_border():
    cache = make()
    block_table = cache.hold([])
    assert cache.lacking(block_table, 6) == cache.extend(block_table, 6) == 8
    assert rows_with_states(block_table.tables[1]) == [4, 5]
    assert cache.extend(block_table, 7) == 2 and cache.extend(block_table, 10) == 5
    assert rows_with_states(block_table.tables[1]) == [4, 5, 6, 8, 9]
    assert block_table.held == 15
    cache.drop(block_table, 37)
    assert rows_with_states(block_table.tables[1]) == [8, 9] and block_table.held == 12
    cache.release(block_table, 0)
    cache.check(idle=True)


def test_a_prefix_ends_with_the_deepest_snapshot_and_a_later_sequence_adds_its_own():
    cache, tokens = make(), list(range(40))
    first = cache.hold(tokens)
    cache.extend(first, 6)
    cache.commit(first, tokens[:24])
    cache.release(first, 0)
    assert cache.match_length(tokens) == 24
    assert cache.match_length(tokens[:23]) == 20
    assert cache.match_length(tokens[:18]) == 0, "there is no snapshot so early"
    second = cache.hold(tokens[:18], max_rows=4)
    cache.extend(second, 5)
    assert rows_with_states(second.tables[1]) == [3, 4]
    cache.commit(second, tokens[:16])
    cache.release(second, 0)
    assert cache.match_length(tokens[:18]) == 16
    third = cache.hold(tokens[:18], max_rows=4)
    assert rows_with_states(third.tables[1]) == [3] and third.held == 5
    cache.release(third, 0)
    cache.check(idle=True)


def test_snapshots_within_a_prefix_are_evicted_before_its_end():
    cache, tokens = make(20), list(range(24))
    block_table = cache.hold(tokens)
    for row in range(1, 7):
        cache.extend(block_table, row)
    cache.commit(block_table, tokens)
    cache.release(block_table, 0)
    assert cache.counts().cached == 12
    other = cache.hold([99] * 40)
    cache.extend(other, 10)
    assert cache.match_length(tokens) == 24, "eviction took inner snapshots"
    assert cache.match_length(tokens[:12]) == 0
    cache.release(other, 0)
    cache.check(idle=True)


@pytest.mark.parametrize(
    ("start", "count", "stops"),
    [
        (0, 1, [1]),
        (0, 4, [4]),
        (0, 11, [8, 11]),
        (2, 9, [4, 8, 11]),
        (2, 2, [4]),
        (4, 4, [8]),
        (6, 6, [8, 12]),
    ],
)
def test_a_row_stops_where_its_state_is_kept(start, count, stops):
    assert State.stops(start, start + count, PAGE) == stops


def test_runs_read_the_state_before_and_write_the_state_behind():
    table = (7, 3, 9, 5)
    row = PlanRow(0, (0,) * 9, 2, ((), table))
    runs = state_runs(AttentionRows([row], 1, 9, longest=9), 1, PAGE, torch.device("cpu"))
    assert [(r.tokens, int(r.reads), int(r.writes)) for r in runs] == [
        (slice(1, 3), 7, 7),
        (slice(3, 7), 7, 3),
        (slice(7, 10), 3, 9),
    ]
    singles = [PlanRow(slot, None, start, ((), table)) for slot, start in enumerate((0, 4, 7))]
    (run,) = state_runs(AttentionRows(singles, 0, 3), 1, PAGE, torch.device("cpu"))
    assert run.reads.tolist() == [7, 7, 3] and run.writes.tolist() == [7, 3, 3]
    assert run.begins.tolist() == [True, False, False]


def test_drafts_are_kept_and_right_ones_replayed():
    table = (7, 3, 9, 5)
    rows = [
        PlanRow(4, None, 5, ((), table), drafts=(1,)),
        PlanRow(2, None, 10, ((), table), drafts=(1, 1), replay=2),
        PlanRow(6, None, 7, ((), table), drafts=(1,)),
    ]
    plain, replaying, one, two = state_runs(
        AttentionRows(rows, 3, 7, longest=3), 1, PAGE, torch.device("cpu")
    )
    assert plain.tokens.tolist() == [3, 8] and plain.slots is None and not plain.replay
    assert plain.reads.tolist() == plain.writes.tolist() == [3, 3]
    assert (replaying.tokens, replaying.replay, replaying.slots.tolist()) == (slice(5, 6), 2, [2])
    # The state before the two drafts is that of the page before.
    assert (replaying.reads.tolist(), replaying.writes.tolist()) == ([3], [9])
    assert (one.tokens.tolist(), one.slots.tolist(), one.reads.tolist()) == ([4, 9], [4, 6], [3, 3])
    assert (two.tokens, two.slots.tolist(), two.reads.tolist()) == (slice(6, 8), [2], [9])
    assert one.writes is two.writes is None


def test_no_draft_ends_a_page():
    assert [State.most_drafts(first, PAGE) for first in range(5)] == [3, 2, 1, 0, 3]


def test_a_page_holds_whole_states_and_pages_of_all_groups_have_as_many_bytes():
    qwen = ([State(((32, 128, 128), (8192, 3)))] * 3 + [Full(heads=4, head_dim=256)]) * 8
    size = default_page_size(torch.device("cuda"), qwen, 2)
    layout = PoolLayout.of(qwen, size, torch.bfloat16)
    kinds = [group.spec.kind for group in layout.groups]
    assert size == 128 and kinds == sorted(kinds), "states come last"
    assert {each.page_bytes for each in (*layout.layouts, *layout.states)} == {layout.page_bytes}
    held = 128 * 8 * 2 * 4 * 256 * 2 + 24 * 4 * (32 * 128 * 128 + 3 * 8192)
    assert held > 2 / 3 * layout.page_bytes * len(layout.groups), "under a third stays empty"
    assert default_page_size(torch.device("cpu"), qwen, 2) > 16
    assert default_page_size(torch.device("cpu"), [Full(heads=2, head_dim=64)], 4) == 16


def test_tensors_of_a_state_lie_side_by_side_in_its_page():
    specs = [State(SHAPES), Full(heads=1, head_dim=4), State(SHAPES)]
    groups, _ = divide_layers(specs, PAGE, 4)
    assert groups[0].layers == (1,)
    pool = PagePool(PoolLayout.of(specs, PAGE, torch.float32), 6)
    pool.raw.zero_()
    for view in pool.states:
        for tensors in view.layers:
            for shape, tensor in zip(SHAPES, tensors, strict=True):
                assert tensor.shape == (6, *shape)
                tensor[2] += 1
    assert pool.raw[2].view(torch.float32).unique().tolist() in ([0.0, 1.0], [1.0])
    assert not pool.raw[[0, 1, 3, 4, 5]].any()
