from __future__ import annotations

import random
import time
from collections.abc import Callable

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
from kv_model import Prefix, TreeModel, rows

from baton.kvcache.eviction import POLICIES, EvictionQueue, make_policy
from baton.kvcache.kv_groups import FULL, KvGroup
from baton.kvcache.page_allocator import AccountingError
from baton.kvcache.prefix_tree import PrefixTree
from baton.kvcache.tree_node import TreeNode
from baton.layers.cache_spec import SlidingWindow

PAGE = 2
tokens_strategy = st.lists(st.integers(0, 1), max_size=6 * PAGE + 1)
namespaces = st.sampled_from(["", "tenant"])


class TreeMachine(RuleBasedStateMachine):
    """The tree against the model, operation by operation, eviction order included."""

    def __init__(self, policy: str) -> None:
        super().__init__()
        self.tree = PrefixTree(PAGE, policy)
        self.model = TreeModel(PAGE, policy)
        self.locked: list[tuple[TreeNode, Prefix]] = []
        self.next_page = 0
        self.original: dict[str, str] = {}
        """By the namespace of what was withdrawn: the one in which its sequences go on."""

    def fresh(self, count: int) -> list[int]:
        self.next_page += count
        return list(range(self.next_page - count, self.next_page))

    @rule(tokens=tokens_strategy, namespace=namespaces, spare=st.integers(0, 1))
    def insert(self, tokens: list[int], namespace: str, spare: int) -> None:
        pages = self.fresh(max(0, len(tokens) // PAGE - spare))
        _, taken = self.tree.insert(tokens, rows(pages), namespace)
        assert taken == [pages[index] for index in self.model.insert(tokens, pages, namespace)]

    @rule(
        tokens=tokens_strategy, namespace=namespaces, limit=st.none() | st.integers(0, 6), lock=st.booleans()
    )
    def match(self, tokens: list[int], namespace: str, limit: int | None, lock: bool) -> None:
        assert self.tree.match_length(tokens, namespace, limit) == len(
            self.model.find(tokens, namespace, limit)
        )
        found, matched = self.tree.match(tokens, namespace, limit)
        assert matched == rows(self.model.match(tokens, namespace, limit))
        if lock:
            self.tree.lock(found)
            prefix = (namespace, tuple(tokens[: len(matched) * PAGE]))
            self.model.locks.append(prefix)
            self.locked.append((found, prefix))

    @precondition(lambda self: self.locked)
    @rule(data=st.data(), more=tokens_strategy)
    def insert_after_a_locked_node(self, data: st.DataObject, more: list[int]) -> None:
        """As `KvCache.commit` does."""
        index = data.draw(st.integers(0, len(self.locked) - 1))
        node, (namespace, tokens) = self.locked[index]
        whole = [*tokens, *more]
        pages = self.fresh(len(more) // PAGE)
        self.tree.unlock(node)
        below, taken = self.tree.insert(
            more, rows(pages), self.original.get(namespace, namespace), after=node
        )
        self.tree.lock(below)
        shared = len(tokens) // PAGE
        indexes = self.model.insert(whole, [-1] * shared + pages, namespace)
        assert taken == [pages[index - shared] for index in indexes]
        prefix = (namespace, tuple(whole[: (shared + len(pages)) * PAGE]))
        self.model.locks.remove((namespace, tokens))
        self.model.locks.append(prefix)
        self.locked[index] = (below, prefix)

    @precondition(lambda self: self.locked)
    @rule(data=st.data())
    def unlock(self, data: st.DataObject) -> None:
        node, prefix = self.locked.pop(data.draw(st.integers(0, len(self.locked) - 1)))
        self.tree.unlock(node)
        self.model.locks.remove(prefix)

    @precondition(lambda self: self.locked)
    @rule(data=st.data())
    def withdraw(self, data: st.DataObject) -> None:
        """Locks of others stay, and what follows is entered below them."""
        node, prefix = self.locked[data.draw(st.integers(0, len(self.locked) - 1))]
        self.tree.withdraw(node)
        if prefix[1]:
            *_, top, _ = node.path()
            name = top.child_key[0]
            assert name.startswith("\udc00")
            self.original[name] = self.original.get(prefix[0], prefix[0])
            renamed = self.model.withdraw(prefix, name)
            self.locked = [(each, renamed(name)) for each, name in self.locked]

    @rule(count=st.integers(0, 7))
    def evict(self, count: int) -> None:
        assert self.tree.evict(count) == self.model.evict(count)

    @invariant()
    def agrees(self) -> None:
        self.tree.check()
        assert self.tree.cached == len(self.model.entries)
        assert self.tree.evictable == self.model.evictable
        assert self.tree.locks == len(self.locked)
        held = {page for _, page in self.tree.pages()}
        assert held == {entry.page for entry in self.model.entries.values()}

    def teardown(self) -> None:
        while self.locked:
            self.tree.unlock(self.locked.pop()[0])
        self.model.locks.clear()
        assert self.tree.evict(self.tree.cached) == self.model.evict(len(self.model.entries))
        assert (self.tree.cached, self.tree.locked, list(self.tree.pages())) == (0, 0, [])
        self.tree.check()


@pytest.mark.parametrize("policy", sorted(POLICIES))
def test_against_the_model(policy: str) -> None:
    run_state_machine_as_test(
        lambda: TreeMachine(policy),
        settings=settings(max_examples=120, stateful_step_count=40, deadline=None),
    )


@pytest.mark.parametrize(
    ("policy", "order"),
    [("lru", "bca"), ("mru", "acb"), ("fifo", "abc"), ("lfu", "cba")],
)
def test_eviction_order(policy: str, order: str) -> None:
    tree = PrefixTree(1, policy)
    page = {"a": 0, "b": 1, "c": 2}
    for name in "abc":
        tree.insert([page[name]], [(page[name],)])
    for name in "aabca":  # hits: a 3, b 1, c 1; last use: b, c, a
        tree.match([page[name]])
    if policy == "lfu":
        tree.match([page["b"]])  # hits: a 3, b 2, c 1
    assert tree.evict(3) == [page[name] for name in order]


@pytest.mark.parametrize(("policy", "first"), [("lru", 1), ("mru", 2), ("fifo", 1), ("lfu", 2)])
def test_what_follows_a_run_is_evicted_by_its_own_usage(policy: str, first: int) -> None:
    """A run grows only by what is as old and as often used as it is."""
    tree = PrefixTree(1, policy)
    tree.insert([0], [(0,)])
    for _ in range(2):
        tree.match([0])
    tree.insert([1], [(1,)])
    tree.match([1])
    tree.insert([0, 2], [(0,), (2,)])
    assert tree.evict(1) == [first]
    tree.check()


@pytest.mark.parametrize("policy", sorted(POLICIES))
def test_what_is_withdrawn_goes_first(policy: str) -> None:
    """With what is entered below it later, whatever the policy: no search finds any of it."""
    tree = PrefixTree(1, policy)
    tree.insert([7], [(70,)])
    tree.insert([1, 2, 3], [(10,), (20,), (30,)])
    for _ in range(3):
        tree.match([1, 2, 3])
    first, _ = tree.match([1])
    tree.lock(first)
    tree.withdraw(first)
    tree.insert([2, 4], [(-1,), (40,)], after=first)  # splits the run that was withdrawn
    tree.insert([8], [(80,)])
    tree.unlock(first)
    assert set(tree.evict(4)) == {10, 20, 30, 40}
    assert set(tree.evict(9)) == {70, 80}


def test_window_pages_of_what_is_withdrawn_go_first() -> None:
    tree = PrefixTree(1, groups=(FULL, KvGroup(SlidingWindow(1))))
    tree.insert([7, 8, 9], [(70, 71), (80, 81), (90, 91)])
    node, _ = tree.insert([1, 2, 3], [(10, 11), (20, 21), (30, 31)])
    tree.withdraw(node)
    assert tree.evict(1) == [11, 21]


def test_each_change_of_what_is_held_has_its_version() -> None:
    tree = PrefixTree(1)
    seen = [tree.version]
    for number in range(3):
        tree.insert([number], [(number,)])
        seen.append(tree.version)
    for _ in range(3):
        tree.evict(1)
        seen.append(tree.version)
    assert sorted(set(seen)) == seen
    tree.evict(1)
    tree.match([1])
    assert tree.version == seen[-1]
    node, _ = tree.insert([1], [(1,)])
    entered = tree.version
    tree.withdraw(node)
    assert seen[-1] < entered < tree.version


def test_a_leaf_is_trimmed_from_its_end() -> None:
    tree = PrefixTree(1)
    tree.insert([5, 6, 7], [(50,), (60,), (70,)])
    assert tree.evict(2) == [70, 60]
    assert tree.match([5, 6, 7])[1] == [(50,)]
    tree.check()


def test_a_match_inside_a_run_ends_exactly_there() -> None:
    tree = PrefixTree(1)
    tree.insert([1, 2, 3, 4], [(10,), (20,), (30,), (40,)])
    node, pages = tree.match([1, 2, 9])
    assert pages == [(10,), (20,)]
    tree.lock(node)
    assert (tree.locked, tree.evictable) == (2, 2)
    assert tree.evict(9) == [40, 30]
    tree.unlock(node)
    assert tree.evict(9) == [20, 10]


def test_namespaces_do_not_mix() -> None:
    tree = PrefixTree(1)
    tree.insert([1], [(10,)], "a")
    assert tree.match([1], "b")[1] == []
    assert tree.match([1])[1] == []
    assert tree.insert([1], [(11,)], "b")[1] == [11]
    assert tree.match([1], "a")[1] == [(10,)]


def test_partial_pages_are_not_entered() -> None:
    tree = PrefixTree(4)
    assert tree.insert([1, 2, 3, 4, 5, 6], [(10,)])[1] == [10]
    assert tree.match([1, 2, 3, 4, 5, 6])[1] == [(10,)]
    assert tree.match([1, 2, 3])[1] == []
    with pytest.raises(ValueError, match="2 pages of 4 for only 6 tokens"):
        tree.insert([1, 2, 3, 4, 5, 6], [(10,), (11,)])


def test_misuse_of_locks_is_seen() -> None:
    tree = PrefixTree(1)
    node, _ = tree.insert([1], [(10,)])
    with pytest.raises(AccountingError, match="more often"):
        tree.unlock(node)
    deeper, _ = tree.insert([1, 2], [(30,), (20,)], "other")
    tree.lock(deeper)
    assert deeper.parent is not None
    with pytest.raises(AccountingError, match="more often"):
        tree.unlock(deeper.parent)  # locked through its descendant only
    tree.check()
    assert tree.evict(5) == [10]
    with pytest.raises(AccountingError, match="evicted"):
        tree.lock(node)


def test_bad_arguments() -> None:
    with pytest.raises(ValueError, match="fifo, lfu, lru, mru"):
        make_policy("random")
    with pytest.raises(ValueError, match="page_size"):
        PrefixTree(0)
    for token in (-1, 2**32):
        with pytest.raises(OverflowError):
            PrefixTree(1).match([token])


def damaged_tree(damage: str) -> PrefixTree:
    """[1, 2] -> [3], and [4], which is locked."""
    tree = PrefixTree(1)
    tree.insert([1, 2], [(10,), (20,)])
    upper, _ = tree.match([1, 2])
    tree.lock(upper)
    lower, _ = tree.insert([1, 2, 3], [(10,), (20,), (30,)])
    tree.unlock(upper)
    locked, _ = tree.insert([4], [(40,)])
    tree.lock(locked)
    tree.check()
    changes: dict[str, Callable[[], object]] = {
        "locks of its own": lambda: setattr(locked, "own_locks", 2),
        "locks of lower ones": lambda: setattr(tree._root, "locks", 2),
        "key": lambda: setattr(lower, "key", lower.key + lower.key),
        "ids": lower.ids.clear,
        "rows": lower.rows.clear,
        "parent": lambda: setattr(lower, "parent", tree._root),
        "name": lambda: setattr(lower, "child_key", ("other", lower.child_key[1])),
        "place": lambda: setattr(lower, "first", 1),
        "tokens": lambda: setattr(lower, "key", tree.encode([9])),
        "no rows": lambda: upper.children.update({("", b""): TreeNode(upper, ("", b""), b"", 2, [], [])}),
        "not queued": lambda: tree._queue.discard(lower),
        "queued with children": lambda: tree._queue.put(upper),
        "queued though locked": lambda: tree._queue.put(locked),
        "queued and gone": lambda: tree._queue.put(TreeNode(None, ("", b""), b"", 0, [], [])),
        "page twice": lambda: lower.rows.__setitem__(0, (40,)),
        "cached": lambda: setattr(tree, "cached", 5),
        "locked rows": lambda: setattr(tree, "_locked_rows", 2),
    }
    changes[damage]()
    return tree


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        ("locks of its own", "locks are not its own and lower ones"),
        ("locks of lower ones", "locks are not its own and lower ones"),
        ("key", "tokens do not fill its rows"),
        ("ids", "tokens do not fill its rows"),
        ("rows", "tokens do not fill its rows"),
        ("parent", "a child hangs in the wrong place"),
        ("name", "a child hangs in the wrong place"),
        ("place", "a child hangs in the wrong place"),
        ("tokens", "a child hangs under other tokens"),
        ("no rows", "a node without rows"),
        ("not queued", "eviction queue is not the unlocked leaves"),
        ("queued with children", "eviction queue is not the unlocked leaves"),
        ("queued though locked", "eviction queue is not the unlocked leaves"),
        ("queued and gone", "candidates for eviction are not as many"),
        ("page twice", "a page is in the tree twice"),
        ("cached", "pages in the tree were miscounted"),
        ("locked rows", "pages in the tree were miscounted"),
    ],
)
def test_check_sees_damage(damage: str, message: str) -> None:
    with pytest.raises(AccountingError, match=message):
        damaged_tree(damage).check()


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        ("unqueued", "window pages cannot be evicted"),
        ("evicted", "an evicted node waits for eviction"),
        ("home", "not where they are said to be"),
        ("reference", "referenced and not in the tree"),
    ],
)
def test_check_sees_damage_of_window_pages(damage: str, message: str) -> None:
    tree = PrefixTree(1, groups=(FULL, KvGroup(SlidingWindow(1))))
    node, _ = tree.insert([1], [(10, 11)])
    windows = tree.windows
    tree.check()
    if damage == "unqueued":
        windows.forget(node)
    elif damage == "evicted":
        windows._ends.put(TreeNode(None, ("", b""), b"", 0, [], []))
    elif damage == "home":
        windows._home[12] = node
    else:
        windows.reference([12])
    with pytest.raises(AccountingError, match=message):
        tree.check()


