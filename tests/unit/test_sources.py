"""Cached pages between two workers: both cores, a wire between them, and pages whose contents are known."""

from __future__ import annotations

from dataclasses import replace
from itertools import count

import pytest
from core_shell import Shell
from hash_runner import HashRunner, reference

from baton.config import PrefillConfig
from baton.engine.request import EngineRequest
from baton.engine.sampling_params import SamplingParams
from baton.engine.scheduler import SchedulerConfig
from baton.handoff.messages import (
    AskCached,
    AttemptName,
    CancelPrefill,
    ChunkAnnounced,
    FirstSampled,
    Peer,
    PrefillFailed,
    PromptSource,
    ReleaseLease,
    StartPull,
)
from baton.kvcache import KvCacheManager, PageAllocator, PrefixTree
from baton.kvcache.host_tier import CachedTiers, HostTier
from baton.step_cost import CostCalibration, StepCost
from baton.worker.prefill.core import PrefillCore
from baton.worker.sources.borrower import CONNECT_SECONDS, KNOWN_SECONDS, UNKNOWN_PULL_SECONDS
from baton.worker.sources.lender import LEND_SECONDS

SIZE, PAGES = 4, 40
PROMPT = tuple(range(100, 100 + 5 * SIZE + 2))
LIMITS = SchedulerConfig(context_length=PAGES * SIZE, token_budget=64, max_rows=4)


class Worker:
    """A prefill core and the pool of its runner; with `tier` pages a host tier, too."""

    def __init__(self, address: str, pages: int = PAGES, tier: int = 0) -> None:
        self.address, self.now = address, 0.0
        cache = KvCacheManager(PageAllocator(pages), PrefixTree(SIZE))
        if tier:
            HostTier(cache, KvCacheManager(PageAllocator(tier), PrefixTree(SIZE)), self)
            self.below = [[None] * SIZE for _ in range(tier)]
        self.copies: list[tuple[int, list[tuple[int, int]], bool]] = []
        self.runner = HashRunner(pages, SIZE, 4)
        self.core = PrefillCore(cache, LIMITS, PrefillConfig(), Shell(self.sent))
        self.core.shell.share = self.shared
        self.first: dict[AttemptName, FirstSampled] = {}
        self.effects: list[object] = []
        self.answers: list[object] = []
        self._number = 0

    def sent(self, step, outputs, effects):
        said = [output for messages in outputs.values() for output in messages]
        self.first |= {output.name: output for output in said if isinstance(output, FirstSampled)}

    def shared(self, lent, effects):
        self.effects += effects
        self.answers += [output for messages in lent.values() for output in messages]

    def start(self, prompt, sources=(), namespace="", deadline=60.0) -> AttemptName:
        self._number += 1
        name = AttemptName(gateway=7, request=self._number, attempt=0, decode_try=0)
        params = SamplingParams(seed=5)
        request = EngineRequest(name, tuple(prompt), params, namespace=namespace, deadline=deadline)
        self.core.leases.connect("holder", self.now)
        self.core.start("holder", name, request, False, self.now, sources=tuple(sources))
        return name

    def turn(self) -> None:
        self.core.tick(self.now)
        step = self.core.plan(self.now)
        if step is not None:
            self.core.commit(step, self.runner.read(self.runner.launch(step.plan)), self.now)
        self.core.flush(0)

    def compute(self, prompt, namespace="") -> None:
        self.start(prompt, namespace=namespace)
        self.turn()

    def copy(self, number, pairs, up) -> None:
        self.copies.append((number, list(pairs), up))

    def copied(self) -> None:
        """What has been asked of the copier so far is done."""
        copies, self.copies = self.copies, []
        for number, pairs, up in copies:
            source, target = (self.below, self.runner.pool) if up else (self.runner.pool, self.below)
            for each, other in pairs:
                target[other] = list(source[each])
            self.core.cache.tier.copied(number, None)

    def demote(self, prompt) -> None:
        """Computes it, and then others until only the tier has it."""
        self.compute(prompt)
        others = 0
        while self.core.cache.match_length(prompt):
            others += 1
            self.turn()
            self.copied()
            self.compute(range(5000 + 100 * others, 5000 + 100 * others + 8 * SIZE))
        assert self.core.cache.tier.cache.match_length(prompt)

    @property
    def borrower(self):
        return self.core.sharing.borrower

    @property
    def idle(self) -> bool:
        self.core.cache.check(idle=True)
        return not self.borrower.fetches.running and not self.core.sharing.lender.leases.running


