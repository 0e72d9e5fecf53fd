"""baton.sizing: the simulation of a deployment, against what can be computed by hand and queueing theory."""

from __future__ import annotations

import asyncio
import statistics
from dataclasses import replace
from itertools import pairwise

import pytest

from baton.bench.summary import summarize
from baton.config import DecodeConfig, PrefillConfig
from baton.sizing.nodes import NodeSetup
from baton.sizing.profile import EngineFacts, HostCost, MeasuredPullCost, Profile
from baton.sizing.simulation import NodeLayout, simulate
from baton.sizing.traffic import Arrival, Lengths, Traffic, poisson
from baton.slo import Targets
from baton.step_cost import StepCost, StepLoad

COST = StepCost(fixed=10e-3, row=1e-4, key=1e-7, token=1e-4, pair=1e-9)
ENGINE = EngineFacts()


def setup(cost=COST, *, pull=None, host=None, gather=0.005, **sizes):
    engine = replace(ENGINE, **sizes)
    profile = Profile(cost, engine, pull or MeasuredPullCost(), host or HostCost())
    return NodeSetup(profile, PrefillConfig(), DecodeConfig(local_prefill_tokens=32, message_seconds=gather))


def traffic(*arrivals, shared=0):
    return Traffic(tuple(Arrival(*each) for each in arrivals), 0, len(arrivals), shared)


def even(rate, count, prompt, output):
    return traffic(*((1 + i / rate, prompt, output) for i in range(count)))


def ttft(found):
    return statistics.fmean(record.ttft for record in found.records)


def decode_step(rows, keys):
    return COST.seconds(StepLoad(decode_sequences=rows, context_tokens=keys))


