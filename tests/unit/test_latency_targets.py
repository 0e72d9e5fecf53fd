"""Which requests meet their latency targets, as the gateway counts them."""

from __future__ import annotations

import pytest

from baton.gateway.metrics import MAX_REASONS, GatewayMetrics, RequestTimer
from baton.rpc.errors import BatonError, invalid, unavailable


class Clock:
    now = 100.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


def met(metrics: GatewayMetrics) -> dict[str, list[float]]:
    """Target -> requests that met and that missed it."""
    value = metrics.registry.get_sample_value
    name = "baton_gateway_target_requests_total"
    return {
        target: [value(name, {"target": target, "met": word}) or 0.0 for word in ("yes", "no")]
        for target in ("ttft", "itl", "both")
    }


def run(
    clock: Clock,
    metrics: GatewayMetrics,
    gaps: list[float],
    outcome="finished",
    error: BatonError | None = None,
) -> None:
    """A request whose tokens come after these pauses, the first one's since its start."""
    timer = RequestTimer(metrics, 60.0, clock.monotonic)
    for gap in gaps:
        clock.now += gap
        timer.tokens(0, 1)
    timer.ended(outcome, error)


@pytest.mark.parametrize(
    ("gaps", "ttft", "itl"),
    [
        ([0.4, *[0.05] * 20], True, True),
        ([0.6, *[0.05] * 20], False, True),
        ([0.4, *[0.05] * 20, 0.2], True, False),
        ([0.4, *[0.05] * 200, 0.2, 0.2], True, True),  # 2 of 202 are late
        ([0.4, *[0.05] * 200, 0.2, 0.2, 0.2], True, False),
        ([0.4], True, True),
        ([], True, True),  # it was to have no tokens
    ],
)
def test_a_finished_request(clock, gaps, ttft, itl):
    metrics = GatewayMetrics(0.5, 0.1)
    run(clock, metrics, gaps)
    for target, expected in (("ttft", ttft), ("itl", itl), ("both", ttft and itl)):
        assert met(metrics)[target] == ([1, 0] if expected else [0, 1]), target


def test_one_that_fails_has_not_met_both_unless_the_client_is_to_blame(clock):
    metrics = GatewayMetrics(0.5, 0.1)
    run(clock, metrics, [], "failed", unavailable("no node"))
    run(clock, metrics, [0.1, 0.05], "failed", unavailable("lost"))
    run(clock, metrics, [], "failed", invalid("n", "n is 0"))
    assert met(metrics) == {"ttft": [1, 1], "itl": [2, 0], "both": [0, 2]}


def test_reasons_are_bounded():
    metrics = GatewayMetrics()
    for number in range(MAX_REASONS + 10):
        metrics.failed(f"R{number}")
    (family,) = metrics.failures.collect()
    assert len({sample.labels["reason"] for sample in family.samples}) == MAX_REASONS + 1
    assert metrics.registry.get_sample_value("baton_gateway_failures_total", {"reason": "OTHER"}) == 10
