"""Figures of the last minutes: a ring of samples of the gateway's own metrics. Pure; the clock is passed in.

A sample holds counters as /metrics shows them, so rates and quantiles are those that Prometheus would compute
from two scrapes at the same moments.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from prometheus_client import Counter

from baton.gateway.metrics import GatewayMetrics

SAMPLE_SECONDS = 1.0
KEPT_SECONDS = 300.0
ROLLING_SECONDS = 10.0
"""Each point of a chart is about this time before it."""
OUTCOMES = ("finished", "failed", "cancelled")
QUANTILES = (0.5, 0.9, 0.99)


@dataclass(frozen=True, slots=True)
class MetricsSample:
    at: float
    """By the monotonic clock."""
    outcomes: tuple[float, ...]
    """Requests that ended, in the order of OUTCOMES."""
    met: float
    """Requests that met both targets, and those that did not."""
    missed: float
    output_tokens: float
    ttft: tuple[int, ...]
    """Histogram.counts"""
    itl: tuple[int, ...]
    running: int


@dataclass(frozen=True, slots=True)
class Figures:
    """Figures of the time between two samples. None: there was nothing to measure."""

    seconds: float
    requests: float
    """Requests that ended, per second."""
    output_tokens: float
    """Per second."""
    ttft: tuple[float | None, ...]
    """Seconds, for each of QUANTILES."""
    itl: tuple[float | None, ...]
    goodput: float
    """Requests per second that met both targets."""
    good: float | None
    """Share of requests that met both targets, of those that count."""


class Window:
    def __init__(self, metrics: GatewayMetrics) -> None:
        self._metrics = metrics
        self._samples: deque[MetricsSample] = deque(maxlen=int(KEPT_SECONDS / SAMPLE_SECONDS) + 1)

    def __len__(self) -> int:
        return len(self._samples)

    def add(self, now: float, running: int) -> None:
        """Takes a sample. running: requests that run now."""
        metrics = self._metrics
        ended, targets = values(metrics.requests), values(metrics.targets)
        self._samples.append(
            MetricsSample(
                now,
                tuple(ended[(outcome,)] for outcome in OUTCOMES),
                targets["both", "yes"],
                targets["both", "no"],
                metrics.output_tokens.value,
                tuple(metrics.ttft.counts()),
                tuple(metrics.itl.counts()),
                running,
            )
        )

    def running(self, index: int) -> int:
        return self._samples[index].running

    def figures(self, seconds: float, index: int = -1) -> Figures | None:
        """Figures of about so many seconds before the sample at `index`; None while there are not two
        samples."""
        end = index % len(self._samples) if self._samples else 0
        begin = max(0, end - round(seconds / SAMPLE_SECONDS))
        if begin == end:
            return None
        return self._between(self._samples[begin], self._samples[end])

    def _between(self, before: MetricsSample, after: MetricsSample) -> Figures:
        seconds = max(1e-9, after.at - before.at)
        met, missed = after.met - before.met, after.missed - before.missed
        return Figures(
            seconds,
            (sum(after.outcomes) - sum(before.outcomes)) / seconds,
            (after.output_tokens - before.output_tokens) / seconds,
            self._quantiles(self._metrics.ttft.bounds, before.ttft, after.ttft),
            self._quantiles(self._metrics.itl.bounds, before.itl, after.itl),
            met / seconds,
            met / (met + missed) if met + missed else None,
        )

    @staticmethod
    def _quantiles(
        bounds: Sequence[float], before: tuple[int, ...], after: tuple[int, ...]
    ) -> tuple[float | None, ...]:
        counts = [new - old for new, old in zip(after, before, strict=True)]
        return tuple(quantile(bounds, counts, share) for share in QUANTILES)


def quantile(bounds: Sequence[float], counts: Sequence[int], share: float) -> float | None:
    """What Prometheus' `histogram_quantile` gives: linear inside the bucket, the highest bound for values
    above all. counts: one more than bounds, not cumulated. None without values."""
    total = sum(counts)
    if not total:
        return None
    rank, below = share * total, 0
    for number, bound in enumerate(bounds):
        if counts[number] and below + counts[number] >= rank:
            start = bounds[number - 1] if number else 0.0
            return start + (bound - start) * (rank - below) / counts[number]
        below += counts[number]
    return bounds[-1]


def values(counter: Counter) -> dict[tuple[str, ...], float]:
    """Values of a counter by its labels."""
    return {
        tuple(sample.labels.values()): sample.value
        for family in counter.collect()
        for sample in family.samples
        if sample.name.endswith("_total")
    }
