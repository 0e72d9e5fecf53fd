"""What a prefix tree tells of its changes: digests, events, the log, those who follow it."""

from __future__ import annotations

import random
from hashlib import blake2b

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import invariant, rule, run_state_machine_as_test
from kv_model import Prefix
from test_prefix_tree import PAGE, TreeMachine

from baton.gateway.cache_view import CacheView, Gap, PromptPages
from baton.kvcache.kv_events import HOST, POOL, PromptDigests, TreeChanges, TreeEvents, TreeLog
from baton.kvcache.prefix_tree import PrefixTree
from baton.v1 import cache_pb2


def digest_of(prefix: Prefix, page_size: int = PAGE) -> int:
    """As proto/baton/v1/cache.proto has it, by other means."""
    namespace, tokens = prefix

    def blake(data: bytes) -> bytes:
        return blake2b(data, digest_size=8).digest()

    digest = blake(page_size.to_bytes(4, "little") + namespace.encode("utf-8", "surrogatepass"))
    for start in range(0, len(tokens), page_size):
        page = b"".join(token.to_bytes(4, "little") for token in tokens[start : start + page_size])
        digest = blake(digest + page)
    return int.from_bytes(digest, "little")


def message(changes: TreeChanges, incarnation: int = 1, page_size: int = PAGE) -> cache_pb2.CacheUpdate:
    return cache_pb2.CacheUpdate(
        incarnation=incarnation,
        after=changes.after,
        sequence=changes.sequence,
        snapshot=changes.snapshot,
        stored=changes.stored,
        removed=changes.removed,
        host_stored=changes.host_stored,
        host_removed=changes.host_removed,
        page_size=page_size,
    )


def drain(events: TreeEvents, log: TreeLog) -> None:
    while (event := events.take()) is not None:
        log.apply(event)


class LogMachine(TreeMachine):
    """The tree of test_prefix_tree, followed: by a log, and by a view of it that asks now and then."""

    def __init__(self) -> None:
        super().__init__("lru")
        self.log = TreeLog(PAGE, limit=24)
        self.events: TreeEvents | None = None
        self.view = CacheView()

    @rule(limit=st.sampled_from([2, 1000]))
    def observe(self, limit: int) -> None:
        self.forget()
        self.events = TreeEvents(limit)
        self.tree.observe(self.events)

    @rule()
    def forget(self) -> None:
        self.log.clear()
        self.tree.observe(None, self.events)
        self.events = None

    @rule(told=st.booleans())
    def ask(self, told: bool) -> None:
        if self.events is None or self.events.overflown:
            self.observe(1000)
        drain(self.events, self.log)
        changes = self.log.since(self.view.sequence if told else None)
        if not changes.snapshot:
            assert set(changes.removed) <= self.view._held and not set(changes.stored) & self.view._held
        self.view.apply(message(changes), 0.0)
        assert self.view._held == {digest_of(prefix) for prefix in self.model.entries}

    @invariant()
    def log_is_the_tree(self) -> None:
        if self.events is not None and not self.events.overflown:
            drain(self.events, self.log)
            held = self.log.since(None)
            assert held.snapshot and sorted(held.stored) == sorted(map(digest_of, self.model.entries))


def test_log_and_views_follow_the_tree():
    run_state_machine_as_test(
        LogMachine, settings=settings(max_examples=150, stateful_step_count=40, deadline=None)
    )


def test_a_prompt_is_found_as_far_as_the_tree_holds_it_and_only_in_its_namespace():
    tree, events, log, view = PrefixTree(4), TreeEvents(), TreeLog(4), CacheView()
    tree.insert(list(range(12)), [(7,), (8,), (9,)], "tenant")
    tree.observe(events)
    drain(events, log)
    view.apply(message(log.since(None), page_size=4), 0.0)
    assert view.cached(PromptPages(range(100), "tenant"))[0] == 12
    assert view.cached(PromptPages([*range(8), 99, *range(9, 20)], "tenant"))[0] == 8
    assert view.cached(PromptPages(range(100), ""))[0] == 0
    assert view.cached(PromptPages(range(100), "Tenant"))[0] == 0
    assert view.cached(PromptPages(range(4, 100), "tenant"))[0] == 0
    # Its last token is computed in any case.
    assert view.cached(PromptPages(range(12), "tenant"))[0] == 8
    assert view.cached(PromptPages([], "tenant"))[0] == 0


def test_a_view_tells_what_the_pool_holds_from_what_only_the_host_tier_does():
    log, view = TreeLog(4), CacheView()
    trees = {tier: PrefixTree(4) for tier in (POOL, HOST)}
    events = {tier: TreeEvents() for tier in trees}
    tokens = list(range(16))
    for tier, tree in trees.items():
        tree.observe(events[tier])

    def followed() -> tuple[int, int]:
        for tier, each in events.items():
            while (event := each.take()) is not None:
                log.apply(event, tier)
        update = message(log.since(view.sequence if view.page_size else None), page_size=4)
        view.apply(update, 0.0)
        assert view.cached(PromptPages(tokens, "other")) == (0, 0)
        fresh = CacheView()
        fresh.apply(message(log.since(None), page_size=4), 0.0)
        assert fresh.cached(PromptPages(range(100), "")) == view.cached(PromptPages(range(100), ""))
        return view.cached(PromptPages(range(100), ""))

    trees[POOL].insert(tokens, [(1,), (2,), (3,), (4,)])
    assert followed() == (16, 16)
    trees[HOST].insert(tokens[:12], [(1,), (2,), (3,)])
    assert followed() == (16, 16)
    trees[POOL].evict(3)
    assert followed() == (4, 12)
    trees[POOL].evict(1)
    assert followed() == (0, 12)
    trees[HOST].evict(1)
    trees[POOL].insert(tokens[:4], [(9,)])
    assert followed() == (4, 8)


