"""The time of a step as a function of what it contains. Pure; imports nothing of the engine.

The model is linear: a constant, plus a coefficient for each field of StepLoad. The coefficients are fitted to
measured steps by non-negative least squares (Lawson and Hanson, Solving Least Squares Problems, 1974, chapter
23). CostCalibration corrects them while the node works.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import astuple, dataclass, replace
from itertools import combinations
from pathlib import Path

import numpy as np


@dataclass(frozen=True, slots=True)
class StepLoad:
    """What a step contains."""

    decode_sequences: int = 0
    """Sequences that get one more token each."""
    context_tokens: int = 0
    """Positions that these attend to, summed over the sequences."""
    prefill_tokens: int = 0
    """Tokens of prompt chunks."""
    attention_pairs: int = 0
    """(query, key) pairs of the prompt chunks' attention."""


def chunk_pairs(start: int, count: int) -> int:
    """(query, key) pairs of a prompt's positions start .. start + count - 1 under a causal mask."""
    return count * start + count * (count + 1) // 2


@dataclass(frozen=True, slots=True)
class StepCost:
    """Seconds. Field names are those of node.proto and of profile files."""

    fixed: float
    """Seconds of any step."""
    row: float
    """For each decode sequence."""
    key: float
    """For each context token."""
    token: float
    """For each prefill token."""
    pair: float
    """For each attention pair."""

    def seconds(self, load: StepLoad) -> float:
        return (
            self.fixed
            + self.row * load.decode_sequences
            + self.key * load.context_tokens
            + self.token * load.prefill_tokens
            + self.pair * load.attention_pairs
        )


def read_cost(path: str | Path) -> StepCost:
    """The entry `step` of a profile (`baton bench profile`). Raises ValueError with a readable line."""
    try:
        found = json.loads(Path(path).read_text())["step"]
        cost = StepCost(**{name: float(found[name]) for name in ("fixed", "row", "key", "token", "pair")})
    except OSError as error:
        raise ValueError(f"profile {path} cannot be read: {error.strerror}") from error
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{path} is no profile of `baton bench profile`: {error!r}") from error
    if min(astuple(cost)) < 0:
        raise ValueError(f"profile {path} has a cost below 0")
    return cost


def fit(measured: Sequence[tuple[StepLoad, float]]) -> StepCost:
    """Minimizes the squared relative error. `measured`: steps and their seconds, > 0. Raises ValueError when
    it is empty."""
    if not measured:
        raise ValueError("no step has been measured")
    loads = np.array([(1, *astuple(load)) for load, _ in measured], dtype=np.float64)
    # Each equation is divided by its seconds: errors become relative.
    matrix = loads / np.array([[seconds] for _, seconds in measured])
    scale = np.maximum(np.abs(matrix).max(axis=0), 1e-300)
    best, least = np.zeros(matrix.shape[1]), np.inf
    columns = range(matrix.shape[1])
    # There are five columns only, so every set of non-zero coefficients is tried.
    for size in range(1, len(columns) + 1):
        for chosen in combinations(columns, size):
            part = (matrix / scale)[:, chosen]
            found = np.linalg.lstsq(part, np.ones(len(matrix)), rcond=None)[0]
            error = float(((part @ found - 1.0) ** 2).sum())
            if (found >= 0).all() and error < least - 1e-12:
                least, best = error, np.zeros(matrix.shape[1])
                best[list(chosen)] = found
    return StepCost(*(float(each) for each in best / scale))


CALIBRATION_WEIGHT = 0.1
"""Least weight of one step. The first steps weigh more, so that a wrong start value is soon corrected."""
MAX_SURPRISE = 2.0
"""Measured over expected time is clipped to this, and to its inverse: one stalled step says little."""
MAX_FACTOR = 32.0
"""A factor stays between this and its inverse."""

LEAST_OF_ROW = 1 / 4
LEAST_OF_FIXED = 1 / 4096
"""A prompt token costs at least these parts of a decode row and of the constant. Its arithmetic is that of a
row, so that it costs a third to a half as much where arithmetic is what counts."""


class CostCalibration:
    """Corrects a measured StepCost while the node works.

    Two factors scale it: one the constant and the decode coefficients, one the prefill coefficients. Each
    step multiplies them by a power of its measured over its expected time; the exponent is the factor's share
    of the expected time: a gradient step on the squared logarithmic error, in the factors' logarithms.
    """

    def __init__(self, measured: StepCost) -> None:
        # A prompt token is never free, though a fit of disturbed times may say so, and no factor corrects 0.
        least = max(LEAST_OF_ROW * measured.row, LEAST_OF_FIXED * measured.fixed)
        self._measured = replace(measured, token=max(measured.token, least))
        self._decode = self._prefill = 0.0
        """Logarithms of the factors."""
        self._steps = 0

    @property
    def cost(self) -> StepCost:
        """The calibrated cost: what the next steps are expected to take."""
        measured, decode, prefill = self._measured, math.exp(self._decode), math.exp(self._prefill)
        return StepCost(
            fixed=decode * measured.fixed,
            row=decode * measured.row,
            key=decode * measured.key,
            token=prefill * measured.token,
            pair=prefill * measured.pair,
        )

    def add(self, load: StepLoad, seconds: float) -> None:
        """Updates the factors with a step that took `seconds` > 0."""
        cost = self.cost
        expected = cost.seconds(load)
        if expected <= 0:
            return
        share = (cost.token * load.prefill_tokens + cost.pair * load.attention_pairs) / expected
        self._steps += 1
        weight = max(CALIBRATION_WEIGHT, 1 / (1 + self._steps))
        change = weight * _clip(math.log(seconds / expected), MAX_SURPRISE)
        self._decode = _clip(self._decode + (1 - share) * change, MAX_FACTOR)
        self._prefill = _clip(self._prefill + share * change, MAX_FACTOR)


def _clip(logarithm: float, limit: float) -> float:
    return max(-math.log(limit), min(math.log(limit), logarithm))
