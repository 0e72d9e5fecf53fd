"""Latencies of a request as its client measures them, and the targets that they are to meet."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

PERCENTILES = (50, 90, 99)


@dataclass(slots=True)
class RequestTimes:
    """Times are seconds after the start of the run, by the client's clock."""

    at: float
    """When it was to be sent."""
    sent: float
    arrivals: list[tuple[float, int]] = field(default_factory=list)
    """When a message with new tokens came, and how many it carried."""
    end: float = 0.0
    """When its terminal event came."""
    prompt_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    pulled_pages: int = 0
    retractions: int = 0
    transport: str = ""
    """How its pages were pulled; empty: none were."""
    error: str = ""
    """The reason of its failure, an upper-case word; empty: it finished."""
    message: str = ""

    @property
    def ttft(self) -> float:
        """Seconds from sending to the first token."""
        return self.arrivals[0][0] - self.sent

    @property
    def e2e(self) -> float:
        return self.end - self.sent

    @property
    def tpot(self) -> float | None:
        return tpot(self.arrivals)

    @property
    def itl(self) -> list[float]:
        return itl(self.arrivals)


def tpot(arrivals: Sequence[tuple[float, int]]) -> float | None:
    """Mean seconds per output token, the first excluded; None where there is no second one."""
    tokens = sum(count for _, count in arrivals)
    return (arrivals[-1][0] - arrivals[0][0]) / (tokens - 1) if tokens > 1 else None


def itl(arrivals: Sequence[tuple[float, int]]) -> list[float]:
    """Seconds between tokens, one value a token from the second message on: the pause before a message,
    divided evenly over its tokens, as SGLang's bench_serving counts. Tokens that come with the first one have
    none."""
    gaps: list[float] = []
    for (before, _), (now, count) in pairwise(arrivals):
        gaps += [(now - before) / count] * count
    return gaps


def pauses(arrivals: Sequence[tuple[float, int]]) -> list[float]:
    """Seconds between messages, however many tokens each carried."""
    return [now - before for (before, _), (now, _) in pairwise(arrivals)]


@dataclass(frozen=True, slots=True)
class Targets:
    """In milliseconds; None: anything will do."""

    ttft_ms: float | None = None
    itl_ms: float | None = None

    def met(self, record: RequestTimes) -> bool:
        """Whether the request finished, its first token came in time, and so did 99 % of its other tokens."""
        if record.error or not record.arrivals:
            return False
        if self.ttft_ms is not None and record.ttft * 1e3 > self.ttft_ms:
            return False
        gaps = record.itl
        if self.itl_ms is None or not gaps:
            return True
        import numpy as np

        return float(np.percentile(gaps, 99)) * 1e3 <= self.itl_ms


def spread(seconds: Iterable[float | None]) -> dict[str, float | None]:
    """Mean and percentiles (linear between ranks) in milliseconds; None without values."""
    import numpy as np  # here: commands that measure nothing start sooner without it

    values = np.array([value for value in seconds if value is not None]) * 1e3
    if not values.size:
        return {"mean": None, **{f"p{p}": None for p in PERCENTILES}}
    return {
        "mean": float(values.mean()),
        **{
            f"p{p}": float(value)
            for p, value in zip(PERCENTILES, np.percentile(values, PERCENTILES), strict=True)
        },
    }
