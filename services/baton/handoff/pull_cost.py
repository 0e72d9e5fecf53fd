"""The cost of pulls, fitted to completed ones. Pure."""

from __future__ import annotations

from dataclasses import dataclass

FORGET = 0.95
"""Factor by which a pull's weight falls with each later one."""


@dataclass(frozen=True, slots=True)
class PullCost:
    """Seconds: of any pull, and for each token whose pages it copies."""

    fixed: float = 0.0
    token: float = 0.0

    def seconds(self, tokens: int) -> float:
        return self.fixed + self.token * tokens


class PullMeter:
    """Fits a line through (tokens, seconds) with the smallest relative errors and non-negative
    coefficients: weighted least squares over all pulls, older ones counting less. A pull delayed by a lost
    packet has little weight, because it is long. `cost` is None before the first pull."""

    def __init__(self) -> None:
        self.cost: PullCost | None = None
        self._sums: tuple[float, ...] = (0.0,) * 5
        """Sums of u², uv, v², u and v, where u = 1 / seconds and v = tokens / seconds."""

    def add(self, tokens: int, seconds: float) -> None:
        """Adds a pull of `tokens` > 0 tokens' pages that took `seconds` > 0."""
        u, v = 1 / seconds, tokens / seconds
        new = (u * u, u * v, v * v, u, v)
        uu, uv, vv, su, sv = self._sums = tuple(
            FORGET * old + each for old, each in zip(self._sums, new, strict=True)
        )
        determinant = uu * vv - uv * uv
        if determinant > 1e-9 * uu * vv:
            fixed, token = (su * vv - sv * uv) / determinant, (sv * uu - su * uv) / determinant
            if fixed >= 0 and token >= 0:
                self.cost = PullCost(fixed, token)
                return
        # Only one coefficient: the one with the smaller squared error.
        self.cost = PullCost(token=sv / vv) if sv * sv / vv >= su * su / uu else PullCost(fixed=su / uu)
