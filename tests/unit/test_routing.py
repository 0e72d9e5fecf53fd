"""Which nodes a request goes to: the policies, and what a gateway counts itself."""

from collections import Counter
from dataclasses import replace

import pytest

from baton.gateway.cache_view import PromptPages
from baton.gateway.metrics import GatewayMetrics
from baton.gateway.node_load import NodeLoad, NodeWork, SentLoad
from baton.gateway.routing import RequestRouting, Router, order_prefill, pick_decode
from baton.gateway.split_decision import Split
from baton.kvcache.kv_events import PromptDigests
from baton.rpc.errors import BatonError
from baton.v1 import cache_pb2, decode_pb2, node_pb2

A = NodeLoad("a", rows=3, queued_tokens=900, step=0.01, prompt_rate=1000, known=True)
B = replace(A, address="b", rows=1, queued_tokens=100)
C = replace(B, address="c")


def first_choices(policy, nodes, turns=30, tokens=1000, **options):
    return Counter(order_prefill(policy, nodes, tokens, turn, **options)[0] for turn in range(turns))


class TestPolicies:
    def test_round_robin_looks_at_nothing(self):
        nodes = [replace(A, cached=999), B, C]
        assert first_choices("round-robin", nodes) == {"a": 10, "b": 10, "c": 10}
        picked = Counter(pick_decode("round-robin", nodes, 1000, t, preferred="a") for t in range(30))
        assert picked == {"a": 10, "b": 10, "c": 10}

    def test_least_loaded_takes_the_least_loaded_in_turn_whatever_is_cached(self):
        nodes = [replace(A, cached=999), B, C]
        assert first_choices("least-loaded", nodes) == {"b": 15, "c": 15}
        assert Counter(pick_decode("least-loaded", nodes, 1000, t) for t in range(30)) == {"b": 15, "c": 15}

    def test_cache_goes_where_the_prompt_is_until_the_queue_is_longer_than_it_is_worth(self):
        held = replace(B, address="held", cached=900)
        assert first_choices("cache", [B, held, C]) == {"held": 30}
        assert first_choices("cache", [B, replace(held, queued_tokens=800), C]) == {"held": 30}
        assert first_choices("cache", [B, replace(held, queued_tokens=1200), C]) == {"b": 15, "c": 15}

    def test_cache_takes_faster_nodes_first(self):
        assert first_choices("cache", [B, replace(C, prompt_rate=2000)]) == {"c": 30}
        unmeasured = replace(C, prompt_rate=0)
        assert first_choices("cache", [B, unmeasured]) == {"b": 15, "c": 15}

    def test_what_all_prompts_begin_with_does_not_draw_them_all_to_one_node(self):
        assert first_choices("cache", [B, replace(C, cached=32)]) == {"b": 15, "c": 15}
        picked = Counter(pick_decode("cache", [B, replace(C, cached=32)], 1000, t) for t in range(30))
        assert picked == {"b": 15, "c": 15}

    def test_nodes_that_tell_nothing_count_by_what_was_sent_to_them(self):
        silent = NodeLoad("silent", queued_tokens=500)
        for policy in ("cache", "least-loaded"):
            assert first_choices(policy, [silent, A]) == {"silent": 30}
            assert first_choices(policy, [silent, B]) == {"b": 30}
            assert first_choices(policy, [silent, replace(silent, address="x")]) == {"silent": 15, "x": 15}

    def test_all_prefill_nodes_are_candidates(self):
        for policy in ("cache", "least-loaded", "round-robin"):
            for turn in range(6):
                assert sorted(order_prefill(policy, [A, B, C], 1000, turn)) == ["a", "b", "c"]
            assert order_prefill(policy, [], 1000, 5) == []

    def test_cache_picks_the_decode_node_by_rows_wait_and_pages(self):
        assert pick_decode("cache", [A, B], 1000) == "b"
        assert pick_decode("cache", [B, replace(A, rows=1, cached=900)], 1000) == "a"
        assert pick_decode("cache", [replace(B, wait=2.0), A], 1000) == "a"
        assert pick_decode("cache", [replace(B, needed_pages=9, free_pages=8), A], 1000) == "a"

    def test_a_sessions_node_is_taken_where_it_is_as_good_as_the_best(self):
        assert all(pick_decode("cache", [B, C], 1000, turn, preferred="c") == "c" for turn in range(4))
        assert pick_decode("cache", [A, B], 1000, preferred="a") == "b"
        assert pick_decode("cache", [B, C], 1000, preferred="gone") in "bc"
        assert first_choices("cache", [B, C], preferred="c") == {"c": 30}


