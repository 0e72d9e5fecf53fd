"""The suffix drafter's walk onward in the prefix tree: what earlier sequences said, of the same namespace
only."""

from __future__ import annotations

import random
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from test_scheduler import Engine, check_outputs, request

from baton.engine.draft.suffix import MOST_TOKENS, SuffixDrafter, SuffixIndex
from baton.kvcache import KvCacheManager, PageAllocator, PrefixTree
from baton.kvcache.page_keys import placeholder
from baton.kvcache.tree_walk import TreeWalk


def insert(tree, tokens, namespace=""):
    rows = [(tree.cached + i,) for i in range(len(tokens) // tree.page_size)]
    return tree.insert(tokens, rows, namespace)[0]


def test_what_followed():
    tree = PrefixTree(4)
    insert(tree, range(100, 124))
    walk = TreeWalk(tree, "")
    assert walk.onward(list(range(100, 110)), 5) == list(range(110, 115))
    assert walk.onward(list(range(100, 111)), 50) == list(range(111, 124))
    assert walk.onward([*range(100, 111), 5], 5) == []
    assert TreeWalk(tree, "").onward([100, 101], 5) == [], "less than a page is not searched for"


def test_another_namespace_is_not_seen():
    tree = PrefixTree(4)
    insert(tree, range(100, 124), "theirs")
    insert(tree, range(100, 112), "ours")
    assert TreeWalk(tree, "ours").onward(list(range(100, 110)), 9) == [110, 111]
    assert TreeWalk(tree, "").onward(list(range(100, 110)), 9) == []
    assert TreeWalk(tree, "theirs").onward(list(range(100, 110)), 9) == list(range(110, 119))


def test_the_continuation_that_agrees_is_found_among_several():
    tree = PrefixTree(4)
    first = list(range(100, 108))
    for last in (1, 2, 3):
        insert(tree, [*first, 50, 51, last, 7, last, last, last, last])
    walk = TreeWalk(tree, "")
    assert walk.onward([*first, 50], 2) == [51, 3], "the newest"
    assert walk.onward([*first, 50, 51, 1], 3) == [7, 1, 1]
    assert walk.onward([*first, 50, 51, 1, 8], 3) == []


@settings(deadline=None, max_examples=150)
@given(seed=st.integers(0, 2**32))
def test_it_says_only_what_is_in_the_tree(seed):
    """Whatever is inserted, split, evicted and withdrawn meanwhile."""
    rng = random.Random(seed)
    tree = PrefixTree(2)
    texts = {"a": [], "b": []}

    def text():
        return [rng.randrange(3) for _ in range(rng.randrange(2, 24))]

    own, walk = [rng.randrange(3) for _ in range(4)], TreeWalk(tree, "a")
    while len(own) < 60:
        action = rng.random()
        if action < 0.4:
            namespace = rng.choice("ab")
            new = (own[: rng.randrange(len(own))] if rng.random() < 0.7 else []) + text()
            texts[namespace].append(new[: len(new) // 2 * 2])
            node = insert(tree, new, namespace)
            if rng.random() < 0.1 and node.parent is not None:
                tree.withdraw(node)
        elif action < 0.5:
            tree.evict(rng.randrange(1, 6))
        else:
            found = walk.onward(own, 4)
            goes_on = [*own, *found]
            assert not found or any(each[: len(goes_on)] == goes_on for each in texts["a"])
            own.append(found[0] if found and rng.random() < 0.8 else rng.randrange(3))


def test_a_request_that_was_asked_before_takes_fewer_steps():
    drafter = SuffixDrafter()
    engine = Engine(drafter=drafter, draft_tokens=7)
    drafter._cache = engine.cache
    requests = [request(key, range(10), max_tokens=40) for key in "abc"]
    requests[2].namespace = "other"
    steps = []
    for each in requests:
        before = engine.scheduler.step_number
        engine.scheduler.submit(each)
        engine.run()
        steps.append(engine.scheduler.step_number - before)
    check_outputs(engine, requests)
    assert steps[1] <= 8 < 40 == steps[0] == steps[2]


def test_a_long_text_takes_bounded_memory():
    index, tokens = SuffixIndex(), list(range(100_000))
    for count in range(50_000, 100_000, 40):
        index.extend(tokens[:count])
        assert len(index._ends) <= 2 * MOST_TOKENS + 40


@pytest.mark.times
def test_a_step_of_a_row_takes_microseconds():
    rng = random.Random(1)
    tree = PrefixTree(16)
    prompt = [rng.randrange(50_000) for _ in range(8000)]
    for _ in range(50):
        insert(tree, [*prompt, *(rng.randrange(50_000) for _ in range(320))])
    drafter = SuffixDrafter()
    drafter._cache = type("Cache", (), {"walk": staticmethod(lambda namespace: TreeWalk(tree, namespace))})()
    sequence = request("a", prompt).sequences[0]
    drafter.draft(sequence, 7)
    began = time.process_time()
    for _ in range(1000):
        sequence.tokens.append(rng.randrange(50_000))
        drafter.draft(sequence, 7)
    assert time.process_time() - began < 1000 * 50e-6


@pytest.mark.timeout(20)
def test_what_leads_to_an_image_is_no_way_onward():
    tree = PrefixTree(4, images=True)
    cache = KvCacheManager(PageAllocator(32), tree)
    image = [placeholder(b"d" * 32, index) for index in range(2)]
    for tokens in ([1, 2, 3, 4, 5, 6, *image], [1, 2, 3, 4, 9, 9, 9, 9]):
        block_table = cache.hold(tokens)
        cache.extend(block_table, 2)
        cache.commit(block_table, tokens, "", 99)
        cache.release(block_table, 0)
    walk = TreeWalk(tree, "")
    assert walk.onward([1, 2, 3, 4], 3) in ([], [9, 9, 9])
    for tokens in ([1, 2, 3, 4, 5], [1, 2, 3, 4, 5, 6]):
        assert walk.onward(tokens, 3) == []
