"""How long a step may take before it counts as stuck, by what steps took before. Pure."""

from __future__ import annotations

FACTOR = 4.0
"""Times the longest that a step should take: others use the machine too, and contexts grow."""
FIRST_SECONDS = 60.0
"""The first step of all: nothing is known of it, and kernels may be compiled in it."""
WEIGHT = 0.05
"""Of a new step in the average of its size."""


class Patience:
    """Remembers steps by size (powers of two), and judges others by them: a step takes no longer than one of
    more tokens, nor than so many smaller ones as have its tokens together."""

    def __init__(self) -> None:
        self._seconds: dict[int, float] = {}
        """Fewest tokens of a size -> moving average."""

    def took(self, tokens: int, seconds: float) -> None:
        """A step of so many tokens, at least 1, has ended."""
        size = 1 << (tokens.bit_length() - 1)
        known = self._seconds.get(size, seconds)
        self._seconds[size] = known + WEIGHT * (seconds - known)

    def limit(self, tokens: int, floor: float) -> float:
        """Seconds, at least `floor`, after which a step of so many tokens is stuck. May be asked from another
        thread than the one that calls `took`."""
        if tokens <= 0:
            return floor
        bounds = [seconds * max(1.0, tokens / size) for size, seconds in list(self._seconds.items())]
        return max(floor, FACTOR * min(bounds) if bounds else FIRST_SECONDS)
