"""What a step costs, as a function of what is in it. Pure.

A step's time is taken to be linear in five figures: 1, decode rows, the tokens that these attend to, prompt
tokens, and the (query, key) pairs that prompt chunks attend to. The coefficients come from measured steps, by
least squares without negative ones (Lawson and Hanson, Solving Least Squares Problems, 1974, chapter 23).
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import astuple, dataclass
from itertools import combinations
from pathlib import Path

import numpy as np

from baton.engine.plan import PlanRow


@dataclass(frozen=True, slots=True)
class StepLoad:
    """What is in a step."""

    rows: int = 0
    """Decode rows."""
    keys: int = 0
    """Positions that they attend to, together."""
    tokens: int = 0
    """Prompt tokens."""
    pairs: int = 0
    """(query, key) pairs that these attend to."""

    @classmethod
    def of(cls, rows: Iterable[PlanRow]) -> StepLoad:
        decode = keys = tokens = pairs = 0
        for row in rows:
            if row.tokens is None:
                decode += 1
                keys += row.start + 1
            else:
                tokens += row.count
                pairs += chunk_pairs(row.start, row.count)
        return cls(decode, keys, tokens, pairs)


def chunk_pairs(start: int, count: int) -> int:
    """(query, key) pairs of a prompt's positions start .. start + count - 1 under a causal mask."""
    return count * start + count * (count + 1) // 2


@dataclass(frozen=True, slots=True)
class StepCost:
    """Seconds: of any step, and for one more of each figure of a StepLoad."""

    fixed: float
    row: float
    key: float
    token: float
    pair: float

    def seconds(self, load: StepLoad) -> float:
        return (
            self.fixed
            + self.row * load.rows
            + self.key * load.keys
            + self.token * load.tokens
            + self.pair * load.pairs
        )


def read_cost(path: str | Path) -> StepCost:
    """The `step` of a profile (`baton bench profile`). Raises ValueError with one line for people."""
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
    """The cost whose relative errors are smallest. `measured`: steps and their seconds, > 0.

    Raises ValueError when there is nothing to fit."""
    if not measured:
        raise ValueError("no step has been measured")
    loads = np.array([(1, *astuple(load)) for load, _ in measured], dtype=np.float64)
    # Divided by the seconds, a short step counts as much as a long one.
    matrix = loads / np.array([[seconds] for _, seconds in measured])
    scale = np.maximum(np.abs(matrix).max(axis=0), 1e-300)
    best, least = np.zeros(matrix.shape[1]), np.inf
    columns = range(matrix.shape[1])
    # With five columns all sets of those that are not zero can be tried.
    for size in range(1, len(columns) + 1):
        for chosen in combinations(columns, size):
            part = (matrix / scale)[:, chosen]
            found = np.linalg.lstsq(part, np.ones(len(matrix)), rcond=None)[0]
            error = float(((part @ found - 1.0) ** 2).sum())
            if (found >= 0).all() and error < least - 1e-12:
                least, best = error, np.zeros(matrix.shape[1])
                best[list(chosen)] = found
    return StepCost(*(float(each) for each in best / scale))