def seconds(work: Callable[[], None]) -> float:
    """Of processor time: others may use the machine."""
    begin = time.process_time()
    work()
    return time.process_time() - begin


@pytest.mark.parametrize("policy", sorted(POLICIES))
def test_ten_thousand_prompts_stay_fast(policy: str) -> None:
    """Growth is near linear: ten times the tree may cost each operation twice the time, not ten times."""

    def churn(prompts: int) -> None:
        random_ = random.Random(0)
        tree = PrefixTree(4, policy)
        for index in range(prompts):
            tree.insert([random_.randrange(3) for _ in range(16)], rows(range(4 * index, 4 * index + 4)))
            tree.match([random_.randrange(3) for _ in range(16)])
        while tree.evict(1):
            pass

    small = min(seconds(lambda: churn(1_000)) for _ in range(3))
    large = min(seconds(lambda: churn(10_000)) for _ in range(2))
    assert large < 40 * small
    assert large < 10


def test_a_sequence_that_grows_stays_shallow() -> None:
    """Lock and unlock walk up the tree: appending page after page must not make a chain of nodes."""
    tree = PrefixTree(1)
    node, _ = tree.insert([0], [(0,)])
    tree.lock(node)
    for token in range(1, 500):
        tree.unlock(node)
        node, _ = tree.insert([token], [(token,)], after=node)
        tree.lock(node)
    assert len(list(node.path())) == 2
    assert tree.match(list(range(500)))[1] == rows(range(500))
    tree.check()


def test_outdated_candidates_do_not_pile_up():
    queue = EvictionQueue(make_policy("lru"))
    nodes = [TreeNode(None, ("", b""), b"", 0, [], []) for _ in range(3)]
    for time_ in range(1, 1000):
        node = nodes[time_ % 3]
        node.last_used = time_
        queue.put(node)
        assert len(queue._heap) <= 2 * len(queue) + 64
    assert queue.first() is nodes[997 % 3] and len(queue) == 3
