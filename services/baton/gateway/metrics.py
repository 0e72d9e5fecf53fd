"""What the gateway measures, beside its load."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from itertools import accumulate

import prometheus_client
from prometheus_client import CollectorRegistry, Counter, Gauge
from prometheus_client.core import HistogramMetricFamily
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)
_RATIOS = (0.25, 0.5, 0.67, 0.8, 0.9, 1.1, 1.25, 1.5, 2, 4)
_GAP_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.02, 0.03, 0.05, 0.1, 0.25, 0.5, 1, 5)


class Histogram(Collector):
    """As prometheus_client's, for values that come with every token: one thread adds them, so that nothing is
    locked, and a value costs a tenth."""

    def __init__(self, name: str, about: str, buckets: Sequence[float], registry: CollectorRegistry) -> None:
        self._name = name
        self._about = about
        self._bounds = buckets
        self._counts = [0] * (len(buckets) + 1)
        self._sum = 0.0
        registry.register(self)

    def observe(self, value: float) -> None:
        self._counts[bisect_left(self._bounds, value)] += 1
        self._sum += value

    def collect(self) -> Iterator[HistogramMetricFamily]:
        names = [*map(floatToGoString, self._bounds), "+Inf"]
        buckets = list(zip(names, accumulate(self._counts), strict=True))
        yield HistogramMetricFamily(self._name, self._about, buckets=buckets, sum_value=self._sum)


class GatewayMetrics:
    """Belongs to one gateway; nothing is registered globally."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry(auto_describe=False)
        self.requests = Counter(
            "baton_gateway_requests", "Requests that ended, by outcome.", ["outcome"], registry=self.registry
        )
        self.ttft = Histogram(
            "baton_ttft_seconds",
            "From a request's start to its first token.",
            buckets=_SECONDS,
            registry=self.registry,
        )
        self.itl = Histogram(
            "baton_itl_seconds",
            "Between two tokens of a request's first choice.",
            buckets=_GAP_SECONDS,
            registry=self.registry,
        )
        self.resumes = Counter(
            "baton_gateway_resumes",
            "Times that a request went on at a decode node after another one had been lost.",
            registry=self.registry,
        )
        self.probes = Counter(
            "baton_probes", "Probes of the hand-off, by outcome.", ["outcome"], registry=self.registry
        )
        self.probe_seconds = Gauge("baton_probe_seconds", "What the last probe took.", registry=self.registry)
        self.cached = Counter(
            "baton_routing_cached_tokens",
            "Prompt tokens of finished requests that their node was taken to have cached (expected), that it "
            "had (found), and by how many the two differed (wrong).",
            ["kind"],
            registry=self.registry,
        )
        for kind in ("expected", "found", "wrong"):
            self.cached.labels(kind)
        self.decisions = Counter(
            "baton_gateway_prompts",
            "Prompts by where they were to be computed: on a prefill node (split) or on the decode node.",
            ["way"],
            registry=self.registry,
        )
        self.expected = prometheus_client.Histogram(
            "baton_gateway_actual_over_expected",
            "Time from sending a request until its first token, or its end, over what was expected.",
            ["way", "until"],
            buckets=_RATIOS,
            registry=self.registry,
        )
        for way in ("split", "local"):
            self.decisions.labels(way)
            for until in ("first_token", "end"):
                self.expected.labels(way, until)
        for outcome in ("ok", "refused", "failed"):
            self.probes.labels(outcome)
        for outcome in ("finished", "failed", "cancelled"):
            self.requests.labels(outcome)

    def routed(self, expected: int, found: int) -> None:
        """A request has finished: its cached tokens, as they were expected and as they were found."""
        self.cached.labels("expected").inc(expected)
        self.cached.labels("found").inc(found)
        self.cached.labels("wrong").inc(abs(expected - found))
