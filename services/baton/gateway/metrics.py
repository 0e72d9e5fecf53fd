"""Metrics of the gateway's requests."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate, product

import grpc
import prometheus_client
from prometheus_client import CollectorRegistry, Counter, Gauge
from prometheus_client.core import CounterMetricFamily, HistogramMetricFamily
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

from baton.rpc.errors import BatonError

_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)
_TOKENS = tuple(4**power for power in range(1, 11))
_RATIOS = (0.25, 0.5, 0.67, 0.8, 0.9, 1.1, 1.25, 1.5, 2, 4)
WHYS = ("cost", "mode", "client", "unknown")
"""Predicted times, --split, the client's own choice; or step costs that are not known yet."""
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

    def counts(self) -> list[int]:
        """Values in each bucket, not cumulated; the last is that of values above all bounds."""
        return list(self._counts)

    @property
    def bounds(self) -> Sequence[float]:
        return self._bounds


class Tally(Collector):
    """Like prometheus_client's Counter, for what is counted with every token. For one thread."""

    def __init__(self, name: str, about: str, registry: CollectorRegistry) -> None:
        self._name = name
        self._about = about
        self.value = 0
        registry.register(self)

    def add(self, count: int) -> None:
        self.value += count

    def collect(self) -> Iterator[CounterMetricFamily]:
        yield CounterMetricFamily(self._name, self._about, value=self.value)


TARGETS = ("ttft", "itl", "both")
MAX_REASONS = 64
MAX_KEYS = 256
"""Names of API keys that metrics tell apart; further ones count as OTHER."""
LATE_SHARE = 0.01
"""A request meets its ITL target if no larger part of its tokens is late: latency.Targets."""
NOT_OURS = (
    grpc.StatusCode.INVALID_ARGUMENT,
    grpc.StatusCode.UNAUTHENTICATED,
    grpc.StatusCode.FAILED_PRECONDITION,
    grpc.StatusCode.CANCELLED,
)
"""Requests that fail like this count for no target."""


