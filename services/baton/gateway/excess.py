"""What a reckoning leaves out, learned from what came of it. Pure."""

from __future__ import annotations

import math

WEIGHT = 1 / 16
"""Of the newest."""
HALF_LIFE = 30.0
"""Seconds. What was learned in a bad moment would else keep a way from ever being taken again."""


class Excess:
    """How much longer than reckoned something has taken lately: messages between processes, threads that wake
    up, the rest of a step. A moving mean, which fades while nothing is learned."""

    def __init__(self) -> None:
        self._mean = 0.0
        self._at = 0.0

    def seconds(self, now: float) -> float:
        """Below 0: less long."""
        return self._mean * math.exp2(-max(0.0, now - self._at) / HALF_LIFE)

    def add(self, now: float, seconds: float, reckoned: float) -> None:
        """It has taken so many seconds. One that took more than twice what was reckoned counts as twice:
        it has met with something else."""
        difference = min(seconds - reckoned, reckoned)
        self._mean = (1 - WEIGHT) * self.seconds(now) + WEIGHT * difference
        self._at = now
