"""Statistics of a run of requests. Latencies in milliseconds, rates per second."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from baton.slo import PERCENTILES, RequestTimes, Targets, pauses, spread

DISTRIBUTION = (*(each / 2 for each in range(200)), 99.9)
"""Percentiles of a plotted distribution; up to 99.9, so that one outlier does not compress the plot."""
ITL_COUNTING = (
    "the pause before a message divided evenly over the tokens it carries, one value a token from the second "
    "message on, as SGLang's bench_serving; pause_ms counts each message once"
)


def too_few(requests: int) -> list[int]:
    """The percentiles beyond which fewer than one of this many requests is expected."""
    return [each for each in PERCENTILES if requests * (100 - each) < 100]


def distribution(seconds: Iterable[float]) -> list[float]:
    """The values at the percentiles of DISTRIBUTION, in milliseconds; empty without values."""
    values = np.array(list(seconds)) * 1e3
    found: list[float] = np.percentile(values, DISTRIBUTION).tolist() if values.size else []
    return found


def in_flight(records: Sequence[RequestTimes], seconds: float) -> dict[str, float]:
    """Running requests: mean over `seconds`, and maximum."""
    changes = sorted([(r.sent, 1) for r in records] + [(r.end, -1) for r in records])
    running = most = 0
    for _, change in changes:
        running += change
        most = max(most, running)
    return {"mean": sum(r.end - r.sent for r in records) / seconds if seconds else 0.0, "max": most}


def summarize(
    records: Sequence[RequestTimes], targets: Targets | None = None, arriving: float = 0.0
) -> dict[str, Any]:
    """All results of a run. Latencies are those of finished requests. Rates are over the time from the start
    to the last answer, or over `arriving`, the seconds in which requests arrive, if that is longer.
    `goodput_per_second` is None without targets. `first_pause_ms` is from the first message with tokens to
    the second; between split nodes it contains the hand-off."""
    done = [record for record in records if not record.error]
    seconds = max([arriving, *(record.end for record in records)])

    def rate(count: float) -> float:
        return count / seconds if seconds else 0.0

    limits = targets or Targets()
    limited = limits.ttft_ms is not None or limits.itl_ms is not None
    ttft = [record.ttft for record in done if record.arrivals]
    itl = [gap for record in done for gap in record.itl]
    output = sum(record.output_tokens for record in done)
    prompt = sum(record.prompt_tokens for record in done)
    return {
        "seconds": seconds,
        "requests": len(records),
        "finished": len(done),
        "failures": dict(Counter(record.error for record in records if record.error)),
        "requests_per_second": rate(len(done)),
        "output_tokens_per_second": rate(output),
        "prompt_tokens_per_second": rate(prompt),
        "goodput_per_second": rate(sum(map(limits.met, done))) if limited else None,
        "ttft_ms": spread(ttft),
        "tpot_ms": spread(record.tpot for record in done),
        "itl_ms": spread(itl),
        "first_pause_ms": spread(gap for record in done for gap in pauses(record.arrivals)[:1]),
        "pause_ms": spread(gap for record in done for gap in pauses(record.arrivals)),
        "e2e_ms": spread(record.e2e for record in done),
        "in_flight": in_flight(records, seconds),
        "lateness_ms": spread(max(0.0, record.sent - record.at) for record in records),
        "prompt_tokens": prompt,
        "output_tokens": output,
        "cached_tokens": sum(record.cached_tokens for record in done),
        "pulled_pages": sum(record.pulled_pages for record in done),
        "retractions": sum(record.retractions for record in done),
        "transports": dict(Counter(record.transport or "none" for record in done)),
        "ttft_distribution_ms": distribution(ttft),
        "itl_distribution_ms": distribution(itl),
    }