class GatewayMetrics:
    """Belongs to one gateway; nothing is registered globally."""

    def __init__(self, ttft_target: float = 1.0, itl_target: float = 0.1) -> None:
        """Targets in seconds."""
        self.ttft_target, self.itl_target = ttft_target, itl_target
        self.registry = registry = CollectorRegistry(auto_describe=False)
        self.requests = self._counter(
            "baton_gateway_requests",
            "Requests that ended, by outcome.",
            "outcome",
            ("finished", "failed", "cancelled", "refused"),
        )
        self.refusals = Counter(
            "baton_gateway_refusals",
            "Requests refused before they became one, by API and reason.",
            ["api", "reason"],
            registry=registry,
        )
        self._refusal_reasons: set[str] = set()
        self.http_requests = Counter(
            "baton_http_requests",
            "HTTP requests that were answered, by route and status.",
            ["route", "status"],
            registry=registry,
        )
        self.key_requests = Counter(
            "baton_key_requests",
            "Requests that ended, by name of the API key.",
            ["key", "outcome"],
            registry=registry,
        )
        self.key_tokens = Counter(
            "baton_key_tokens",
            "Tokens of requests that ended, by name of the API key.",
            ["key", "kind"],
            registry=registry,
        )
        self._keys: set[str] = set()
        self.seconds = Histogram(
            "baton_request_seconds",
            "From a request's start to its end, of those that finished.",
            _SECONDS,
            registry,
        )
        self.prompt_lengths = Histogram(
            "baton_request_prompt_tokens", "Prompt tokens of a request that finished.", _TOKENS, registry
        )
        self.output_lengths = Histogram(
            "baton_request_output_tokens",
            "Output tokens of a request that finished, of all choices.",
            _TOKENS,
            registry,
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
        self.images = self._counter(
            "baton_gateway_images",
            "Images of requests: decoded, still kept from an earlier request, or refused.",
            "outcome",
            ("decoded", "kept", "refused"),
        )
        self.image_tokens = Counter(
            "baton_gateway_image_tokens",
            "Prompt tokens of images, of requests that ended.",
            registry=registry,
        )
        self.probes = self._counter(
            "baton_probes", "Probes of the hand-off, by outcome.", "outcome", ("ok", "refused", "failed")
        )
        self.probe_seconds = Gauge("baton_probe_seconds", "What the last probe took.", registry=registry)
        self.role_changes = Counter(
            "baton_gateway_role_changes",
            "Changes of workers' roles that this gateway asked for (--auto-roles).",
            ["to", "outcome"],
            registry=registry,
        )
        for to, outcome in product(("prefill", "decode"), ("changed", "failed")):
            self.role_changes.labels(to, outcome)
        self.queue_seconds = Gauge(
            "baton_gateway_queue_seconds",
            "How long prompts wait, and requests for a row, at the workers together (--auto-roles).",
            ["queue"],
            registry=registry,
        )
        for queue in ("prompts", "rows"):
            self.queue_seconds.labels(queue)
        self.cached = self._counter(
            "baton_routing_cached_tokens",
            "Prompt tokens of finished requests that their node was taken to have cached (expected), that it "
            "had (found), and by how many the two differed (wrong).",
            "kind",
            ("expected", "found", "wrong"),
        )
        self.decisions = Counter(
            "baton_gateway_prompts",
            "Prompts by where they were to be computed, on a prefill node (split) or not, and why.",
            ["way", "why"],
            registry=registry,
        )
        for way, why in product(("split", "local"), WHYS):
            self.decisions.labels(way, why)
        self.output_tokens = Tally(
            "baton_gateway_output_tokens", "Output tokens, counted as decode nodes send them.", registry
        )
        self.targets = Counter(
            "baton_gateway_target_requests",
            "Requests that finished or failed by no fault of the client, and whether they met a target.",
            ["target", "met"],
            registry=registry,
        )
        for target, met in product(TARGETS, ("yes", "no")):
            self.targets.labels(target, met)
        target_seconds = Gauge(
            "baton_gateway_target_seconds", "The latency targets.", ["target"], registry=registry
        )
        target_seconds.labels("ttft").set(ttft_target)
        target_seconds.labels("itl").set(itl_target)
        self.failures = Counter(
            "baton_gateway_failures", "Requests that failed, by reason.", ["reason"], registry=registry
        )
        self._reasons: set[str] = set()
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

    def failed(self, reason: str) -> None:
        """Counts a failed request. Decode nodes may name any reason: those beyond MAX_REASONS count as
        OTHER."""
        self.failures.labels(_bounded(reason, self._reasons, MAX_REASONS)).inc()

    def image(self, outcome: str) -> None:
        """Counts an image of a request. outcome: decoded, kept or refused."""
        self.images.labels(outcome).inc()

    def refused(self, api: str, reason: str) -> None:
        """Counts a request that was refused before it became one. api: grpc or http."""
        self.requests.labels("refused").inc()
        self.refusals.labels(api, _bounded(reason, self._refusal_reasons, MAX_REASONS)).inc()

    def ended(self, outcome: str, key: str, prompt: int, output: int, seconds: float) -> None:
        """Counts a request. key: name of the API key; empty: there are no keys."""
        self.requests.labels(outcome).inc()
        if outcome == "finished":
            self.seconds.observe(seconds)
            self.prompt_lengths.observe(prompt)
            self.output_lengths.observe(output)
        if not key:
            return
        key = _bounded(key, self._keys, MAX_KEYS)
        self.key_requests.labels(key, outcome).inc()
        self.key_tokens.labels(key, "prompt").inc(prompt)
        self.key_tokens.labels(key, "output").inc(output)

    def routed(self, expected: int, found: int) -> None:
        """Counts the cached tokens of a finished request, expected and found."""
        self.cached.labels("expected").inc(expected)
        self.cached.labels("found").inc(found)
        self.cached.labels("wrong").inc(abs(expected - found))


def _bounded(value: str, known: set[str], most: int) -> str:
    """The value of a label, or OTHER if there are `most` others already."""
    if value not in known and len(known) >= most:
        return "OTHER"
    known.add(value)
    return value


class RequestTimer:
    """Starts now. limit: seconds that the request may take. clock: monotonic seconds."""

    def __init__(self, metrics: GatewayMetrics, limit: float, clock: Callable[[], float]) -> None:
        self.limit = limit
        self._metrics = metrics
        self._clock = clock
        self._started = clock()
        self._first_token: float | None = None
        self._last_token = 0.0
        self._gaps = self._late = 0
        """Tokens of the first choice after its first message, and those of them that missed the target."""
        self._phase = ("admit", self._started)
        self.phases: dict[str, float] = {}
        """Seconds of each phase before the first decode node gets the request."""

    def begin_phase(self, name: str) -> None:
        """The phase before ends. Empty: the phases that the gateway measures are over."""
        now = self._clock()
        before, since = self._phase
        if before:
            self.phases[before] = self.phases.get(before, 0.0) + now - since
        self._phase = name, now

    @property
    def elapsed(self) -> float:
        return self._clock() - self._started

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
        return self._first_token if self._first_token is not None else self._clock()

    def tokens(self, choice: int, count: int) -> None:
        """Records `count` new tokens of a choice. Time without a decode node counts too."""
        now = self._clock()
        metrics = self._metrics
        metrics.output_tokens.add(count)
        if self._first_token is None:
            self._first_token = now
            metrics.ttft.observe(now - self._started)
        elif count and choice == 0:
            gap = (now - self._last_token) / count
            metrics.itl.observe(gap)
            self._gaps += count
            if gap > metrics.itl_target:
                self._late += count
        self._last_token = now

    def ended(self, outcome: str, error: BatonError | None) -> None:
        """The request has ended: counts whether it met its targets."""
        if error is not None and error.code in NOT_OURS:
            return
        finished, first = outcome == "finished", self._first_token
        in_time = first - self._started <= self._metrics.ttft_target if first is not None else finished
        steady = self._late <= LATE_SHARE * self._gaps
        for target, met in zip(TARGETS, (in_time, steady, finished and in_time and steady), strict=True):
            self._metrics.targets.labels(target, "yes" if met else "no").inc()