def prompt_step(count):
    return COST.seconds(StepLoad(prefill_tokens=count, attention_pairs=count * (count + 1) // 2))


def test_one_request_takes_the_time_that_can_be_computed():
    """Split: there and back, the prompt; then the pull; then a step a token, with the host between."""
    host = HostCost(turn=1e-3, row=2e-4, request=3e-3, hop=5e-4)
    pull = MeasuredPullCost(latency=7e-3, bytes_per_second=1e9)
    (record,) = simulate(NodeLayout(1, 1), setup(host=host, pull=pull), traffic((1.0, 100, 5))).records
    first = host.request + 2 * host.hop + prompt_step(100)
    assert record.ttft == pytest.approx(first, abs=1e-9)
    copied = pull.seconds(7 * ENGINE.page_bytes)
    steps = [decode_step(1, 101 + i) for i in range(4)]
    # The pull begins with the end of the prompt's step, while the first token is told, and ends in a turn
    # that begins at once.
    assert record.e2e == pytest.approx(
        first + copied - host.hop + sum(steps) + 3 * (host.turn + host.row), abs=1e-9
    )
    assert (record.output_tokens, record.prompt_tokens, record.pulled_pages) == (5, 100, 7)


def test_of_a_window_only_the_pages_that_are_still_seen_are_pulled():
    """100 tokens are 7 pages; at the border at 96 a window of 32 sees from 65 on, which is in the fifth."""
    pull = MeasuredPullCost(bytes_per_second=1e6)

    def second_token(*windows):
        arrivals = traffic((1.0, 100, 2))
        (record,) = simulate(NodeLayout(1, 1), setup(pull=pull, windows=windows), arrivals).records
        return record.e2e - record.ttft

    whole = second_token(0)
    assert second_token(0, 0) - whole == pytest.approx(7 * ENGINE.page_bytes / 1e6, abs=1e-3)
    assert second_token(0, 32) - whole == pytest.approx(3 * ENGINE.page_bytes / 1e6, abs=1e-3)


def test_without_shared_generations_the_answer_to_the_release_is_waited_for():
    host, pull = HostCost(hop=4e-3), MeasuredPullCost(latency=1e-3)
    seen, unseen = (
        simulate(NodeLayout(1, 1), setup(host=host, pull=replace(pull, seen=each)), traffic((1.0, 100, 5)))
        for each in (True, False)
    )
    # What the receiver sees it need not be told either: it begins with the step's end, and is done before the
    # first token is there.
    later = pull.latency + 2 * host.hop
    assert unseen.records[0].e2e - seen.records[0].e2e == pytest.approx(later, abs=1e-9)


def test_aggregated_prompts_are_computed_where_they_are_decoded():
    (record,) = simulate(NodeLayout(0, 1), setup(), traffic((1.0, 700, 3))).records
    # Two chunks: what the budget of a step holds, then the rest.
    second = COST.seconds(StepLoad(prefill_tokens=188, attention_pairs=188 * 512 + 188 * 189 // 2))
    assert record.ttft == pytest.approx(prompt_step(512) + second, abs=1e-9)
    assert record.pulled_pages == 0


def test_a_queue_of_one_server_is_that_of_theory():
    """M/D/1: one row, one step a request. Its mean wait is rho * S / (2 * (1 - rho)) (Pollaczek-Khinchine),
    and each single wait is the last one's, plus S, less the time between the two arrivals (Lindley)."""
    service, load, count = 10e-3, 0.6, 2000
    cost = StepCost(fixed=service, row=0, key=0, token=0, pair=0)
    queue = poisson(load / service, Lengths(64, 64), Lengths(1, 1), count, 3, 2048)
    found = simulate(NodeLayout(0, 1), setup(cost, max_rows=1), queue)
    waits, wait, before = [], 0.0, queue.arrivals[0].at
    for arrival in queue.arrivals:
        wait = max(0.0, wait + service - (arrival.at - before)) if arrival.at > before else 0.0
        before = arrival.at
        waits.append(wait)
    counted = waits[queue.first : queue.last]
    assert [r.ttft - service for r in found.records] == pytest.approx(counted, abs=1e-6)
    theory = load * service / (2 * (1 - load))
    assert ttft(found) - service == pytest.approx(theory, rel=0.03)
    assert found.decode.busy == pytest.approx(load, rel=0.03)


@pytest.mark.thorough
def test_more_load_waits_longer_and_more_nodes_less():
    lengths = (Lengths(200, 600), Lengths(10, 60))
    light, heavy = (poisson(rate, *lengths, 150, 1, 2048) for rate in (4, 14))
    at = {
        (name, layout): simulate(NodeLayout(*layout), setup(), load)
        for name, load in (("light", light), ("heavy", heavy))
        for layout in ((1, 1), (2, 1), (1, 2))
    }
    assert ttft(at["light", (1, 1)]) < ttft(at["heavy", (1, 1)])
    assert ttft(at["heavy", (2, 1)]) < ttft(at["heavy", (1, 1)])
    one, two = at["heavy", (1, 1)], at["heavy", (2, 1)]
    assert one.prefill.busy == pytest.approx(2 * two.prefill.busy, rel=0.1)
    itl = [summarize(at["heavy", (1, d)].records)["itl_ms"]["mean"] for d in (1, 2)]
    assert itl[1] < itl[0]


def test_the_same_seed_gives_the_same_records():
    load = poisson(10, Lengths(50, 400), Lengths(5, 40), 60, 9, 2048)
    first, second = (simulate(NodeLayout(1, 2), setup(), load) for _ in range(2))
    assert first == second
    other = poisson(10, Lengths(50, 400), Lengths(5, 40), 60, 10, 2048)
    assert simulate(NodeLayout(1, 2), setup(), other).records != first.records


def test_an_event_loop_around_it_makes_no_difference():
    load = traffic((1, 500, 4))

    async def around():
        return simulate(NodeLayout(1, 1), setup(), load)

    assert asyncio.run(around()) == simulate(NodeLayout(1, 1), setup(), load)


def test_a_shared_prefix_is_computed_once():
    arrivals = [(1 + i, 500, 2) for i in range(3)]
    alone = simulate(NodeLayout(1, 1), setup(), traffic(*arrivals))
    shared = simulate(NodeLayout(1, 1), setup(), traffic(*arrivals, shared=400))
    assert [record.cached_tokens for record in alone.records] == [0, 0, 0]
    assert [record.cached_tokens for record in shared.records] == [0, 400, 400]
    assert shared.records[1].ttft < alone.records[1].ttft
    assert shared.records[0].ttft == alone.records[0].ttft


@pytest.mark.parametrize(("gather", "most"), [(0.005, 15), (0.02, 6)])
def test_short_steps_share_messages(gather, most):
    cost = StepCost(fixed=1e-3, row=0, key=0, token=0, pair=0)
    (record,) = simulate(NodeLayout(0, 1), setup(cost, gather=gather), traffic((1.0, 20, 50))).records
    times = [at for at, _ in record.arrivals]
    assert sum(count for _, count in record.arrivals) == 50
    assert record.e2e == pytest.approx(50e-3, abs=1e-9)
    # The first token goes at once and makes none wait, the last one with the end of the request.
    assert all(b - a >= gather - 1e-9 for a, b in pairwise(times[1:-1]))
    assert len(times) < most


@pytest.mark.parametrize(("overlap", "between"), [(False, 14e-3), (True, 10e-3)])
def test_with_overlap_the_host_works_while_the_device_does(overlap, between):
    cost = StepCost(fixed=10e-3, row=0, key=0, token=0, pair=0)
    built = setup(cost, host=HostCost(turn=4e-3), overlap=overlap)
    (record,) = simulate(NodeLayout(0, 1), built, traffic((1.0, 20, 40))).records
    assert record.tpot == pytest.approx(between, rel=0.03)


def test_a_pool_that_is_too_small_makes_requests_wait_or_begin_again():
    load = even(40, 30, 300, 100)
    roomy, tight = (simulate(NodeLayout(0, 1), setup(kv_tokens=tokens), load) for tokens in (65536, 2048))
    assert tight.decode.most_pages <= tight.decode.pages == 128
    assert ttft(tight) > 2 * ttft(roomy)
    assert 30 * 400 / 16 >= roomy.decode.most_pages > 128
    assert all(record.output_tokens == 100 for record in tight.records)


def test_what_is_refused_is_a_failure():
    load = traffic((1.0, 100, 4), (1.1, 1000, 1200))
    fits, too_long = simulate(NodeLayout(1, 1), setup(context_length=2048), load).records
    assert fits.error == "" and too_long.error == "CONTEXT_LENGTH_EXCEEDED"
    assert not Targets().met(too_long)


def test_busy_is_of_the_time_in_which_requests_arrive():
    """Half of it: a step of 10 ms every 20 ms, on one of two nodes each."""
    cost = StepCost(fixed=10e-3, row=0, key=0, token=0, pair=0)
    load = traffic(*((i / 50, 30, 1) for i in range(1, 501)))
    found = simulate(NodeLayout(0, 1), setup(cost), load)
    assert found.decode.busy == pytest.approx(0.5, rel=0.02)
