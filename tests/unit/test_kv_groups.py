from __future__ import annotations

import random
from dataclasses import dataclass, field

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule, run_state_machine_as_test

from baton.kvcache import (
    FULL,
    NO_PAGE,
    BlockTable,
    KvCacheManager,
    KvGroup,
    OutOfPages,
    PageAllocator,
    PrefixTree,
)
from baton.kvcache.kv_groups import divide_layers, longest, peak
from baton.layers.cache_spec import ChunkedWindow, Full, SlidingWindow, attention_cache

PAGE = 2


@pytest.mark.parametrize(
    ("windows", "size", "expected"),
    [
        ([None] * 28, 28, [None]),
        ([4096] * 32, 32, [4096]),
        ([128, None] * 12, 12, [None, 128]),  # gpt-oss 20B
        (([512] * 5 + [None]) * 4 + [512] * 2, 4, [None] + [512] * 6),  # Gemma 3 1B: two places stay empty
        (([1024] * 5 + [None]) * 5 + [1024] * 4, 5, [None] + [1024] * 6),  # Gemma 3 4B: one
        ([48, None, 48], 1, [None, 48, 48]),
        ([8, 16, None], 1, [None, 8, 16]),
    ],
)
def test_layers_are_divided_among_pages_of_one_size(windows, size, expected):
    groups, room = divide_layers([attention_cache(window) for window in windows])
    assert room == 2 * size
    assert [group.spec.window for group in groups] == expected
    assert max(len(group.layers) for group in groups) == size
    assert sorted(layer for group in groups for layer in group.layers) == list(range(len(windows)))
    for group in groups:
        assert all(windows[layer] == group.spec.window for layer in group.layers)


def test_a_window_sees_and_keeps_pages_up_to_its_borders():
    spec = SlidingWindow(5)
    # Position 9 sees 5 to 9; 10 sees 6 to 10.
    assert [spec.sees(position, 2) for position in (0, 4, 5, 6, 9, 10)] == [0, 0, 0, 1, 2, 3]
    # A sequence at 10 could be cut back to the border at 8, which sees 4.
    assert [spec.keeps(position, 2) for position in (0, 8, 9, 10, 11)] == [0, 1, 2, 2, 3]
    assert Full().sees(99, 2) == Full().keeps(99, 2) == 0


def test_a_chunk_is_seen_from_its_first_position_on():
    spec = ChunkedWindow(5)
    # 4 sees 0 to 4, 5 sees itself, 9 sees 5 to 9; a page that two chunks share is seen by both.
    assert [spec.sees(position, 2) for position in (0, 4, 5, 9, 10)] == [0, 0, 2, 2, 5]
    # A sequence at 6 could be cut back to the border at 4, which sees 0.
    assert [spec.keeps(position, 2) for position in (4, 6, 7, 10, 11)] == [0, 0, 2, 2, 5]
    assert spec.needs(5, None, 2) == 5, "nothing is seen of what ends with a chunk"
    assert spec.within(6) == spec and spec.within(5) == Full()
    assert spec != SlidingWindow(5)


