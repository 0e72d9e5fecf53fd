"""One request's times, as the gateway measures them."""

from __future__ import annotations

import time

from baton.gateway.metrics import GatewayMetrics


class Timing:
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
        """When it came, on the monotonic clock; now, where there is none yet."""
        return self._first_token if self._first_token is not None else time.monotonic()

    def tokens(self, choice: int, count: int) -> None:
        """So many tokens of a choice have come. The time without a decode node counts as any other."""
        now = time.monotonic()
        if self._first_token is None:
            self._first_token = now
            self._metrics.ttft.observe(now - self._started)
        elif count and choice == 0:
            self._metrics.itl.observe((now - self._last_token) / count)
        self._last_token = now