def test_digests_tell_page_sizes_apart_and_are_computed_as_far_as_needed():
    tokens = list(range(1, 100))
    assert PromptDigests(tokens, "", 8)[0] != PromptDigests(tokens, "", 4)[1]
    digests = PromptDigests(tokens, "n", 8)
    assert digests.pages == 12
    assert digests[5] == digest_of(("n", tuple(tokens[:48])), 8)
    assert len(digests._known) == 6
    with pytest.raises(IndexError):
        digests[12]


def changed(log: TreeLog, rng: random.Random, tree: PrefixTree, events: TreeEvents) -> None:
    for _ in range(rng.randrange(1, 4)):
        page = 10_000 + log.sequence * 100 + rng.randrange(100)
        tree.insert([rng.randrange(50) for _ in range(PAGE)], [(page,)])
        tree.evict(rng.randrange(2))
        drain(events, log)


def test_who_is_not_far_behind_gets_the_changes_and_who_is_a_snapshot():
    tree, events, log = PrefixTree(PAGE), TreeEvents(), TreeLog(PAGE, limit=50)
    tree.observe(events)
    rng, seen = random.Random(1), []
    while log.sequence < 200:
        changed(log, rng, tree, events)
        seen.append((log.sequence, set(log.since(None).stored)))
    for sequence, held in seen:
        changes = log.since(sequence)
        assert changes.snapshot == (sequence < log.sequence - 50)
        now = set() if changes.snapshot else held
        assert (now - set(changes.removed)) | set(changes.stored) == seen[-1][1]
    assert log.since(log.sequence) == TreeChanges(log.sequence, log.sequence, ())
    assert log.since(None).after == 0
    # Of another life of the log, or made up.
    assert log.since(log.sequence + 1).snapshot


def test_what_came_and_went_or_went_and_came_back_is_no_change():
    tree, events, log = PrefixTree(PAGE), TreeEvents(), TreeLog(PAGE)
    tree.observe(events)
    tree.insert([1] * PAGE, [(10,)])
    drain(events, log)
    before = log.sequence
    tree.evict(1)
    tree.insert([1] * PAGE, [(11,)])
    tree.insert([2] * PAGE, [(12,)])
    tree.match([1] * PAGE)
    tree.evict(1)
    drain(events, log)
    assert log.since(before) == TreeChanges(before, log.sequence, ())


def test_the_log_told_anew_remembers_nothing_older():
    log = TreeLog(PAGE)
    before = log.sequence
    log.clear()
    assert log.since(before).snapshot


def test_events_that_nobody_takes_do_not_pile_up():
    tree, events = PrefixTree(PAGE), TreeEvents(limit=10)
    tree.observe(events)
    for page in range(50):
        tree.insert([page] * PAGE, [(page,)])
    assert events.overflown and events.take() is None


def test_a_tree_larger_than_what_may_wait_is_followed_by_several():
    """Also one that comes later, or another's in its place."""
    tree, first = PrefixTree(PAGE), TreeEvents(limit=10)
    tree.observe(first)
    for page in range(50):
        tree.insert([page] * PAGE, [(page,)])
    assert first.overflown
    again, other = TreeEvents(limit=10), TreeEvents(limit=10)
    tree.observe(again, first)
    tree.observe(other)
    tree.insert([99] * PAGE, [(99,)])
    views = []
    for events in (again, other):
        log = TreeLog(PAGE)
        assert not events.overflown
        drain(events, log)
        views.append(set(log.since(None).stored))
    assert views[0] == views[1] and len(views[0]) == 51
    for page in range(100, 200):
        tree.insert([page] * PAGE, [(page,)])
    assert again.overflown and other.overflown


class TestView:
    def test_a_new_incarnation_begins_afresh(self):
        view = CacheView()
        view.apply(message(TreeChanges(0, 5, (1, 2), snapshot=True)), 0.0)
        view.apply(message(TreeChanges(0, 2, (3,), snapshot=True), incarnation=2), 0.0)
        assert view._held == {3} and (view.incarnation, view.sequence) == (2, 2)

    @pytest.mark.parametrize(
        ("changes", "incarnation", "page_size"),
        [
            (TreeChanges(6, 7, (9,)), 1, PAGE),  # change 6 is missing
            (TreeChanges(4, 7, (9,)), 1, PAGE),  # change 5 comes twice
            (TreeChanges(5, 7, (9,)), 2, PAGE),  # of another process
            (TreeChanges(0, 7, (9,), snapshot=True), 1, 0),
        ],
    )
    def test_what_does_not_follow_is_refused_and_all_forgotten(self, changes, incarnation, page_size):
        view = CacheView()
        view.apply(message(TreeChanges(0, 5, (1, 2), snapshot=True)), 0.0)
        with pytest.raises(Gap):
            view.apply(message(changes, incarnation, page_size), 0.0)
        assert len(view) == 0 and view.sequence == 0 and view.load is None

    def test_pages_are_bounded(self):
        view = CacheView(max_pages=3)
        view.apply(message(TreeChanges(0, 5, (1, 2, 3, 4, 5), snapshot=True)), 0.0)
        assert len(view) == 3
        view.apply(message(TreeChanges(5, 9, (6, 7, 8), (1, 2))), 0.0)
        assert len(view) == 3
