"""A node's step cost, kept true while it works. Pure.

Two factors stretch the measured coefficients: one what any step and its decode rows take, one what prompt
tokens take. Each step moves them by its measured over its expected time, each factor by its share of that
time: a step that is nearly all prompt says nearly nothing about rows. It is the gradient step of the squared
logarithmic error, taken in the factors' logarithms.
"""

from __future__ import annotations

import math

from baton.engine.cost import StepCost, StepLoad

WEIGHT = 0.1
"""Of one step. The first ones weigh more: what was measured wrongly at the start is soon forgotten."""
SURPRISE = 2.0
"""A step counts as so many times longer or shorter than expected at most: a machine that was asleep for a
second says nothing of its pace."""
RANGE = 32.0
"""The most that a factor may come to, or its inverse."""


class Pace:
    """`cost` is what is expected of the next steps."""

    def __init__(self, measured: StepCost) -> None:
        self._measured = measured
        self._rows = self._prompt = 0.0
        """Logarithms of the factors."""
        self._steps = 0

    @property
    def cost(self) -> StepCost:
        measured, rows, prompt = self._measured, math.exp(self._rows), math.exp(self._prompt)
        return StepCost(
            fixed=rows * measured.fixed,
            row=rows * measured.row,
            key=rows * measured.key,
            token=prompt * measured.token,
            pair=prompt * measured.pair,
        )

    def add(self, load: StepLoad, seconds: float) -> None:
        """A step of this load has taken so long, > 0."""
        cost = self.cost
        expected = cost.seconds(load)
        if expected <= 0:
            return
        share = (cost.token * load.tokens + cost.pair * load.pairs) / expected
        self._steps += 1
        weight = max(WEIGHT, 1 / (1 + self._steps))
        change = weight * _clip(math.log(seconds / expected), SURPRISE)
        self._rows = _clip(self._rows + (1 - share) * change, RANGE)
        self._prompt = _clip(self._prompt + share * change, RANGE)


def _clip(logarithm: float, most: float) -> float:
    return max(-math.log(most), min(math.log(most), logarithm))
