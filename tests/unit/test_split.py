"""Where a prompt is computed: what either way is expected to take, what has been sent, what is decided."""

import itertools
from dataclasses import asdict, replace

import pytest

from baton.engine.cost import StepCost
from baton.gateway.expected import local, local_limit, split
from baton.gateway.figures import NodeFigures
from baton.gateway.metrics import GatewayMetrics
from baton.gateway.sent import Sent
from baton.gateway.split import ALWAYS, NEVER, Split
from baton.handoff.pull_cost import PullCost
from baton.rpc.errors import BatonError
from baton.v1 import decode_pb2, node_pb2

COST = StepCost(fixed=4e-3, row=5e-5, key=0.0, token=2e-5, pair=0.0)
IDLE = NodeFigures("d", cost=COST, step_tokens=2048, pull=PullCost(2e-3, 1e-7))
BUSY = replace(IDLE, rows=20, keys=20 * 500)
PREFILL = NodeFigures("p", cost=COST, step_tokens=2048)


# --- what it is expected to take ------------------------------------------------------------------------


def test_what_an_idle_pair_takes():
    there, here = split(1000, IDLE, PREFILL), local(1000, IDLE)
    assert there.first == here.first == pytest.approx(4e-3 + 1000 * 2e-5)
    assert there.gap == pytest.approx(2e-3 + 1000 * 1e-7) and here.gap == 0
    assert here.end(1) == here.first and here.end(11) == pytest.approx(here.first + 10 * 4.05e-3)
    assert there.end(11) == pytest.approx(there.first + there.gap + 10 * 4.05e-3)


def test_a_prompt_here_costs_the_rows_here():
    here = local(1000, BUSY)
    assert here.first == pytest.approx(4e-3 + 20 * 5e-5 + 1000 * 2e-5)
    assert here.others == pytest.approx(20 * 1000 * 2e-5)
    # Two steps that hold the rows too, where one has no room for the prompt.
    assert local(3000, BUSY).first == pytest.approx(2 * 5e-3 + 3000 * 2e-5)
    assert split(1000, BUSY, PREFILL).others == 0


def test_cached_tokens_are_neither_computed_nor_pulled():
    assert local(1000, replace(IDLE, cached=900)).first == pytest.approx(4e-3 + 100 * 2e-5)
    assert split(1000, IDLE, replace(PREFILL, cached=900)).first == pytest.approx(4e-3 + 100 * 2e-5)
    assert split(1000, replace(IDLE, cached=900), PREFILL).gap == pytest.approx(2e-3 + 100 * 1e-7)
    assert local(1000, replace(IDLE, cached=1000)).first == pytest.approx(4e-3 + 2e-5), "the last token is"


def test_only_the_last_step_s_pages_are_waited_for():
    assert split(10_000, IDLE, PREFILL).gap == pytest.approx(2e-3 + 2048 * 1e-7)


GROWS = {
    "longer prompts": lambda figure, prompt: (prompt + 500, figure, PREFILL),
    "a queue there": lambda figure, prompt: (prompt, figure, replace(PREFILL, queued_tokens=3000)),
    "a queue here": lambda figure, prompt: (prompt, replace(figure, queued_tokens=3000), PREFILL),
    "rows here": lambda figure, prompt: (prompt, replace(figure, rows=figure.rows + 10), PREFILL),
    "slow pulls": lambda figure, prompt: (prompt, replace(figure, pull=PullCost(0.1, 0.0)), PREFILL),
}


@pytest.mark.parametrize("change", GROWS, ids=str)
def test_costs_only_grow_with_load(change):
    for figure, prompt in itertools.product((IDLE, BUSY), (1, 100, 5000)):
        longer, here, there = GROWS[change](figure, prompt)
        assert local(longer, here).cost >= local(prompt, figure).cost
        assert split(longer, here, there).cost >= split(prompt, figure, PREFILL).cost


def test_the_limit_is_where_the_two_ways_cross():
    for figure in (replace(BUSY, rows=rows) for rows in (1, 3, 10, 60)):
        limit = local_limit(8000, figure, replace(PREFILL, queued_tokens=2000))
        assert 0 < limit < 8000
        there = split(8000, figure, replace(PREFILL, queued_tokens=2000)).cost
        assert local(8000, replace(figure, cached=8000 - limit)).cost <= there
        assert local(8000, replace(figure, cached=8000 - limit - 125)).cost > there


def test_the_limit_moves_as_it_should():
    def limit(rows=10, queued_here=0, queued_there=0, pull=2e-3):
        here = replace(IDLE, rows=rows, queued_tokens=queued_here, pull=PullCost(pull, 0.0))
        return local_limit(4000, here, replace(PREFILL, queued_tokens=queued_there))

    assert limit(rows=0) == 4000, "nobody is there to be delayed"
    assert limit() < 1000, "that of others counts"
    assert limit(rows=5) > limit(rows=10) > limit(rows=40)
    assert limit() < limit(queued_there=20_000) < limit(queued_there=40_000)
    assert limit(queued_here=2000) < limit() < limit(pull=0.05)


def test_a_slow_network_keeps_prompts_here():
    slow = replace(BUSY, rows=1, pull=PullCost(0.0, 1e-3))
    assert local_limit(1000, slow, PREFILL) == 1000