def test_what_was_sent_counts_until_it_is_computed_and_of_others_what_the_node_says_beyond_it():
    sent = SentLoad()
    for number in range(4):
        sent.add(number, 100)
    assert (sent.work().tokens, sent.work().rows) == (400, 4)
    sent.reported(NodeWork(tokens=50, rows=1))  # of the first alone: the others are on their way
    assert (sent.work().tokens, sent.work().rows) == (400, 4)
    sent.reported(NodeWork(tokens=1400, rows=14))
    assert (sent.work().tokens, sent.work(others=False).tokens) == (1400, 400)
    sent.add(4, 100)
    assert (sent.work().tokens, sent.work().rows) == (1500, 15)
    sent.computed(4)
    sent.drop(3)
    sent.drop(3)
    assert (len(sent), sent.tokens, sent.work().tokens, sent.work().rows) == (4, 300, 1300, 14)


class Clock:
    now = 100.0

    def __call__(self):
        return self.now


class Fleet:
    """A router that has been told of two prefill and two decode nodes."""

    PAGE = 16

    def __init__(self, policy="cache"):
        self.clock = Clock()
        self.router = Router(policy, self.clock)
        self.numbers = iter(range(1000))
        for address in ("p0", "p1", "d0", "d1"):
            self.tell(address)

    def tell(self, address, tokens=(), namespace="", in_host=(), **load):
        """The node holds this prompt, its host tier the other, and nothing else."""
        digests, below = (PromptDigests(each, namespace, self.PAGE) for each in (tokens, in_host))
        update = cache_pb2.CacheUpdate(
            incarnation=1,
            sequence=5,
            snapshot=True,
            stored=[digests[page] for page in range(digests.pages)],
            host_stored=[below[page] for page in range(below.pages)],
            page_size=self.PAGE,
            load=node_pb2.Load(available_pages=1000, prompt_tokens_per_second=1000, **load),
        )
        self.router.update(address, update)

    def send(self, tokens, namespace="", **preferred):
        way = RequestRouting(self.router, next(self.numbers), PromptPages(tokens, namespace), **preferred)
        decode, prefill = way.pick_decode(["d0", "d1"]), way.order_prefill(["p0", "p1"])
        way.sent(decode, prefill)
        return way, decode, prefill[0]


PROMPT = list(range(500, 1500))


