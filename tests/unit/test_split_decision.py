"""Where a prompt is computed: what either way is expected to take, what has been sent, what is decided."""

import itertools
from dataclasses import asdict, replace

import pytest

from baton.gateway.cache_view import PromptPages
from baton.gateway.metrics import GatewayMetrics
from baton.gateway.node_load import NodeLoad, NodeWork, SentLoad
from baton.gateway.routing import RequestRouting, Router
from baton.gateway.split_decision import (
    ALWAYS,
    HALF_LIFE,
    NEVER,
    Decision,
    PredictionBias,
    Split,
    local_limit,
    predict_local,
    predict_split,
)
from baton.handoff.pull_cost import PullCost
from baton.rpc.errors import BatonError
from baton.step_cost import StepCost
from baton.v1 import cache_pb2, decode_pb2, node_pb2

COST = StepCost(fixed=4e-3, row=5e-5, key=0.0, token=2e-5, pair=0.0)
IDLE = NodeLoad("d", cost=COST, step_tokens=2048, pull=PullCost(2e-3, 1e-7))
BUSY = replace(IDLE, running=20, context_tokens=20 * 500)
PREFILL = NodeLoad("p", cost=COST, step_tokens=2048)


# --- what it is expected to take ------------------------------------------------------------------------


def test_what_an_idle_pair_takes():
    there, here = predict_split(1000, IDLE, PREFILL), predict_local(1000, IDLE)
    assert there.first == here.first == pytest.approx(4e-3 + 1000 * 2e-5)
    assert there.gap == pytest.approx(2e-3 + 1000 * 1e-7) and here.gap == 0
    assert here.end(1) == here.first and here.end(11) == pytest.approx(here.first + 10 * 4.05e-3)
    assert there.end(11) == pytest.approx(there.first + there.gap + 10 * 4.05e-3)


def test_a_prompt_here_costs_the_rows_here():
    here = predict_local(1000, BUSY)
    assert here.first == pytest.approx(4e-3 + 20 * 5e-5 + 1000 * 2e-5)
    assert here.others == pytest.approx(20 * 1000 * 2e-5)
    # Two steps that hold the rows too, where one has no room for the prompt.
    assert predict_local(3000, BUSY).first == pytest.approx(2 * 5e-3 + 3000 * 2e-5)
    assert predict_split(1000, BUSY, PREFILL).others == 0


def test_cached_tokens_are_neither_computed_nor_pulled():
    assert predict_local(1000, replace(IDLE, cached=900)).first == pytest.approx(4e-3 + 100 * 2e-5)
    assert predict_split(1000, IDLE, replace(PREFILL, cached=900)).first == pytest.approx(4e-3 + 100 * 2e-5)
    assert predict_split(1000, replace(IDLE, cached=900), PREFILL).gap == pytest.approx(2e-3 + 100 * 1e-7)
    assert predict_local(1000, replace(IDLE, cached=1000)).first == pytest.approx(4e-3 + 2e-5), (
        "the last token is"
    )


def test_only_the_last_step_s_pages_are_waited_for():
    assert predict_split(10_000, IDLE, PREFILL).gap == pytest.approx(2e-3 + 2048 * 1e-7)


GROWS = {
    "longer prompts": lambda figure, prompt: (prompt + 500, figure, PREFILL),
    "a queue there": lambda figure, prompt: (prompt, figure, replace(PREFILL, queued_tokens=3000)),
    "a queue here": lambda figure, prompt: (prompt, replace(figure, queued_tokens=3000), PREFILL),
    "rows here": lambda figure, prompt: (prompt, replace(figure, running=figure.running + 10), PREFILL),
    "slow pulls": lambda figure, prompt: (prompt, replace(figure, pull=PullCost(0.1, 0.0)), PREFILL),
}