@pytest.mark.parametrize("pair", [(replace(IDLE, cost=None), PREFILL), (IDLE, replace(PREFILL, cost=None))])
def test_unknown_costs_say_so(pair):
    with pytest.raises(ValueError, match="is not known"):
        local_limit(1000, *pair)


# --- what has been sent ---------------------------------------------------------------------------------


def test_what_is_sent_counts_until_it_is_done():
    sent = Sent()
    sent.begin(1, "d", "p", 300, 400)
    sent.begin(2, "d", "d", 50, 60)
    assert sent.load("p") == (300, 0, 0) and sent.load("d") == (50, 0, 0)
    sent.computed(1)
    sent.computed(1)
    assert sent.load("p") == (0, 0, 0) and sent.load("d") == (50, 1, 400)
    sent.begin(2, "e", "p", 60, 60)  # elsewhere
    assert sent.load("d") == (0, 1, 400) and sent.load("p") == (60, 0, 0)
    for number in (1, 2, 2, 3):
        sent.end(number)
        sent.computed(number)
    assert all(sent.load(address) == (0, 0, 0) for address in "dpe")
    assert not sent._queued and not sent._rows and not sent._keys, "addresses that are gone are not kept"


def test_what_others_have_there_is_what_a_node_says_beyond_ones_own():
    sent = Sent()
    sent.begin(1, "d", "p", 300, 400)
    sent.reported("p", queued=1000, rows=0, keys=0)
    sent.begin(2, "d", "p", 100, 100)
    assert sent.load("p") == (1100, 0, 0), "700 of others, 400 of ours"
    sent.reported("p", queued=10, rows=0, keys=0)
    assert sent.load("p") == (400, 0, 0), "the second has not arrived there yet"
    sent.computed(1)
    sent.reported("d", queued=0, rows=3, keys=1000)
    assert sent.load("d") == (0, 3, 1000)
    sent.end(1)
    assert sent.load("d") == (0, 2, 600)
    sent.silent("d")
    assert sent.load("d") == (0, 0, 0)


# --- what is decided ------------------------------------------------------------------------------------


def said(cost=COST, **load) -> node_pb2.Load:
    return node_pb2.Load(step_cost=node_pb2.StepCost(**asdict(cost)), step_tokens=2048, **load)


class Rig:
    def __init__(self, mode="auto", known=True):
        self.now, self.metrics = 50.0, GatewayMetrics()
        self.split = Split(mode, self.metrics, lambda: self.now)
        if known:
            self.split.heard("d", said(running=10, pull_cost=node_pb2.PullCost(fixed=2e-3)))
            self.split.heard("p", said())

    def decide(self, number=1, tokens=4000, prefill="p", **options):
        there = self.split.figures(prefill) if prefill else None
        return self.split.decide(number, self.split.figures("d"), there, tokens, **options)

    def value(self, name, **labels):
        return self.metrics.registry.get_sample_value(name, labels)


def test_auto_hands_off_what_is_long_and_keeps_what_is_short():
    rig = Rig()
    limit = rig.decide()
    assert 16 < limit < 1000
    assert rig.split.sent.load("p") == (4000, 0, 0)
    rig.decide(2, tokens=10)
    assert rig.split.sent.load("d")[0] == 10
    assert rig.value("baton_gateway_prompts_total", way="split") == 1
    assert rig.value("baton_gateway_prompts_total", way="local") == 1


def test_what_has_just_been_sent_counts():
    rig = Rig()
    first = rig.decide(1)
    for number in range(2, 12):
        rig.decide(number)
    assert rig.decide(12) > 2 * first, "the prefill node has fallen behind"


def test_nothing_is_known_so_the_decode_node_decides():
    rig = Rig(known=False)
    assert rig.decide() is None and rig.split.sent.load("p") == (4000, 0, 0)
    rig = Rig()
    rig.split.heard("p", None)
    assert rig.decide() is None, "it does not answer any more"
    assert Rig().decide(prefill="") is None, "there is no prefill node"


@pytest.mark.parametrize("known", [True, False])
def test_always_never_and_the_client_s_word(known):
    assert Rig("always", known).decide(tokens=1) == ALWAYS == 0
    assert Rig("never", known).decide(tokens=100_000) == NEVER
    for mode in ("auto", "always", "never"):
        assert Rig(mode, known).decide(tokens=1, hand_off=True) == ALWAYS
        assert Rig(mode, known).decide(tokens=100_000, hand_off=False) == NEVER
    with pytest.raises(BatonError, match="use auto, always, never"):
        Split("sometimes", GatewayMetrics())


def test_what_came_of_it_is_compared_with_what_was_expected():
    rig = Rig()
    rig.decide()
    thought = split(4000, rig.split.figures("d"), replace(PREFILL, queued_tokens=0))
    rig.now += 3 * thought.end(10)
    stats = decode_pb2.RequestStats(prefill_address="p", output_tokens=10)
    rig.split.ended(1, stats, 50.0 + thought.first)
    name = "baton_gateway_actual_over_expected"
    assert rig.value(f"{name}_sum", way="split", until="first_token") == pytest.approx(1.0)
    assert rig.value(f"{name}_sum", way="split", until="end") == pytest.approx(3.0)
    assert rig.split.sent.load("p") == (0, 0, 0), "and it is over"
    rig.split.ended(1, stats, 60.0)
    assert rig.value(f"{name}_count", way="split", until="end") == 1
