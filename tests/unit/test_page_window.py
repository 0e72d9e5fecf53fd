"""Figures of the live page are those that Prometheus would compute from /metrics."""

from __future__ import annotations

import pytest

from baton.api.page.window import KEPT_SECONDS, Window, quantile
from baton.gateway.metrics import GatewayMetrics


@pytest.mark.parametrize(
    ("counts", "share", "expected"),
    [  # of histogram_quantile, computed by hand
        ([0, 0, 0, 0], 0.5, None),
        ([4, 0, 0, 0], 0.5, 0.5),
        ([0, 4, 0, 0], 0.5, 1.5),
        ([1, 0, 3, 0], 0.5, 2 + 2 * (2 - 1) / 3),
        ([1, 0, 3, 0], 0.25, 1.0),
        ([0, 0, 1, 3], 0.9, 4.0),  # above all bounds
        ([2, 2, 2, 2], 0.99, 4.0),
    ],
)
def test_a_quantile_is_interpolated_in_its_bucket(counts, share, expected):
    assert quantile((1.0, 2.0, 4.0), counts, share) == (None if expected is None else pytest.approx(expected))


def test_rates_are_of_what_came_between_two_samples():
    metrics, window = GatewayMetrics(), None
    metrics.requests.labels("finished").inc(100)  # before the page looked
    metrics.output_tokens.add(1000)
    metrics.ttft.observe(40.0)
    window = Window(metrics)
    window.add(50.0, 0)
    assert window.figures(60) is None
    for second in range(1, 11):
        metrics.requests.labels("finished").inc(2)
        metrics.requests.labels("cancelled").inc()
        metrics.targets.labels("both", "yes").inc(3)
        metrics.targets.labels("both", "no").inc(1)
        metrics.output_tokens.add(50)
        metrics.ttft.observe(0.02)
        window.add(50.0 + second, 7)
    for seconds in (4, 10, 60):
        found = window.figures(seconds)
        assert found is not None and found.seconds == min(seconds, 10)
        assert (found.requests, found.output_tokens, found.goodput, found.good) == (3.0, 50.0, 3.0, 0.75)
        assert found.ttft[0] == pytest.approx(0.0175) and found.itl == (None, None, None)
    assert window.running(-1) == 7


def test_what_is_kept_is_bounded():
    window = Window(GatewayMetrics())
    for second in range(2 * int(KEPT_SECONDS)):
        window.add(float(second), 0)
    assert len(window) == KEPT_SECONDS + 1