class Pair:
    """`near` borrows from `far`. `steps` are what the wire does, one after the other."""

    def __init__(
        self, far_pages: int = PAGES, near_pages: int = PAGES, far_tier: int = 0, near_tier: int = 0
    ) -> None:
        self.far, self.near = Worker("far", far_pages, far_tier), Worker("near", near_pages, near_tier)
        self.far.core.sharing.lender.leases.connect("near", 0.0)
        self.near.borrower.peer_changed("far", Peer(True, 0.0, "shm", incarnation=3), "")
        self.visible = True
        """`near` sees the generations of `far`."""

    def source(self, tokens: int, incarnation: int = 3) -> PromptSource:
        return PromptSource("far", incarnation, tokens)

    def take(self, kind: type):
        """The next effect of `near` of this kind; those before it are dropped."""
        self.near.turn()
        while self.near.effects:
            effect = self.near.effects.pop(0)
            if isinstance(effect, kind):
                return effect
        return None

    def ask(self) -> AskCached:
        return self.take(AskCached)

    def answer(self, ask: AskCached):
        self.far.core.sharing.lender.lend("near", ask.name, ask.token_ids, ask.namespace, self.far.now)
        self.far.turn()
        return self.far.answers.pop()

    def hear(self, message) -> None:
        self.near.borrower.receive("far", [message], self.near.now)

    def copy(self, pull: StartPull) -> None:
        for source, target in pull.pairs:
            self.near.runner.pool[target] = list(self.far.runner.pool[source])

    def pulled(self, pull: StartPull) -> None:
        sources = [source for source, _ in pull.pairs]
        seen = [self.far.core.cache.generation(page) for page in sources] if self.visible else None
        self.near.borrower.fetches.pull_ended(pull.pull, None, seen, self.near.now)

    def release(self) -> None:
        effect = self.take(ReleaseLease)
        self.far.core.sharing.lender.release("near", effect.name)
        self.far.turn()
        self.hear(self.far.answers.pop())

    def borrow(self, tokens: int = len(PROMPT), namespace: str = "") -> AttemptName:
        """All of it, when everything goes well."""
        name = self.near.start(PROMPT, [self.source(tokens)], namespace)
        self.hear(self.answer(self.ask()))
        pull = self.take(StartPull)
        self.copy(pull)
        self.pulled(pull)
        self.release()
        return name

    def finished(self, name: AttemptName, cached: int, tiers: CachedTiers | None = None) -> None:
        """The prompt's first token is right, and so many tokens were not computed, those of `tiers` and
        others."""
        self.near.turn()
        first = self.near.first[name]
        assert [token for token, _ in first.tokens] == reference(list(PROMPT), 5, 1)
        assert first.cached_tokens == cached
        assert tiers is None or first.tiers == tiers
        self.far.now += LEND_SECONDS
        self.far.turn()
        assert self.near.idle and self.far.idle


@pytest.fixture
def pair() -> Pair:
    pair = Pair()
    pair.far.compute(PROMPT)
    return pair


@pytest.mark.parametrize("visible", [True, False])
def test_what_another_has_cached_is_not_computed(pair: Pair, visible: bool):
    pair.visible = visible
    name = pair.borrow()
    assert pair.near.borrower.counters.pulled_pages == pair.far.core.sharing.lender.lent_pages == 5
    pair.finished(name, 5 * SIZE)


