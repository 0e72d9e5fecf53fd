"""The host tier: what the first pool evicts comes back as it was, or not at all."""

from __future__ import annotations

import random
from collections.abc import Sequence
from functools import partial

import pytest

from baton.kvcache import KvCacheManager, KvGroup, PageAllocator, PrefixTree
from baton.kvcache.host_tier import HostTier, keep_what_returns
from baton.kvcache.kv_groups import FULL, NO_PAGE
from baton.kvcache.page_keys import placeholder
from baton.layers.cache_spec import State, attention_cache
from baton.step_cost import StepCost
from baton.worker.host_memory import takes_less

SIZE = 4
FULL_AND_WINDOW = (FULL, KvGroup(attention_cache(6)))
FULL_AND_STATE = (FULL, KvGroup(State(shapes=((2,),))))


class Pools:
    """Two pools whose pages hold the token prefix that they end, and a copier that copies when told to."""

    def __init__(
        self, first: int, tier: int, groups: Sequence[KvGroup] = (FULL,), images: bool = False
    ) -> None:
        self.first = self._pool(first, groups, "lru", images)
        self.lower = self._pool(tier, groups, keep_what_returns(tier // len(groups)), images)
        self.content: dict[bool, list[object]] = {True: [None] * first, False: [None] * tier}
        """By `up` of the copies into the pool."""
        self.asked: list[tuple[int, list[tuple[int, int]], bool]] = []
        self.tier = HostTier(self.first, self.lower, self)

    @staticmethod
    def _pool(pages: int, groups: Sequence[KvGroup], policy: object, images: bool) -> KvCacheManager:
        tree = PrefixTree(SIZE, policy, groups, images)  # type: ignore[arg-type]
        return KvCacheManager(PageAllocator(pages), tree)

    def copy(self, number: int, pairs: Sequence[tuple[int, int]], up: bool) -> None:
        self.asked.append((number, list(pairs), up))

    def run(self, error: str | None = None) -> None:
        """Does what was asked for, also what follows from it."""
        self.tier.tick(0.0)
        while self.asked:
            number, pairs, up = self.asked.pop(0)
            for source, target in pairs:
                self.content[up][target] = self.content[not up][source]
            self.tier.copied(number, error)
            self.tier.tick(0.0)
        self.check()

    def check(self) -> None:
        self.first.check()
        self.lower.check()

    def compute(self, tokens: Sequence[int], namespace: str = "") -> int:
        """Makes a sequence of whole pages and ends it. Returns the tokens that were not cached."""
        block_table = self.first.hold(tokens, namespace, len(tokens) // SIZE)
        cached = len(block_table)
        for index in range(cached):
            for group, table in enumerate(block_table.tables):
                if table[index] != NO_PAGE:
                    expected = (group, namespace, tuple(tokens[: (index + 1) * SIZE]))
                    assert self.content[True][table[index]] == expected, "another sequence's page"
        if self.first.lacking(block_table, len(tokens) // SIZE) > self.first.available:
            self.first.release(block_table, 0)  # promotions have the rest
            return 0
        self.first.extend(block_table, len(tokens) // SIZE)
        for group, table in enumerate(block_table.tables):
            for index in range(cached, len(table)):
                if table[index] != NO_PAGE:
                    self.content[True][table[index]] = (group, namespace, tuple(tokens[: (index + 1) * SIZE]))
        self.first.commit(block_table, tokens, namespace)
        self.first.drop(block_table, len(tokens))
        self.first.release(block_table, 0)
        return len(tokens) - cached * SIZE

    def promote(self, tokens: Sequence[int], namespace: str = "") -> bool:
        key = self.first.encode(tokens)
        cached = self.first.match_length(key, namespace) // SIZE
        rows, _ = self.tier.promotable(key, namespace, cached, len(tokens) // SIZE)
        if rows == cached:
            return False
        return self.tier.promote(key, namespace, rows, self.first.available) is not None


def prompt(seed: int, pages: int) -> list[int]:
    return [seed * 1000 + i for i in range(pages * SIZE)]


@pytest.mark.parametrize("groups", [(FULL,), FULL_AND_WINDOW, FULL_AND_STATE])
def test_what_was_evicted_comes_back(groups: Sequence[KvGroup]) -> None:
    pools = Pools(8 * len(groups), 64 * len(groups), groups)
    prompts = [prompt(seed, 4) for seed in range(6)]
    for each in prompts:
        assert pools.compute(each) == len(each)
        pools.run()
    assert pools.first.match_length(prompts[0]) == 0
    assert pools.promote(prompts[0])
    pools.run()
    assert pools.first.match_length(prompts[0]) == len(prompts[0])
    assert pools.compute(prompts[0]) == 0
    assert pools.tier.counters.promoted_pages
    assert not pools.tier.counters.dropped
    pools.lower.check(idle=True)
    pools.first.check(idle=True)


def test_a_pool_that_is_half_empty_demotes_nothing() -> None:
    pools = Pools(16, 64)
    pools.compute(prompt(0, 4))
    pools.tier.tick(0.0)
    assert not pools.asked


def test_a_source_that_is_reused_while_it_is_demoted_is_dropped() -> None:
    pools = Pools(8, 64)
    first = prompt(0, 6)
    pools.compute(first)
    pools.tier.tick(0.0)
    assert pools.asked
    pools.compute(prompt(1, 8))  # evicts all of it before the copier begins
    pools.run()
    assert pools.lower.match_length(first) == 0
    assert pools.tier.counters.dropped == 1


def test_a_source_that_is_reused_while_it_is_promoted_is_dropped() -> None:
    pools, first = Pools(16, 8), prompt(0, 5)
    pools.compute(first)
    pools.compute(prompt(2, 8))
    pools.run()
    pools.compute(prompt(3, 16))
    assert pools.promote(first)
    taken = pools.lower.hold(())
    pools.lower.extend(taken, 8)  # all pages of the tier
    pools.run()
    assert pools.first.match_length(first) == 0
    assert pools.tier.counters.dropped == 1
    pools.lower.release(taken, 0)
    pools.check()


def test_a_copy_that_failed_is_dropped() -> None:
    pools = Pools(8, 64)
    pools.compute(prompt(0, 6))
    pools.run("the copier failed")
    assert pools.lower.counts().cached == 0
    assert pools.lower.counts().owned == 0


def test_what_is_damaged_does_not_come_back() -> None:
    pools = Pools(8, 64)
    tokens = prompt(0, 6)
    pools.compute(tokens)
    pools.run()
    assert pools.lower.match_length(tokens) == len(tokens)
    block_table = pools.first.hold(tokens)
    pools.first.withdraw(block_table)
    pools.first.release(block_table, 0)
    assert pools.lower.match_length(tokens) == 0


def test_what_is_found_to_be_damaged_during_its_demotion_is_dropped() -> None:
    pools = Pools(8, 64)
    tokens = prompt(0, 6)
    pools.compute(tokens)
    pools.tier.tick(0.0)
    block_table = pools.first.hold(tokens)
    pools.first.withdraw(block_table)
    pools.first.release(block_table, 0)
    pools.run()
    assert pools.lower.match_length(tokens) == 0


def test_namespaces_share_nothing() -> None:
    pools = Pools(8, 64)
    tokens = prompt(0, 6)
    pools.compute(tokens, "a")
    pools.run()
    pools.compute(prompt(1, 8), "a")
    assert not pools.promote(tokens, "b")
    assert pools.promote(tokens, "a")


@pytest.mark.parametrize(("page_seconds", "promotes"), [(0.001, True), (0.1, False)])
def test_what_is_computed_sooner_is_not_promoted(page_seconds: float, promotes: bool) -> None:
    pools = Pools(8, 64)
    tokens = prompt(0, 6)
    pools.compute(tokens)
    pools.run()
    pools.compute(prompt(1, 8))
    cost = StepCost(fixed=0.0, row=0.0, key=0.0, token=0.01, pair=0.001)
    pools.tier.pays, pools.tier.page_seconds = partial(takes_less, lambda: cost), page_seconds
    assert pools.promote(tokens) == promotes


def test_a_scan_does_not_flush_what_was_used_again() -> None:
    pools = Pools(16, 24)
    chat = prompt(0, 6)
    pools.compute(chat)
    pools.compute(prompt(1, 16))
    pools.run()
    for _ in range(2):
        pools.promote(chat)
        pools.run()
        pools.compute(chat)
    for seed in range(2, 8):
        pools.compute(prompt(seed, 3))
        pools.run()
    assert pools.lower.match_length(chat) == len(chat)


@pytest.mark.parametrize("seed", range(30))
def test_no_sequence_ever_finds_anothers_pages(seed: int) -> None:
    rng = random.Random(seed)
    groups = rng.choice([(FULL,), FULL_AND_WINDOW, FULL_AND_STATE, (KvGroup(attention_cache(5)),)])
    images = seed % 2 == 1  # they begin alike, and go on with tokens of images
    pools = Pools(rng.randrange(8, 20) * len(groups), rng.randrange(6, 40) * len(groups), groups, images)
    known = [prompt(0 if images else n, rng.randrange(1, 6)) for n in range(4)]
    for _ in range(150):
        what = rng.randrange(4)
        tokens = rng.choice(known)
        if what == 0 and len(tokens) < 6 * SIZE:
            more = [rng.randrange(5) for _ in range(SIZE)]
            tokens = [*tokens, *(placeholder(bytes(31) + bytes([n]), 7) if images else n for n in more)]
            known[rng.randrange(4)] = tokens
        if what < 2:
            pools.compute(tokens, rng.choice(["", "x"]))
        elif what == 2:
            pools.promote(tokens, rng.choice(["", "x"]))
        else:
            pools.tier.tick(0.0)
        if pools.asked and rng.random() < 0.5:
            number, pairs, up = pools.asked.pop(0)
            for source, target in pairs:
                pools.content[up][target] = pools.content[not up][source]
            pools.tier.copied(number, None)
        pools.check()
    pools.run()
    pools.first.check(idle=True)
    pools.lower.check(idle=True)