@pytest.mark.parametrize("change", GROWS, ids=str)
def test_costs_only_grow_with_load(change):
    for figure, prompt in itertools.product((IDLE, BUSY), (1, 100, 5000)):
        longer, here, there = GROWS[change](figure, prompt)
        assert predict_local(longer, here).cost >= predict_local(prompt, figure).cost
        assert predict_split(longer, here, there).cost >= predict_split(prompt, figure, PREFILL).cost


def test_the_limit_is_where_the_two_ways_cross():
    for figure in (replace(BUSY, running=rows) for rows in (1, 3, 10, 60)):
        limit = local_limit(8000, figure, replace(PREFILL, queued_tokens=2000))
        assert 0 < limit < 8000
        there = predict_split(8000, figure, replace(PREFILL, queued_tokens=2000)).cost
        assert predict_local(8000, replace(figure, cached=8000 - limit)).cost <= there
        assert predict_local(8000, replace(figure, cached=8000 - limit - max(16, limit // 16))).cost > there


def test_the_limit_moves_as_it_should():
    def limit(rows=10, queued_here=0, queued_there=0, pull=2e-3):
        here = replace(IDLE, running=rows, queued_tokens=queued_here, pull=PullCost(pull, 0.0))
        return local_limit(4000, here, replace(PREFILL, queued_tokens=queued_there))

    assert limit(rows=0) == 4000, "nobody is there to be delayed"
    assert limit() < 1000, "that of others counts"
    assert limit(rows=5) > limit(rows=10) > limit(rows=40)
    assert limit() < limit(queued_there=20_000) < limit(queued_there=40_000)
    assert limit(queued_here=2000) < limit() < limit(pull=0.05)


def test_a_slow_network_keeps_prompts_here():
    slow = replace(BUSY, running=1, pull=PullCost(0.0, 1e-3))
    assert local_limit(1000, slow, PREFILL) == 1000


@pytest.mark.parametrize("pair", [(replace(IDLE, cost=None), PREFILL), (IDLE, replace(PREFILL, cost=None))])
def test_unknown_costs_say_so(pair):
    with pytest.raises(ValueError, match="is not known"):
        local_limit(1000, *pair)


# --- what has been sent ---------------------------------------------------------------------------------


def test_what_is_sent_counts_until_it_is_done():
    sent = SentLoad()
    sent.add(1, 0, 400)
    sent.add(2, 50, 60)
    assert sent.work() == NodeWork(tokens=50, rows=2)
    sent.computed(1)
    sent.computed(1)
    assert sent.work() == NodeWork(tokens=50, rows=2, running=1, context_tokens=400)
    sent.computed(2)
    assert sent.work() == NodeWork(tokens=0, rows=2, running=2, context_tokens=460)
    sent.add(2, 70, 60)  # anew
    assert sent.work() == NodeWork(tokens=70, rows=2, running=1, context_tokens=400)
    for number in (1, 2, 2, 3):
        sent.drop(number)
        sent.computed(number)
    assert sent.work() == NodeWork()


def test_what_a_node_says_tells_of_others():
    sent = SentLoad()
    sent.add(1, 300, 400)
    sent.reported(NodeWork(tokens=1000, rows=3, running=2, context_tokens=700))
    sent.add(2, 100, 100)
    assert sent.work() == NodeWork(tokens=1100, rows=4, running=2, context_tokens=700), "others: 700, 2 rows"
    assert sent.work(others=False) == NodeWork(tokens=400, rows=2)
    sent.reported(NodeWork(tokens=10, rows=1))
    assert sent.work() == NodeWork(tokens=400, rows=2), "what it said does not count in the second yet"
    sent.computed(1)
    sent.computed(2)
    sent.reported(NodeWork(rows=4, running=4, context_tokens=1000))
    sent.drop(1)
    sent.drop(2)
    assert sent.work() == NodeWork(rows=2, running=2, context_tokens=500), "what has ended is not theirs"


# --- what is decided ------------------------------------------------------------------------------------


class Rig:
    def __init__(self, mode="auto"):
        self.now = 100.0
        self.metrics = GatewayMetrics()
        self.split = Split(mode, self.metrics, lambda: self.now)

    def value(self, name, **labels):
        return self.metrics.registry.get_sample_value(name, labels)


def test_auto_hands_off_what_is_long_and_keeps_what_is_short():
    rig = Rig()
    long = rig.split.decide(BUSY, PREFILL, 4000)
    assert 16 < long.limit < 1000 and not long.local
    assert rig.split.decide(BUSY, PREFILL, 10).local
    assert rig.split.decide(replace(BUSY, cached=3995), PREFILL, 4000).local, "what is cached is not computed"
    assert rig.value("baton_gateway_prompts_total", way="split", why="cost") == 1
    assert rig.value("baton_gateway_prompts_total", way="local", why="cost") == 2


@pytest.mark.parametrize("unknown", ["d", "p"])
def test_nothing_is_known_so_the_decode_node_decides(unknown):
    here = replace(BUSY, cost=None) if unknown == "d" else BUSY
    there = replace(PREFILL, cost=None) if unknown == "p" else PREFILL
    rig = Rig()
    decision = rig.split.decide(here, there, 4000)
    assert decision == Decision(None, local=False, predictions={})
    assert rig.value("baton_gateway_prompts_total", way="split", why="unknown") == 1
    assert rig.split.decide(BUSY, None, 4000) == Decision(None, local=True, predictions={}), "no choice"
    assert rig.value("baton_gateway_prompts_total", way="local", why="unknown") == 0


@pytest.mark.parametrize("here", [BUSY, replace(BUSY, cost=None)], ids=["known", "unknown"])
def test_always_never_and_the_client_s_word(here):
    assert Rig("always").split.decide(here, PREFILL, 1).limit == ALWAYS == 0
    assert Rig("never").split.decide(here, PREFILL, 100_000).limit == NEVER
    for mode in ("auto", "always", "never"):
        away = Rig(mode).split.decide(here, PREFILL, 1, hand_off=True)
        stays = Rig(mode).split.decide(here, PREFILL, 100_000, hand_off=False)
        assert (away.limit, away.local, stays.limit, stays.local) == (ALWAYS, False, NEVER, True)
    with pytest.raises(BatonError, match="use auto, always, never"):
        Rig("sometimes")


def test_what_came_of_it_is_compared_with_what_was_expected():
    rig = Rig()
    decision = rig.split.decide(BUSY, PREFILL, 4000)
    prediction = predict_split(4000, BUSY, PREFILL)
    stats = decode_pb2.RequestStats(prefill_address="p", output_tokens=10)
    rig.split.ended(decision, stats, prediction.first, 3 * prediction.end(10))
    name = "baton_gateway_actual_over_expected"
    assert rig.value(f"{name}_sum", way="split", until="first_token") == pytest.approx(1.0)
    assert rig.value(f"{name}_sum", way="split", until="end") == pytest.approx(3.0)
    # By the way that it has taken in the end; a request that had bad luck is no measure of the prediction.
    rig.split.ended(decision, decode_pb2.RequestStats(output_tokens=1), predict_local(4000, BUSY).first, 1.0)
    assert rig.value(f"{name}_sum", way="local", until="first_token") == pytest.approx(1.0)
    stats.handoff_retries = 1
    rig.split.ended(decision, stats, 1.0, 1.0)
    assert rig.value(f"{name}_count", way="split", until="end") == 1


@pytest.mark.parametrize("factor", [0.5, 1.5])
def test_what_is_wrong_all_the_time_is_learned_and_the_metric_shows_it(factor):
    """The metric is of what was decided with, bias included."""
    rig = Rig("always")
    name, labels = "baton_gateway_actual_over_expected_sum", {"way": "split", "until": "first_token"}
    stats = decode_pb2.RequestStats(prefill_address="p", output_tokens=2)
    seen = []
    for _ in range(100):
        decision = rig.split.decide(BUSY, PREFILL, 4000)
        before = rig.value(name, **labels)
        rig.split.ended(decision, stats, factor * decision.predictions["split"].first, 1.0)
        seen.append(rig.value(name, **labels) - before)
    assert seen[0] == pytest.approx(factor) and seen[-1] == pytest.approx(1.0, rel=0.01)


def test_a_choice_that_takes_longer_than_predicted_is_taken_less_until_the_bias_has_decayed():
    rig = Rig()
    before = rig.split.decide(BUSY, PREFILL, 4000)
    prediction, stats = (
        before.predictions["split"],
        decode_pb2.RequestStats(prefill_address="p", output_tokens=2),
    )
    for _ in range(50):
        rig.split.ended(before, stats, prediction.first + 0.01, 1.0)
    after = rig.split.decide(BUSY, PREFILL, 4000)
    assert after.limit > 1.1 * before.limit and after.predictions == before.predictions
    for _ in range(50):
        rig.split.ended(
            before, decode_pb2.RequestStats(output_tokens=2), before.predictions["local"].first + 0.01, 1.0
        )
    assert rig.split.decide(BUSY, PREFILL, 4000).limit == before.limit, "both do"
    rig.now += 3600
    assert rig.split.decide(BUSY, PREFILL, 4000).limit == before.limit


def test_excess_is_a_mean_that_fades():
    bias = PredictionBias()
    assert bias.seconds(5.0) == 0.0
    for _ in range(200):
        bias.add(7.0, 3.0, 2.0)
    assert bias.seconds(7.0) == pytest.approx(1.0, rel=1e-3)
    assert bias.seconds(7.0 + HALF_LIFE) == pytest.approx(0.5, rel=1e-3)
    for _ in range(200):
        bias.add(7.0, 1.5, 2.0)
    assert bias.seconds(7.0) == pytest.approx(-0.5, rel=1e-3), "it may also take less"
    for _ in range(200):
        bias.add(7.0, 60.0, 2.0)
    assert bias.seconds(7.0) == pytest.approx(2.0, rel=1e-3), "one that was stalled is no measure"


# --- of a router that has been told ---------------------------------------------------------------------


class Told:
    """Of a prefill node p and a decode node d; its numbers count up."""

    def __init__(self):
        self.now, self.numbers, self.split = 50.0, itertools.count(), Rig().split
        self.router = Router("cache", lambda: self.now)
        self.tell("p")
        self.tell("d", running=10, rows=10)

    def tell(self, address, **load):
        told = node_pb2.Load(step_cost=node_pb2.StepCost(**asdict(COST)), step_tokens=2048, **load)
        update = cache_pb2.CacheUpdate(incarnation=1, snapshot=True, page_size=16, load=told)
        self.router.update(address, update)

    def send(self, tokens=4000, **options):
        way = RequestRouting(self.router, next(self.numbers), PromptPages([1] * tokens, ""))
        limit = way.decide(self.split, way.pick_decode(["d"]), way.order_prefill(["p"]), **options)
        way.sent("d", ["p"])
        return way, limit


def test_what_has_just_been_sent_counts():
    told = Told()
    first = told.send()[1]
    for _ in range(10):
        told.send()
    assert told.send()[1] > 2 * first, "the prefill node has fallen behind"
    before = told.router.sent("p").work()
    assert before.tokens >= 11 * 4000
    told.tell("p", queued_tokens=2000)
    assert told.router.sent("p").work() == before, "it had not heard of all of them yet"


def test_what_is_computed_here_counts_here():
    told = Told()
    way, _ = told.send(hand_off=False)
    assert told.router.sent("d").work() == NodeWork(tokens=4000, rows=11, running=10)
    assert told.router.sent("p").work() == NodeWork()
    way.computed()
    assert told.router.sent("d").work() == NodeWork(tokens=0, rows=11, running=11, context_tokens=4000)
    way.ended()
    assert told.router.sent("d").work() == NodeWork(rows=10, running=10)


def test_others_work_is_no_more_once_a_node_is_silent():
    told = Told()
    told.tell("p", queued_tokens=50_000)
    assert told.send()[1] > 1000
    told.now += 60
    assert told.send()[1] is None, "nothing is known of either"