def test_only_what_is_missing_is_pulled(pair: Pair):
    pair.near.compute(PROMPT[: 2 * SIZE + 1])
    name = pair.borrow()
    assert pair.near.borrower.counters.pulled_pages == 3
    pair.finished(name, 5 * SIZE, CachedTiers(peers=3 * SIZE))


def test_the_holder_lends_what_it_has_now_not_what_was_said(pair: Pair):
    name = pair.borrow(tokens=SIZE)
    pair.finished(name, 5 * SIZE)


def lost(pair: Pair, name: AttemptName, reason: str) -> None:
    assert pair.near.borrower.counters.retries == {reason: 1}
    pair.finished(name, 0)


def test_pages_of_other_tokens_are_not_taken(pair: Pair):
    name, other = pair.near.start(PROMPT, [pair.source(20)]), (*PROMPT[:6], 1, 2, *PROMPT[8:])
    pair.far.compute(other)
    ask = pair.ask()
    pair.hear(pair.answer(replace(ask, token_ids=other)))
    assert pair.take(CancelPrefill).name == name
    pair.far.core.sharing.lender.cancel("near", name)
    lost(pair, name, "OTHER_TOKENS")


def test_pages_of_another_namespace_are_not_lent_nor_taken(pair: Pair):
    pair.far.compute(PROMPT, "tenant")
    stranger = pair.near.start(PROMPT, [pair.source(20)], "another")
    ask = pair.ask()
    failed = pair.answer(ask)
    assert isinstance(failed, PrefillFailed) and failed.reason == "NOTHING_CACHED"
    pair.hear(pair.answer(replace(ask, namespace="tenant")))
    lost(pair, stranger, "OTHER_TOKENS")


def test_pages_that_were_reused_during_the_copy_are_not_taken(pair: Pair):
    name = pair.near.start(PROMPT, [pair.source(20)])
    pair.hear(pair.answer(pair.ask()))
    pull = pair.take(StartPull)
    pair.far.core.sharing.lender.leases.disconnect("near")
    for number in range(8):
        pair.far.compute(range(500 + 100 * number, 530 + 100 * number))  # evicts
    pair.copy(pull)
    pair.pulled(pull)
    lost(pair, name, "STALE_PAGES")


def test_without_sight_of_generations_the_lease_must_have_stood(pair: Pair):
    pair.visible = False
    name = pair.near.start(PROMPT, [pair.source(20)])
    pair.hear(pair.answer(pair.ask()))
    pull = pair.take(StartPull)
    pair.far.now = LEND_SECONDS
    pair.far.turn()
    pair.pulled(pull)
    pair.far.core.sharing.lender.release("near", pair.take(ReleaseLease).name)
    pair.far.turn()
    pair.hear(pair.far.answers.pop(0))
    assert pair.near.borrower.counters.retries == {"DEADLINE_EXCEEDED": 1}
    pair.finished(name, 0)


@pytest.mark.parametrize("when", ["asked", "lent", "pulling"])
def test_a_holder_that_dies_or_is_silent_costs_a_little_time(pair: Pair, when: str):
    for death in (True, False):
        pair.near.now += 1.0
        fresh = tuple(each + 1000 * (1 + death) for each in PROMPT)
        pair.far.compute(fresh)
        pair.near.borrower.peer_changed("far", Peer(True, 0.0, "shm", incarnation=3), "")
        name = pair.near.start(fresh, [pair.source(20)])
        ask = pair.ask()
        pull = None
        if when != "asked":
            pair.hear(pair.answer(ask))
        if when == "pulling":
            pull = pair.take(StartPull)
        assert pair.near.core.requests and name not in pair.near.first
        if death:
            pair.near.borrower.peer_changed("far", Peer(False, 0.0), "it died")
        else:
            pair.near.now += UNKNOWN_PULL_SECONDS
        pair.near.turn()
        pair.near.turn()
        assert [token for token, _ in pair.near.first[name].tokens] == reference(list(fresh), 5, 1)
        if pull is not None:
            pair.near.borrower.fetches.pull_ended(pull.pull, "interrupted", None, pair.near.now)
    assert pair.near.idle and sum(pair.near.borrower.counters.retries.values()) == 2


