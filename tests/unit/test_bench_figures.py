"""Statistics of `baton bench`: ITL counting, percentiles, goodput, requests in flight, on known numbers."""

from __future__ import annotations

import json
import random

import numpy as np
import pytest

from baton.bench.summary import in_flight, summarize
from baton.slo import RequestTimes, Targets, itl, pauses, spread, tpot


def record(
    *arrivals: tuple[float, int], sent: float = 0.0, end: float | None = None, **more: object
) -> RequestTimes:
    tokens = sum(count for _, count in arrivals)
    last = arrivals[-1][0] if arrivals else sent
    values = {"prompt_tokens": 10, "output_tokens": tokens, **more}
    return RequestTimes(sent, sent, list(arrivals), last if end is None else end, **values)  # type: ignore[arg-type]


def test_a_pause_is_divided_over_the_tokens_of_its_message():
    arrivals = [(1.0, 1), (1.5, 1), (2.5, 4), (2.6, 2)]
    assert itl(arrivals) == pytest.approx([0.5, 0.25, 0.25, 0.25, 0.25, 0.05, 0.05])
    assert pauses(arrivals) == pytest.approx([0.5, 1.0, 0.1])
    assert tpot(arrivals) == pytest.approx(1.6 / 7)
    assert tpot(arrivals) == pytest.approx(np.mean(itl(arrivals)))


def test_tokens_of_the_first_message_have_no_gap():
    assert itl([(1.0, 3)]) == [] and pauses([]) == []
    assert tpot([(1.0, 1)]) is None and tpot([]) is None
    assert len(itl([(1.0, 3), (2.0, 2)])) == 2


def test_the_first_pause_is_that_of_each_request_alone():
    records = [record((0.1, 1), (0.4, 2), (0.5, 1)), record((0.1, 1), (0.2, 1), (0.9, 1)), record((0.1, 1))]
    found = summarize(records)["first_pause_ms"]
    assert (found["mean"], found["p50"]) == pytest.approx((200.0, 200.0))


def test_percentiles_are_numpy_s():
    draw = random.Random(5)
    values = [draw.expovariate(20.0) for _ in range(999)]
    found = spread(values)
    for part in (50, 90, 99):
        assert found[f"p{part}"] == pytest.approx(1e3 * np.percentile(values, part))
    assert found["mean"] == pytest.approx(1e3 * sum(values) / len(values))
    assert spread([]) == {"mean": None, "p50": None, "p90": None, "p99": None}
    assert spread([None, 0.002])["p50"] == pytest.approx(2.0)


def test_in_flight_is_a_mean_over_time_and_the_most_at_once():
    records = [record(sent=0.0, end=4.0), record(sent=1.0, end=3.0), record(sent=3.0, end=4.0)]
    # The third begins when the second has ended.
    assert in_flight(records, 8.0) == {"mean": pytest.approx(7 / 8), "max": 2}


def test_goodput_counts_requests_that_meet_both_targets():
    quick = record((0.1, 1), (0.12, 1), (0.14, 1))
    late = record((0.5, 1), (0.52, 1), (0.54, 1))
    halting = record((0.1, 1), (0.12, 1), (0.5, 1))
    both = Targets(ttft_ms=200.0, itl_ms=50.0)
    assert [both.met(each) for each in (quick, late, halting)] == [True, False, False]
    assert Targets(ttft_ms=200.0).met(halting) and Targets(itl_ms=50.0).met(late)
    failed = record((0.1, 1), error="DEADLINE_EXCEEDED")
    assert not both.met(failed)
    figures = summarize([quick, late, halting, failed], both, arriving=2.0)
    assert figures["goodput_per_second"] == pytest.approx(0.5)
    assert summarize([quick])["goodput_per_second"] is None


def test_one_late_token_of_many_is_within_the_target_and_two_are_not():
    def stream(halts: int) -> RequestTimes:
        times, now = [(0.1, 1)], 0.1
        for index in range(200):
            now += 1.0 if index < halts else 0.01
            times.append((now, 1))
        return record(*times)

    assert Targets(itl_ms=50.0).met(stream(1))
    assert not Targets(itl_ms=50.0).met(stream(3))


def test_failures_count_by_reason_and_not_in_latencies():
    done = record((0.2, 1), (0.3, 3), sent=0.1, end=0.35, transport="shm", pulled_pages=2, cached_tokens=4)
    refused = [record(sent=0.1, end=0.1, error="QUEUE_FULL") for _ in range(2)]
    cut = record((9.0, 5), sent=0.1, end=10.0, error="DECODE_LOST")
    figures = summarize([done, *refused, cut])
    assert figures["failures"] == {"QUEUE_FULL": 2, "DECODE_LOST": 1}
    assert (figures["requests"], figures["finished"], figures["output_tokens"]) == (4, 1, 4)
    assert figures["ttft_ms"]["p99"] == pytest.approx(100.0) and figures["e2e_ms"]["p50"] == pytest.approx(
        250.0
    )
    assert figures["seconds"] == 10.0 and figures["output_tokens_per_second"] == pytest.approx(0.4)
    assert figures["transports"] == {"shm": 1} and figures["cached_tokens"] == 4
    json.dumps(figures, allow_nan=False)


def test_rates_are_over_the_whole_time_in_which_requests_could_arrive():
    assert summarize([record((0.5, 8))], arriving=4.0)["output_tokens_per_second"] == 2.0
    assert summarize([record((8.0, 8))], arriving=4.0)["output_tokens_per_second"] == 1.0


def test_lateness_is_of_the_client_and_never_negative():
    late = RequestTimes(at=1.0, sent=1.25, end=1.3)
    early = RequestTimes(at=1.0, sent=0.9999, end=1.3)
    assert summarize([late, late])["lateness_ms"]["p99"] == pytest.approx(250.0)
    assert summarize([early])["lateness_ms"]["p99"] == 0.0