@pytest.mark.parametrize("kind", [SlidingWindow, ChunkedWindow])
@pytest.mark.parametrize("window", [1, 2, 3, 4, 5, 8, 11])
@pytest.mark.parametrize("chunk", [1, 2, 3, 7])
def test_no_sequence_holds_more_than_its_peak(kind, window, chunk):
    """As the scheduler does it: two steps in flight, pages given up when the first has retired."""
    groups = (FULL, KvGroup(kind(window)))
    for total in (1, 5, 24, 41):
        cache = KvCacheManager(PageAllocator(200), PrefixTree(PAGE, groups=groups))
        block_table, ends, most = cache.hold([]), [0], 0
        while ends[-1] < total:
            ends.append(min(total, ends[-1] + chunk))
            cache.extend(block_table, -(-ends[-1] // PAGE))
            most = max(most, block_table.held)
            cache.drop(block_table, ends[max(0, len(ends) - 2)])
        assert most <= peak(groups, total, PAGE, 2 * chunk)
        pages = peak(groups, total, PAGE, 2 * chunk)
        assert longest(groups, pages, 1000, PAGE, 2 * chunk) >= total
        assert longest(groups, pages - 1, 1000, PAGE, 2 * chunk) < total


@dataclass(eq=False)
class Sequence:
    """What the machine knows of a block table; it writes all pages up to `length` tokens."""

    tokens: list[int]
    block_table: BlockTable
    position: int
    """The next token to be computed; what it sees must be there."""
    pins: int = 0
    released: int | None = None
    under: list[set[int]] = field(default_factory=list)


class GroupsMachine(RuleBasedStateMachine):
    """Sequences over a cache with several groups. Each page holds what was written there: whatever a position
    sees must be the KV of its own prefix, in each group."""

    groups = (FULL, KvGroup(SlidingWindow(3)), KvGroup(SlidingWindow(7)), KvGroup(ChunkedWindow(6)))
    total = 24

    def __init__(self) -> None:
        super().__init__()
        self.cache = KvCacheManager(PageAllocator(self.total), PrefixTree(PAGE, groups=self.groups))
        self.contents: dict[int, object] = {}
        self.sequences: list[Sequence] = []
        self.step = 0

    def pick(self, data: st.DataObject) -> Sequence | None:
        live = [s for s in self.sequences if s.released is None]
        return data.draw(st.sampled_from(live)) if live else None

    @rule(tokens=st.lists(st.integers(0, 1), max_size=16), limit=st.none() | st.integers(0, 8))
    def hold(self, tokens: list[int], limit: int | None) -> None:
        found = self.cache.match_length(tokens, "", limit)
        fewer = self.cache.unlocked(tokens, "", found // PAGE)
        available = self.cache.available
        block_table = self.cache.hold(tokens, "", found // PAGE)
        assert len(block_table) * PAGE == found
        assert block_table.held == self.cache.matched(len(block_table))
        assert available - self.cache.available == fewer
        self.sequences.append(Sequence(tokens, block_table, found))

    @rule(tokens=st.lists(st.integers(0, 1), min_size=1, max_size=16))
    def hold_to_pull(self, tokens: list[int]) -> None:
        """As a decode node: everything up to the last token comes from elsewhere."""
        rows, position = len(tokens) // PAGE, len(tokens)
        block_table = self.cache.hold(tokens, "", rows, position)
        before = len(block_table)
        self.cache.release(block_table, 0)
        fewer, available = self.cache.unlocked(tokens, "", before, position), self.cache.available
        block_table = self.cache.hold(tokens, "", rows, position)
        assert (len(block_table), available - self.cache.available) == (before, fewer)
        try:
            self.cache.extend(block_table, -(-len(tokens) // PAGE))
        except OutOfPages:
            self.cache.release(block_table, 0)
            return
        self.write(block_table, tokens, before)
        self.sequences.append(Sequence(tokens, block_table, len(tokens)))

    @rule(data=st.data(), more=st.lists(st.integers(0, 1), min_size=1, max_size=5))
    def compute(self, data: st.DataObject, more: list[int]) -> None:
        sequence = self.pick(data)
        if sequence is None or sequence.pins:
            return
        block_table = sequence.block_table
        tokens = [*sequence.tokens[: sequence.position], *more]
        rows = -(-len(tokens) // PAGE)
        if self.cache.lacking(block_table, rows) > self.cache.available:
            with pytest.raises(OutOfPages):
                self.cache.extend(block_table, rows)
            return
        before = sequence.position // PAGE
        self.cache.extend(block_table, rows)
        self.check_seen(sequence)
        sequence.tokens = tokens
        sequence.position = len(tokens)
        self.write(block_table, tokens, before)

    @rule(data=st.data())
    def drop(self, data: st.DataObject) -> None:
        sequence = self.pick(data)
        if sequence is not None:
            before = self.cache.available
            grown = self.cache.drop(sequence.block_table, sequence.position)
            assert self.cache.available - before == grown and (not grown or not sequence.pins)

    @rule(data=st.data())
    def commit(self, data: st.DataObject) -> None:
        sequence = self.pick(data)
        if sequence is not None:
            self.cache.commit(sequence.block_table, sequence.tokens[: sequence.position])

    @rule(data=st.data())
    def pin(self, data: st.DataObject) -> None:
        sequence = self.pick(data)
        if sequence is not None:
            self.cache.pin(sequence.block_table)
            sequence.pins += 1
            sequence.under.append({p for table in sequence.block_table.tables for p in table if p != NO_PAGE})

    @rule()
    def unpin(self) -> None:
        for sequence in self.sequences:
            if sequence.pins:
                free = {p for p in range(self.total) if self.cache._allocator.state(p) == 0}
                assert not free & sequence.under.pop(), "a page was freed under a pin"
                sequence.pins -= 1
                self.cache.unpin(sequence.block_table)
        self.sequences = [s for s in self.sequences if s.released is None or s.pins]

    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        sequence = self.pick(data)
        if sequence is not None:
            self.cache.release(sequence.block_table, 0)
            sequence.released = 0
            if not sequence.pins:
                self.sequences.remove(sequence)

    def write(self, block_table: BlockTable, tokens: list[int], first: int) -> None:
        for group, table in enumerate(block_table.tables):
            for index in range(first, len(table)):
                if table[index] in block_table.owned:
                    self.contents[table[index]] = (group, tuple(tokens[: (index + 1) * PAGE]))

    def check_seen(self, sequence: Sequence) -> None:
        position, block_table = sequence.position, sequence.block_table
        assert block_table.page_tables() == tuple(map(tuple, block_table.tables)), "no change is missed"
        for place, (group, table) in enumerate(zip(self.groups, block_table.tables, strict=True)):
            for index in range(group.spec.sees(position, PAGE), position // PAGE):
                expected = (place, tuple(sequence.tokens[: (index + 1) * PAGE]))
                assert self.contents[table[index]] == expected

    @invariant()
    def agrees(self) -> None:
        self.cache.check()
        for sequence in self.sequences:
            if sequence.released is None:
                self.check_seen(sequence)

    def teardown(self) -> None:
        for sequence in self.sequences:
            if sequence.released is None:
                self.cache.release(sequence.block_table, 0)
            for _ in range(sequence.pins):
                self.cache.unpin(sequence.block_table)
        self.cache.check(idle=True)
        counts = self.cache.counts()
        assert counts.free + counts.cached == self.total
        everything = self.cache.hold([])
        self.cache.extend(everything, self.total // len(self.groups))
        assert self.cache.available == 0, "all cached pages could be evicted"


class OnlyWindowsMachine(GroupsMachine):
    groups = (KvGroup(SlidingWindow(1)), KvGroup(SlidingWindow(4)))


@pytest.mark.parametrize("machine", [GroupsMachine, OnlyWindowsMachine])
def test_pages_hold_what_positions_see(machine):
    run_state_machine_as_test(
        machine, settings=settings(max_examples=150, stateful_step_count=50, deadline=None)
    )


def cached(length: int) -> KvCacheManager:
    """A cache that has computed range(length), page by page, and given it up."""
    cache = KvCacheManager(PageAllocator(40), PrefixTree(PAGE, groups=(FULL, KvGroup(SlidingWindow(4)))))
    block_table = cache.hold([])
    for end in range(PAGE, length + 1, PAGE):
        cache.extend(block_table, end // PAGE)
        cache.commit(block_table, range(end))
        cache.drop(block_table, end)
    cache.release(block_table, 0)
    return cache


def test_window_pages_inside_a_prefix_are_evicted_first_and_the_prefix_stays_usable():
    cache = cached(20)
    assert (cache.counts().cached, cache.match_length(range(14)), cache.match_length(range(20))) == (
        20,
        14,
        20,
    )
    other = cache.hold([99])
    cache.extend(other, 11)  # 20 pages are free
    assert cache.counts().cached < 20
    assert cache.match_length(range(20)) == 20, "its end can still be continued"
    assert cache.match_length(range(18)) == 18, "and so can the border before"
    assert cache.match_length(range(14)) == 0, "its middle cannot: its window pages are gone"
    assert cache.unlocked(range(14), "", 7) == 7, "only pages that are there can be held"
    cache.release(other, 0)
    cache.check(idle=True)


def test_what_is_pinned_keeps_the_pages_that_it_no_longer_sees():
    """Somebody may still copy them."""
    cache = KvCacheManager(PageAllocator(8), PrefixTree(PAGE, groups=(KvGroup(SlidingWindow(2)),)))
    block_table = cache.hold([])
    cache.extend(block_table, 6)
    before = block_table.page_tables()
    cache.pin(block_table)
    assert cache.drop(block_table, 6 * PAGE) == 0 and block_table.page_tables() == before
    cache.unpin(block_table)
    assert cache.drop(block_table, 6 * PAGE) > 0 and block_table.page_tables() != before
    cache.release(block_table, 0)
    cache.check(idle=True)


def test_a_prefix_without_its_window_pages_is_usable_where_the_rest_is_pulled():
    cache = cached(20)
    other = cache.hold([99])
    cache.extend(other, 11)
    tokens = [*range(14), *range(50, 70)]
    block_table = cache.hold(tokens, "", 17, position=len(tokens))
    assert len(block_table) == 7 and block_table.tables[1] == [NO_PAGE] * 7, (
        "only the full group's pages are wanted"
    )
    cache.release(block_table, 0)
    cache.release(other, 0)


def test_a_longer_run_fills_the_holes_of_a_cached_prefix():
    cache = cached(20)
    other = cache.hold([99])
    cache.extend(other, 11)
    cache.release(other, 0)
    again = cache.hold(range(14), "", 6)
    assert len(again) == 0
    cache.extend(again, 7)
    cache.commit(again, range(14))
    cache.release(again, 0)
    assert cache.match_length(range(14)) == 14
    cache.check(idle=True)


def test_eviction_keeps_up_with_many_prompts():
    """No page gets lost in a pool that is always full."""
    cache = KvCacheManager(
        PageAllocator(120),
        PrefixTree(PAGE, groups=(FULL, KvGroup(SlidingWindow(5)), KvGroup(SlidingWindow(5)))),
    )
    draw = random.Random(3)
    for _ in range(400):
        tokens = [draw.randrange(3) for _ in range(draw.randrange(2, 40))]
        block_table = cache.hold(tokens, "", (len(tokens) - 1) // PAGE)
        cache.extend(block_table, -(-len(tokens) // PAGE))
        cache.commit(block_table, tokens)
        cache.drop(block_table, len(tokens))
        cache.release(block_table, 0)
        cache.check(idle=True)
    counts = cache.counts()
    assert counts.cached + counts.free == counts.total and cache.available == counts.total