def test_a_request_that_ends_gives_up_what_it_borrows(pair: Pair):
    name = pair.near.start(PROMPT, [pair.source(20)])
    pair.hear(pair.answer(pair.ask()))
    pull = pair.take(StartPull)
    pair.near.core.cancel("holder", name)
    assert pair.take(CancelPrefill).name == name
    pair.near.borrower.fetches.pull_ended(pull.pull, None, None, 0.0)
    assert pair.near.idle


def test_a_restarted_or_unknown_holder_is_not_asked(pair: Pair):
    near, far = pair.near, pair.source(20, incarnation=4)
    name = near.start(PROMPT, [far, PromptSource("unknown", 3, 20)])
    near.turn()
    assert name not in near.first and not near.effects, "it may be connected soon"
    near.now = CONNECT_SECONDS
    near.turn()
    assert not near.effects
    pair.finished(name, 0)


def test_the_next_source_is_asked_when_one_fails(pair: Pair):
    pair.near.borrower.peer_changed("other", Peer(True, 0.0, "shm", incarnation=5), "")
    name = pair.near.start(PROMPT, [PromptSource("other", 5, 20), pair.source(20)])
    ask = pair.ask()
    assert ask.address == "other"
    failed = PrefillFailed(name, "NOT_FOUND", "NOTHING_CACHED", "nothing")
    pair.near.borrower.receive("other", [failed], 0.0)
    assert pair.ask().address == "far"


def test_pages_promised_to_others_are_neither_lent_nor_pulled_into():
    pair = Pair(far_pages=14)
    pair.far.compute(PROMPT)
    pair.far.start(range(500, 500 + 14 * SIZE - 1))
    pair.far.core.plan(0.0)
    assert not pair.far.core.scheduler.waiting, "it has all pages"
    failed = pair.answer(AskCached("far", AttemptName(1, 1, 1, 1), PROMPT, ""))
    assert isinstance(failed, PrefillFailed)


@pytest.mark.parametrize(("token", "asks"), [(1e-9, False), (1e-2, True)])
def test_a_pull_must_cost_less_than_computing(pair: Pair, token: float, asks: bool):
    cost = StepCost(fixed=1e-3, row=0.0, key=0.0, token=token, pair=0.0)
    pair.near.core.step_stats.calibration = CostCalibration(cost)
    pair.near.start(PROMPT, [pair.source(20)])
    assert (pair.ask() is not None) == asks


@pytest.mark.parametrize(("seconds", "asks"), [(1e-6, True), (1.0, False)])
def test_after_a_pull_that_took_longer_than_computing_none_is_asked_for_a_while(
    pair: Pair, seconds: float, asks: bool
):
    """`seconds`: between two looks at the clock."""
    cost = StepCost(fixed=1e-3, row=0.0, key=0.0, token=0.01, pair=0.0)
    pair.near.core.step_stats.calibration = CostCalibration(cost)
    clock = count(0.0, seconds)
    pair.near.borrower._recorder.clock = lambda: next(clock)
    pair.borrow()
    later = [[number, *PROMPT] for number in (1, 2)]
    for prompt in later:
        pair.far.compute(prompt)
    pair.near.start(later[0], [pair.source(20)])
    assert (pair.ask() is not None) == asks
    clock = count(2 * KNOWN_SECONDS, seconds)
    pair.near.start(later[1], [pair.source(20)])
    assert pair.ask() is not None


