from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)
from kv_model import TreeModel

from baton.kvcache import AccountingError, BlockTable, KvCacheManager, OutOfPages, PageAllocator, PrefixTree
from baton.kvcache.eviction import POLICIES

PAGE, TOTAL = 2, 12


def make(total: int = TOTAL, page_size: int = PAGE, policy: str = "lru") -> KvCacheManager:
    return KvCacheManager(PageAllocator(total), PrefixTree(page_size, policy))


@dataclass(eq=False)
class Sequence:
    namespace: str
    tokens: list[int]
    block_table: BlockTable
    pages: list[int]
    owned: set[int]
    locked: tuple[str, tuple[int, ...]]
    pins: int = 0
    last_step: int = 0
    release_step: int | None = None
    seen: list[dict[int, object]] = field(default_factory=list)
    """Page contents when each pin was taken."""


class CacheMachine(RuleBasedStateMachine):
    """The cache against a model, with the contents of every page: whatever a launched step or a pin relies on
    must read the same when it ends."""

    def __init__(self, policy: str) -> None:
        super().__init__()
        self.cache = make(policy=policy)
        self.tree = TreeModel(PAGE, policy)
        self.free = set(range(TOTAL))
        self.quarantined: set[int] = set()
        self.sequences: list[Sequence] = []
        self.contents: dict[int, object] = {}
        self.steps: dict[int, dict[int, object]] = {}
        self.launched = self.retired = 0

    def pick(self, data: st.DataObject, live: bool = True) -> Sequence | None:
        choices = [s for s in self.sequences if not live or s.release_step is None]
        return data.draw(st.sampled_from(choices)) if choices else None

    def read(self, sequence: Sequence) -> dict[int, object]:
        return {page: self.contents[page] for page in sequence.pages}

    def settle(self) -> None:
        """The model's side of every deferred release."""
        for sequence in list(self.sequences):
            step = sequence.release_step
            if step is not None and step <= self.retired and sequence.pins == 0:
                self.sequences.remove(sequence)
                self.tree.locks.remove(sequence.locked)
                self.free |= sequence.owned

    @rule(
        tokens=st.lists(st.integers(0, 1), max_size=6 * PAGE),
        namespace=st.sampled_from(["", "tenant"]),
        limit=st.none() | st.integers(0, 5),
    )
    def hold(self, tokens: list[int], namespace: str, limit: int | None) -> None:
        expected = len(self.tree.find(tokens, namespace, limit))
        assert self.cache.match_length(tokens, namespace, limit) == expected * PAGE
        block_table = self.cache.hold(tokens, namespace, limit)
        pages = self.tree.match(tokens, namespace, limit)
        assert block_table.tables == [pages]
        assert block_table.shared == expected
        for index, page in enumerate(pages):
            assert self.contents[page] == (namespace, tuple(tokens[: (index + 1) * PAGE]))
        locked = (namespace, tuple(tokens[: len(pages) * PAGE]))
        self.tree.locks.append(locked)
        self.sequences.append(Sequence(namespace, tokens, block_table, list(pages), set(), locked))

    @rule(data=st.data(), count=st.integers(0, 5))
    def extend(self, data: st.DataObject, count: int) -> None:
        sequence = self.pick(data)
        if sequence is None:
            return
        generations = [self.cache.generation(page) for page in range(TOTAL)]
        if count > len(self.free) + self.tree.evictable:
            with pytest.raises(OutOfPages):
                self.cache.extend(sequence.block_table, len(sequence.pages) + count)
            assert [self.cache.generation(page) for page in range(TOTAL)] == generations
            return
        self.free |= set(self.tree.evict(count - len(self.free)))
        assert self.cache.extend(sequence.block_table, len(sequence.pages) + count) == count
        pages = sequence.block_table.tables[0][len(sequence.pages) :]
        assert set(pages) <= self.free
        self.free -= set(pages)
        sequence.owned |= set(pages)
        for page in pages:
            assert self.cache.generation(page) == generations[page] + 1
            sequence.pages.append(page)
            end = len(sequence.pages) * PAGE
            complete = end <= len(sequence.tokens)
            self.contents[page] = (sequence.namespace, tuple(sequence.tokens[:end])) if complete else object()

    @rule(data=st.data())
    def commit(self, data: st.DataObject) -> None:
        sequence = self.pick(data)
        if sequence is None:
            return
        end = data.draw(st.integers(0, min(len(sequence.pages) * PAGE, len(sequence.tokens))))
        tokens = sequence.tokens[:end]
        committed = len(sequence.locked[1]) // PAGE
        if any(page in self.quarantined for page in sequence.pages[committed : end // PAGE]):
            with pytest.raises(AccountingError, match="not owned"):
                self.cache.commit(sequence.block_table, tokens, sequence.namespace)
            return
        self.cache.commit(sequence.block_table, tokens, sequence.namespace)
        if end // PAGE > committed:
            taken = self.tree.insert(tokens, sequence.pages[: end // PAGE], sequence.namespace)
            sequence.owned -= {sequence.pages[index] for index in taken}
            self.tree.locks.remove(sequence.locked)
            sequence.locked = (sequence.namespace, tuple(tokens[: end // PAGE * PAGE]))
            self.tree.locks.append(sequence.locked)

    @rule(data=st.data())
    def launch(self, data: st.DataObject) -> None:
        sequence = self.pick(data)
        if sequence is not None:
            self.launched += 1
            sequence.last_step = self.launched
            self.steps[self.launched] = self.read(sequence)

    @rule(data=st.data())
    def retire(self, data: st.DataObject) -> None:
        step = data.draw(st.integers(0, self.launched))
        for number in [number for number in self.steps if number <= step]:
            for page, content in self.steps.pop(number).items():
                assert self.contents[page] == content, "a page was reused under a step in flight"
        self.cache.retire(step)
        self.retired = max(self.retired, step)
        self.settle()

    @rule(data=st.data())
    def pin(self, data: st.DataObject) -> None:
        sequence = self.pick(data)
        if sequence is not None:
            self.cache.pin(sequence.block_table)
            sequence.pins += 1
            sequence.seen.append(self.read(sequence))

    @rule(data=st.data())
    def unpin(self, data: st.DataObject) -> None:
        sequence = self.pick(data, live=False)
        if sequence is None:
            return
        if sequence.pins == 0:
            with pytest.raises(AccountingError, match="unpinned"):
                self.cache.unpin(sequence.block_table)
            return
        for page, content in sequence.seen.pop().items():
            assert self.contents[page] == content, "a page was reused under a pin"
        self.cache.unpin(sequence.block_table)
        sequence.pins -= 1
        self.settle()

    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        sequence = self.pick(data)
        if sequence is None:
            return
        step = data.draw(st.integers(sequence.last_step, self.launched))
        self.cache.release(sequence.block_table, step)
        sequence.release_step = step
        with pytest.raises(AccountingError, match="released twice"):
            self.cache.release(sequence.block_table, step)
        self.settle()

    @precondition(lambda self: len(self.quarantined) < TOTAL // 2)
    @rule(data=st.data())
    def quarantine(self, data: st.DataObject) -> None:
        sequence = self.pick(data, live=False)
        if sequence is None or not sequence.owned:
            return
        page = data.draw(st.sampled_from(sorted(sequence.owned)))
        self.cache.quarantine(sequence.block_table, [page])
        sequence.owned.remove(page)
        self.quarantined.add(page)
        with pytest.raises(AccountingError, match="not owned"):
            self.cache.quarantine(sequence.block_table, [page])

    @invariant()
    def agrees(self) -> None:
        self.cache.check()
        counts = self.cache.counts()
        assert counts.total == TOTAL
        assert counts.free == len(self.free)
        assert counts.cached == len(self.tree.entries)
        assert counts.owned == sum(len(sequence.owned) for sequence in self.sequences)
        assert counts.quarantined == len(self.quarantined)
        assert self.cache.available == len(self.free) + self.tree.evictable
        assert self.cache.pending == sum(s.release_step is not None for s in self.sequences)
        for sequence in self.sequences:
            assert sequence.block_table.tables == [sequence.pages]
            assert sequence.block_table.owned == sequence.owned

    def teardown(self) -> None:
        for sequence in self.sequences:
            if sequence.release_step is None:
                self.cache.release(sequence.block_table, self.launched)
            for _ in range(sequence.pins):
                self.cache.unpin(sequence.block_table)
        self.cache.retire(self.launched)
        self.cache.check(idle=True)
        counts = self.cache.counts()
        assert counts.free + counts.cached + counts.quarantined == TOTAL
        assert counts.quarantined == len(self.quarantined)


@pytest.mark.parametrize(
    "policy",
    [pytest.param(each, marks=() if each == "lru" else pytest.mark.thorough) for each in sorted(POLICIES)],
)
def test_against_the_model(policy: str) -> None:
    run_state_machine_as_test(
        lambda: CacheMachine(policy),
        settings=settings(max_examples=120, stateful_step_count=50, deadline=None),
    )


def test_a_second_sequence_shares_what_the_first_committed() -> None:
    cache = make(page_size=4)
    first = cache.hold(range(10))
    cache.extend(first, 3)
    cache.commit(first, range(10))
    second = cache.hold(range(10))
    assert second.tables == [first.tables[0][:2]]
    assert (cache.counts().owned, cache.counts().cached) == (1, 2)
    cache.release(first, 0)
    assert cache.available == 10  # the shared two are still locked
    cache.release(second, 0)
    assert cache.available == TOTAL
    cache.check(idle=True)


def test_duplicates_stay_owned_and_are_freed() -> None:
    cache = make()
    first, second = cache.hold([1, 2]), cache.hold([1, 2])
    cache.extend(first, 1)
    cache.extend(second, 1)
    cache.commit(first, [1, 2])
    cache.commit(second, [1, 2])
    assert (first.owned, second.owned) == (set(), set(second.tables[0]))
    cache.release(second, 0)
    assert cache.hold([1, 2]).tables == first.tables


def test_pages_that_are_not_there_cost_no_cached_one() -> None:
    cache = make()
    first = cache.hold([])
    cache.extend(first, 3)
    cache.commit(first, range(3 * PAGE))
    cache.release(first, 0)
    before, second = cache.counts(), cache.hold([])
    with pytest.raises(OutOfPages):
        cache.extend(second, TOTAL + 1)
    assert cache.counts() == before and not len(second)
    cache.extend(second, TOTAL)
    assert cache.counts().owned == TOTAL


def test_release_waits_for_the_step_and_for_the_pin() -> None:
    cache = make()
    block_table = cache.hold([])
    cache.extend(block_table, 2)
    cache.pin(block_table)
    cache.release(block_table, after_step=7)
    cache.retire(6)
    assert (cache.pending, cache.counts().owned) == (1, 2)
    cache.retire(7)
    assert (cache.pending, cache.counts().owned) == (1, 2)
    cache.unpin(block_table)
    assert (cache.pending, cache.counts().free) == (0, TOTAL)
    for use in (cache.unpin, cache.pin, lambda h: cache.release(h, 0), lambda h: cache.extend(h, 1)):
        with pytest.raises(AccountingError):
            use(block_table)
    cache.check(idle=True)


def test_a_bad_commit_changes_nothing() -> None:
    cache = make()
    block_table = cache.hold([1, 2, 3, 4])
    cache.extend(block_table, 2)
    for tokens, namespace, error in (
        ([1, 2, 3, 4, 5, 6], "", ValueError),
        ([1, 2, 3, 4], "other", ValueError),
        ([1, 2, 3, -4], "", OverflowError),
    ):
        with pytest.raises(error):
            cache.commit(block_table, tokens, namespace)
        cache.check()
        assert cache.counts().owned == 2
    cache.commit(block_table, [1, 2, 3, 4])
    assert cache.counts().owned == 0


def test_check_at_idle_names_what_is_left() -> None:
    cache = make()
    cache.hold([])
    cache.check()
    with pytest.raises(AccountingError, match="1 block tables at idle"):
        cache.check(idle=True)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        ("not cached", "of the tree are not cached"),
        ("not in the tree", "1 cached pages, 0 in the tree"),
        ("not owned", "of block tables are not owned"),
        ("not held", "2 owned pages, 1 held"),
        ("held twice", "2 owned pages, 4 held"),
        ("locks", "2 locks, 1 block tables"),
        ("references", "window pages of block tables are not those"),
        ("pending", "1 releases pending, 0 block tables released"),
    ],
)
def test_check_sees_damage(damage: str, message: str) -> None:
    cache = make()
    block_table = cache.hold([])
    cache.extend(block_table, 2)
    cache.check()
    first, _ = block_table.tables[0]
    if damage == "not cached":
        cache._tree.insert([1, 2], [(first,)])
    elif damage == "not in the tree":
        cache._allocator.to_cached([first])
        block_table.owned.discard(first)
    elif damage == "not owned":
        cache._allocator.quarantine([first])
    elif damage == "not held":
        block_table.owned.discard(first)
    elif damage == "held twice":
        cache._block_tables.add(BlockTable([[]], "", block_table.node, [0], block_table.owned))
        cache._tree.lock(block_table.node)
    elif damage == "locks":
        cache._tree.lock(block_table.node)
    elif damage == "references":
        cache._tree.windows.references[first] = 1
        cache._tree.windows._home[first] = block_table.node
        cache._tree.windows.check = lambda nodes: None  # type: ignore[method-assign]
    else:
        cache._pending += 1
    with pytest.raises(AccountingError, match=message):
        cache.check()


def test_what_is_owned_at_idle_is_named() -> None:
    cache = make()
    cache._allocator.take(2)
    with pytest.raises(AccountingError, match="2 owned pages, 0 held"):
        cache.check(idle=True)


@pytest.mark.parametrize(
    "use",
    [
        lambda cache, block_table: cache.extend(block_table, 1),
        lambda cache, block_table: cache.drop(block_table, 0),
        lambda cache, block_table: cache.commit(block_table, []),
        lambda cache, block_table: cache.pin(block_table),
        lambda cache, block_table: cache.release(block_table, 0),
    ],
)
def test_two_caches_do_not_share_holdings(use: Callable[[KvCacheManager, BlockTable], object]) -> None:
    cache, block_table = make(), make().hold([])
    with pytest.raises(AccountingError, match="another cache"):
        use(cache, block_table)


def test_commit_beside_pages_of_others_locks_no_more_than_it_may():
    cache = make(total=8)
    tokens = list(range(3 * PAGE))
    first, second = cache.hold([]), cache.hold([])
    cache.extend(first, 3)
    cache.extend(second, 3)
    cache.commit(first, tokens)
    assert cache.available == 2
    cache.release(first, 0)
    assert cache.available == 5, "the tree's three pages can be evicted"
    cache.commit(second, tokens, spare=2)
    assert (cache.available, second.committed) == (5, 0), (
        "three pages more would be locked: nothing is inserted"
    )
    cache.commit(second, tokens[: 2 * PAGE], spare=2)
    assert (cache.available, second.committed) == (3, 2)
    cache.commit(second, tokens, spare=1)
    assert (cache.available, second.committed) == (2, 3)
    cache.release(second, 0)
    cache.check(idle=True)
