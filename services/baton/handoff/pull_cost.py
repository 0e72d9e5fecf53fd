"""What pulling pages takes, from the pulls that have ended. Pure."""

from __future__ import annotations

from dataclasses import dataclass

FORGET = 0.95
"""A pull counts so much less with each one after it."""


@dataclass(frozen=True, slots=True)
class PullCost:
    """Seconds: of any pull, and for each token whose pages it copies."""

    fixed: float = 0.0
    token: float = 0.0

    def seconds(self, tokens: int) -> float:
        return self.fixed + self.token * tokens


class PullMeter:
    """The line through (tokens, seconds) whose relative errors are smallest, with neither coefficient below
    0: weighted least squares over all pulls, older ones counting less. One that a lost packet held up weighs
    next to nothing, being long. `cost` is None until there was one."""

    def __init__(self) -> None:
        self.cost: PullCost | None = None
        self._sums: tuple[float, ...] = (0.0,) * 5
        """Of u², uv, v², u and v, where u = 1 / seconds and v = tokens / seconds."""

    def add(self, tokens: int, seconds: float) -> None:
        """A pull of so many tokens' pages, > 0, has taken so long, > 0."""
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
        # One of the two alone; what its errors leave is the count less this.
        self.cost = PullCost(token=sv / vv) if sv * sv / vv >= su * su / uu else PullCost(fixed=su / uu)