def test_a_holder_that_says_what_cannot_be_is_given_up(pair: Pair):
    for number, wrong in enumerate(
        (
            lambda chunk: replace(chunk, groups=()),
            lambda chunk: replace(chunk, last=False),
            lambda chunk: replace(chunk, groups=(replace(chunk.groups[0], first=1),)),
            lambda chunk: FirstSampled(chunk.name, ((1, None),), 0, ()),
            lambda chunk: replace(chunk, groups=(replace(chunk.groups[0], pages=(0, 0, 0, 0, 0)),)),
        )
    ):
        fresh = tuple(each + 1000 * number for each in PROMPT)
        pair.far.compute(fresh)
        name = pair.near.start(fresh, [pair.source(20)])
        chunk = pair.answer(pair.ask())
        assert isinstance(chunk, ChunkAnnounced)
        pair.hear(wrong(chunk))
        pair.near.turn()
        assert [token for token, _ in pair.near.first[name].tokens] == reference(list(fresh), 5, 1)
    assert pair.near.borrower.counters.retries == {"PROTOCOL": 5}


def test_what_the_own_tier_holds_is_not_borrowed():
    pair = Pair(near_tier=60)
    pair.near.demote(PROMPT)
    pair.far.compute(PROMPT)
    name = pair.near.start(PROMPT, [pair.source(20)])
    assert pair.ask() is None
    pair.near.turn()
    pair.near.copied()
    pair.finished(name, 5 * SIZE, CachedTiers(host=5 * SIZE))
    assert pair.near.core.cache.tier.counters.promotions == 1
    assert not pair.near.borrower.counters.pulled_pages


def test_what_the_own_tier_lacks_is_borrowed_once_the_rest_is_promoted():
    pair = Pair(near_tier=60)
    pair.near.demote(PROMPT[: 3 * SIZE])
    pair.far.compute(PROMPT)
    name = pair.near.start(PROMPT, [pair.source(20)])
    assert pair.ask() is None, "its own pages are under way"
    pair.near.copied()
    pair.hear(pair.answer(pair.ask()))
    pull = pair.take(StartPull)
    pair.copy(pull)
    pair.pulled(pull)
    pair.release()
    assert pair.near.borrower.counters.pulled_pages == 2
    pair.finished(name, 5 * SIZE, CachedTiers(host=3 * SIZE, peers=2 * SIZE))


def test_a_tier_that_is_slower_than_a_pull_is_left_alone():
    pair = Pair(near_tier=60)
    pair.near.demote(PROMPT)
    pair.far.compute(PROMPT)
    pair.near.core.cache.tier.page_seconds = 1.0
    name = pair.borrow()
    assert not pair.near.core.cache.tier.counters.promotions
    pair.finished(name, 5 * SIZE)


def test_pages_of_the_lenders_tier_are_lent():
    pair = Pair(far_tier=60)
    pair.far.demote(PROMPT)
    name = pair.near.start(PROMPT, [pair.source(20)])
    ask = pair.ask()
    pair.far.core.sharing.lender.lend("near", ask.name, ask.token_ids, ask.namespace, pair.far.now)
    pair.far.turn()
    assert not pair.far.answers, "they are being promoted"
    pair.far.copied()
    pair.far.turn()
    pair.hear(pair.far.answers.pop())
    pull = pair.take(StartPull)
    pair.copy(pull)
    pair.pulled(pull)
    pair.release()
    pair.finished(name, 5 * SIZE)


@pytest.mark.parametrize("leaves", [False, True])
def test_who_gives_up_before_a_promotion_has_ended_is_lent_nothing(leaves: bool):
    pair = Pair(far_tier=60)
    pair.far.demote(PROMPT)
    pair.near.start(PROMPT, [pair.source(20)])
    ask, lender = pair.ask(), pair.far.core.sharing.lender
    lender.lend("near", ask.name, ask.token_ids, ask.namespace, pair.far.now)
    lender.disconnect("near") if leaves else lender.cancel("near", ask.name)
    pair.far.copied()
    pair.far.turn()
    assert [answer.reason for answer in pair.far.answers] == ([] if leaves else ["CANCELLED"])
    assert pair.far.idle