class TestRouter:
    def test_a_prompt_goes_to_the_nodes_that_hold_it(self):
        fleet = Fleet()
        fleet.tell("p1", PROMPT)
        fleet.tell("d0", PROMPT)
        for _ in range(4):
            way, decode, prefill = fleet.send([*PROMPT, 1, 2, 3])
            assert (decode, prefill) == ("d0", "p1")
            way.ended()

    def test_not_to_those_that_hold_it_in_another_namespace(self):
        fleet = Fleet()
        fleet.tell("p1", PROMPT, "alice")
        chosen = []
        for _ in range(6):
            way, _, prefill = fleet.send(PROMPT, "bob")
            chosen.append(prefill)
            way.ended()
        assert Counter(chosen) == {"p0": 3, "p1": 3}

    def test_a_node_whose_host_tier_holds_the_prompt_counts_at_the_cost_of_a_promotion(self):
        fleet = Fleet()
        fleet.tell("p1", in_host=PROMPT, host_token_seconds=1e-5)
        fleet.tell("d1", in_host=PROMPT, host_token_seconds=1e-6)
        way, decode, prefill = fleet.send(PROMPT)
        assert (decode, prefill) == ("d1", "p1")
        named = [(each.address, each.tokens) for each in way.sources("d0", ["p0"])]
        assert sorted(named) == [("d1", 992), ("p1", 992)]
        way.ended()
        fleet.tell("p0", PROMPT[:960])  # 40 tokens to compute, or 992 to promote
        fleet.tell("p1", in_host=PROMPT, host_token_seconds=5e-4)
        assert fleet.send(PROMPT)[2] == "p0"
        load = fleet.router.load_of("p1", PromptPages(PROMPT, ""), "")
        assert load.promotion == pytest.approx(0.496) and load.needed_pages == 63

    def test_a_host_tier_that_is_slower_than_computing_counts_nothing(self):
        fleet = Fleet()
        fleet.tell("p1", in_host=PROMPT, host_token_seconds=1.1e-3)
        assert {fleet.send(PROMPT)[2] for _ in range(2)} == {"p0", "p1"}

    def test_a_draining_nodes_pages_are_offered_until_it_is_silent(self):
        """It is no candidate any more, and so are nodes that take no requests for another reason."""
        fleet = Fleet()
        fleet.tell("d1", PROMPT, draining=True)
        way = RequestRouting(fleet.router, 0, PromptPages(PROMPT, ""))
        decode, prefill = way.pick_decode(["d0"]), way.order_prefill(["p0", "p1"])
        assert [(each.address, each.tokens) for each in way.sources(decode, prefill)] == [("d1", 992)]
        fleet.clock.now += 60
        for address in ("d0", "p0", "p1"):
            fleet.tell(address)
        assert not way.sources(decode, prefill)

    @pytest.mark.parametrize(("token", "other"), [(1e-5, True), (1e-2, False)])
    def test_a_node_that_can_borrow_the_prompt_is_as_good_as_its_pulls_are_fast(self, token, other):
        fleet = Fleet()
        fleet.tell("p0", borrow_cost=node_pb2.PullCost(fixed=1e-3, token=token))
        fleet.tell("p1", PROMPT, queued_tokens=500)
        way, decode, prefill = fleet.send(PROMPT)
        assert (prefill == "p0") == other
        assert way.predicted(decode_pb2.RequestStats(prefill_address="p0"), decode) == 0
        assert fleet.router.sent(prefill).tokens <= 508

    def test_an_idle_decode_node_that_can_borrow_the_prompt_may_compute_what_it_then_lacks(self):
        cost = node_pb2.StepCost(fixed=1e-3, token=1e-3)
        fleet, limits = Fleet(), []
        fleet.tell("p1", PROMPT, queued_tokens=500, step_cost=cost, step_tokens=512)
        for borrow in ({}, {"borrow_cost": node_pb2.PullCost(fixed=1e-3, token=1e-5)}):
            for decode in ("d0", "d1"):
                fleet.tell(decode, step_cost=cost, step_tokens=512, running=1, rows=1, **borrow)
            way, decode, _ = fleet.send(PROMPT)
            limits.append(way.decide(Split("auto", GatewayMetrics(), fleet.clock), decode, ["p1"]))
            way.ended()
        assert limits[0] < len(PROMPT) <= limits[1]

    def test_a_burst_does_not_all_go_to_one_node(self):
        fleet = Fleet()
        for _ in range(20):
            fleet.send([*PROMPT[::-1]])
        assert fleet.router.sent("p0").tokens == fleet.router.sent("p1").tokens == 10 * len(PROMPT)
        assert len(fleet.router.sent("d0")) == len(fleet.router.sent("d1")) == 10

    def test_nor_to_one_that_holds_the_prompt_when_too_many_wait_for_it(self):
        fleet = Fleet()
        fleet.tell("p1", PROMPT[:800])
        chosen = [fleet.send(PROMPT)[2] for _ in range(30)]
        assert chosen[:3] == ["p1"] * 3 and chosen.count("p0") > 3

    def test_what_was_computed_and_what_has_ended_counts_no_more(self):
        fleet = Fleet()
        ways = [fleet.send(PROMPT)[0] for _ in range(6)]
        for way in ways:
            way.computed()
        assert fleet.router.sent("p0").tokens == fleet.router.sent("p1").tokens == 0
        assert len(fleet.router.sent("d0")) == 3
        for way in ways:
            way.ended()
            way.ended()
        assert len(fleet.router.sent("d0")) == len(fleet.router.sent("d1")) == 0

    def test_a_load_that_is_old_tells_nothing(self):
        fleet = Fleet()
        fleet.tell("p0", queued_tokens=50_000)
        assert fleet.send(PROMPT)[2] == "p1"
        fleet.clock.now += 60
        fleet.tell("p1")
        load = fleet.router.load_of("p0", PromptPages(PROMPT, ""), "")
        assert not load.known and load.queued_tokens == 0

    def test_a_session_goes_back_where_nodes_tell_nothing_of_their_caches(self):
        router = Router("cache", Clock())
        for number in range(4):
            way = RequestRouting(router, number, PromptPages(PROMPT, ""), "d1", "p1")
            assert way.pick_decode(["d0", "d1"]) == "d1"
            assert way.order_prefill(["p0", "p1"]) == ["p1", "p0"]

    def test_what_was_expected_of_the_node_that_computed_the_prompt(self):
        fleet = Fleet()
        fleet.tell("p1", PROMPT[:160])
        fleet.tell("d0", PROMPT)
        way, decode, _ = fleet.send(PROMPT)
        assert way.predicted(decode_pb2.RequestStats(prefill_address="p1"), decode) == 144
        assert way.predicted(decode_pb2.RequestStats(prefill_address="p0"), decode) == 0
        assert way.predicted(decode_pb2.RequestStats(), "d0") == 992

    def test_a_node_that_was_left_is_forgotten(self):
        fleet = Fleet()
        fleet.tell("p1", PROMPT)
        fleet.router.forget("p1")
        load = fleet.router.load_of("p1", PromptPages(PROMPT, ""), "")
        assert load == NodeLoad("p1")

    def test_an_unknown_policy_is_refused(self):
        with pytest.raises(BatonError, match="least-loaded"):
            Router("fastest")
