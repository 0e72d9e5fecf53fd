"""Metrics of the gateway's requests, and the request log."""

from __future__ import annotations

import time
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, product

import prometheus_client
from prometheus_client import CollectorRegistry, Counter, Gauge
from prometheus_client.core import HistogramMetricFamily
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

from baton.rpc.logs import get_logger
from baton.rpc.tasks import CoalescedCall

_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)
_RATIOS = (0.25, 0.5, 0.67, 0.8, 0.9, 1.1, 1.25, 1.5, 2, 4)
_GAP_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.02, 0.03, 0.05, 0.1, 0.25, 0.5, 1, 5)


class Histogram(Collector):
    """Like prometheus_client's Histogram, for values that come with every token. Only one thread adds
    values, so nothing is locked, and a value costs a tenth."""

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
        self.registry = registry = CollectorRegistry(auto_describe=False)
        self.requests = self._counter(
            "baton_gateway_requests",
            "Requests that ended, by outcome.",
            "outcome",
            ("finished", "failed", "cancelled"),
        )
        self.ttft = Histogram(
            "baton_ttft_seconds", "From a request's start to its first token.", _SECONDS, registry
        )
        self.itl = Histogram(
            "baton_itl_seconds", "Between two tokens of a request's first choice.", _GAP_SECONDS, registry
        )
        self.resumes = Counter(
            "baton_gateway_resumes",
            "Times that a request went on at a decode node after another one had been lost.",
            registry=registry,
        )
        self.probes = self._counter(
            "baton_probes", "Probes of the hand-off, by outcome.", "outcome", ("ok", "refused", "failed")
        )
        self.probe_seconds = Gauge("baton_probe_seconds", "What the last probe took.", registry=registry)
        self.cached = self._counter(
            "baton_routing_cached_tokens",
            "Prompt tokens of finished requests that their node was taken to have cached (expected), that it "
            "had (found), and by how many the two differed (wrong).",
            "kind",
            ("expected", "found", "wrong"),
        )
        self.decisions = self._counter(
            "baton_gateway_prompts",
            "Prompts by where they were to be computed: on a prefill node (split) or on the decode node.",
            "way",
            ("split", "local"),
        )
        self.expected = prometheus_client.Histogram(
            "baton_gateway_actual_over_expected",
            "Time from sending a request until its first token, or its end, over what was expected.",
            ["way", "until"],
            buckets=_RATIOS,
            registry=registry,
        )
        for way, until in product(("split", "local"), ("first_token", "end")):
            self.expected.labels(way, until)

    def _counter(self, name: str, about: str, label: str, values: Sequence[str]) -> Counter:
        """With one label, all of whose values are shown from the start."""
        counter = Counter(name, about, [label], registry=self.registry)
        for value in values:
            counter.labels(value)
        return counter

    def routed(self, expected: int, found: int) -> None:
        """Counts the cached tokens of a finished request, expected and found."""
        self.cached.labels("expected").inc(expected)
        self.cached.labels("found").inc(found)
        self.cached.labels("wrong").inc(abs(expected - found))


class RequestTimer:
    """Starts now. limit: seconds that the request may take."""

    def __init__(self, metrics: GatewayMetrics, limit: float) -> None:
        self.limit = limit
        self._metrics = metrics
        self._started = time.monotonic()
        self._first_token: float | None = None
        self._last_token = 0.0

    @property
    def elapsed(self) -> float:
        return time.monotonic() - self._started

    @property
    def remaining(self) -> float:
        return max(0.001, self.limit - self.elapsed)

    @property
    def ttft_us(self) -> int:
        """0: there is no token yet."""
        return int((self._first_token - self._started) * 1e6) if self._first_token is not None else 0

    @property
    def first_token(self) -> float:
        """Time of the first token on the monotonic clock; now, if there is none yet."""
        return self._first_token if self._first_token is not None else time.monotonic()

    def tokens(self, choice: int, count: int) -> None:
        """Records `count` new tokens of a choice. Time without a decode node counts too."""
        now = time.monotonic()
        if self._first_token is None:
            self._first_token = now
            self._metrics.ttft.observe(now - self._started)
        elif count and choice == 0:
            self._metrics.itl.observe((now - self._last_token) / count)
        self._last_token = now


_log = get_logger()


@dataclass(frozen=True, slots=True)
class EndedRequest:
    request: str
    prompt_tokens: int
    output_tokens: int
    resumed: int
    seconds: float


class RequestLog:
    """One line per request. Requests cancelled in one iteration of the event loop share a line, so that a
    client that disconnects with hundreds of requests is handled faster."""

    def __init__(self) -> None:
        self._cancelled: list[EndedRequest] = []
        self._write_soon = CoalescedCall(self._write)

    def add(self, outcome: str, request: EndedRequest, reason: str) -> None:
        """outcome: finished, cancelled or failed. reason: of requests that did not finish."""
        if outcome == "cancelled":
            self._cancelled.append(request)
            self._write_soon()
            return
        _log.info(outcome, **_fields([request]), **({"reason": reason} if reason else {}))

    def _write(self) -> None:
        ended, self._cancelled = self._cancelled, []
        several = {"requests": len(ended)} if len(ended) > 1 else {}
        _log.info("cancelled", **_fields(ended), **several)


def _fields(ended: list[EndedRequest]) -> dict[str, object]:
    return {
        "request": " ".join(each.request for each in ended),
        "prompt_tokens": sum(each.prompt_tokens for each in ended),
        "output_tokens": sum(each.output_tokens for each in ended),
        "resumed": sum(each.resumed for each in ended),
        "seconds": round(max(each.seconds for each in ended), 3),
    }
