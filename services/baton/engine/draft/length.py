"""How many drafts each row of a step carries: those that make delivered tokens a second most. Pure.

A draft is delivered if all before it in its row are right. That chance, its *survival*, is learned; the time
of a step is the measured StepCost, corrected by the times of the node's own steps. As in SmartSpec (Liu et
al., arXiv:2406.14066), the lengths are those with most expected tokens for each expected second, over the
whole batch."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from baton.step_cost import StepCost

FIRST_GUESS = 0.6
"""Chance of a draft of which nothing is known."""
GUESS_WEIGHT, KIND_WEIGHT = 3.0, 8.0
"""The guess counts as so many drafts beside those of a kind, and these beside the row's own."""
KIND_MEMORY, ROW_MEMORY = 0.99, 0.9
"""Weight of what was known after each new draft."""
PROBE_SHARE = 0.005
"""Share of the time that is spent on drafts that are not expected to pay, to notice when they would."""
TIMES_MEMORY = 512
"""Steps after which a time that was not seen again is forgotten: it may have been an accident."""
SPEED_WEIGHT, TIME_WEIGHT = 0.1, 0.05
MAX_SURPRISE = math.log(2.0)
"""A step's time says at most that the expected one was wrong by this factor."""
LEAST_CHANCE = 0.02
"""Least chance of a draft that may be taken."""
LONGEST_PAUSE = 32
"""Steps for which the drafter is not asked for a row whose drafts are not taken."""

DraftKind = tuple[int, int]
"""`Sequence.draft_kind`, and how many tokens in flight were guessed too."""


Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]


class Levels(NamedTuple):
    """The order in which drafts are worth taking."""

    gains: Floats
    """[levels]: tokens that each is expected to deliver."""
    drafts: Ints
    """[levels + 1]: drafts of so many levels together."""
    rows: Ints
    """[levels]: the row that each gives a draft; empty: each gives one to every row that has so many."""

    def lengths(self, taken: int, counts: Ints) -> Ints:
        """Drafts of each row. `counts`: how many each has."""
        if len(self.rows):
            return np.bincount(self.rows[:taken], minlength=len(counts))
        return np.minimum(counts, taken)


def levels_of(survivals: Floats, counts: Ints, by_longest: bool) -> Levels:
    """`survivals` [rows, longest]: the chances that drafts are delivered, which never rise in a row; `counts`
    [rows]: how many each row has. `by_longest`: a step takes the time of its longest row, whatever others
    have, so that they all get a draft more; otherwise one draft is taken after the other, best first."""
    there = np.arange(survivals.shape[1]) < counts[:, None]
    if by_longest:
        gains, more = np.where(there, survivals, 0.0).sum(0), there.sum(0)
        return Levels(gains, np.concatenate(([0], more.cumsum())), np.zeros(0, np.int64))
    rows, single = there.nonzero()[0], survivals[there]
    # Each comes after those before it in its row, since their chances are not lower and sorting is stable.
    order = np.argsort(-single, kind="stable")
    return Levels(single[order], np.arange(len(single) + 1), rows[order])


def best_level(levels: Levels, rows: int, room: int, seconds: Floats) -> tuple[int, float]:
    """How many levels deliver most tokens a second, and how many those are. `rows`: all rows, which deliver a
    token each in any case. `room`: drafts at most. `seconds` [levels + 1]: of a step with so many levels."""
    fit = int(np.searchsorted(levels.drafts, room, "right"))
    rates = (rows + np.concatenate(([0.0], levels.gains.cumsum())))[:fit] / seconds[:fit]
    best = int(rates.argmax())
    return best, float(rates[best])


def graph_tokens(rows: int, longest: int) -> int:
    """Tokens that a CUDA graph computes for so many rows of which the longest has `longest` drafts: see
    chunk_graphs.draft_shapes."""
    return (1 << (rows - 1).bit_length()) * 2 * (longest // 2 + 1)


@dataclass(slots=True)
class _Rate:
    """A share of drafts that were right, of those that were reached."""

    right: float = 0.0
    seen: float = 0.0

    def add(self, right: bool, memory: float) -> None:
        self.right = self.right * memory + right
        self.seen = self.seen * memory + 1


@dataclass(slots=True)
class RowDrafts:
    """What is known of one sequence's drafts."""

    taken: int = 2
    """Drafts that it had last, of those that the drafter had."""
    rate: _Rate = field(default_factory=_Rate)
    pause: int = 0
    """Steps for which the drafter was last not asked."""
    until: int = 0
    """The step in which it is asked again."""


class StepTimes:
    """The seconds of a step of decode rows, up to a factor that all share: only ratios matter.

    A step's logarithm is that of the measured cost, plus the node's speed now, plus a correction for steps of
    its size, which is learned; between sizes that were seen lately it is interpolated."""

    def __init__(self, apart: bool = False) -> None:
        """`apart`: steps with drafts run other kernels than those without, so that the time of one says
        nothing about the other. Otherwise it depends on their tokens alone."""
        self._apart = apart
        self.cost: StepCost | None = None
        """Measured at the start; None: any step takes the same until its time has been seen."""
        self._speed: float | None = None
        self._known: dict[tuple[bool, int], tuple[float, int, int]] = {}
        """(with drafts, if these are apart; size) -> correction, steps seen, the last of them."""
        self._steps = 0

    def add(self, drafted: bool, size: int, context: int, seconds: float) -> None:
        """A step without prompts has taken `seconds` > 0."""
        self._steps += 1
        plain = math.log(seconds / self._measured(size, context))
        if self._speed is None:
            self._speed = plain
        key = drafted and self._apart, _bucket(size)
        expected, seen = self._correction(drafted, size), self._known.get(key, (0.0, 0, 0))[1]
        error = max(-MAX_SURPRISE, min(MAX_SURPRISE, plain - self._speed - expected))
        weight = max(TIME_WEIGHT, 1 / (1 + seen))
        self._known[key] = expected + weight * error, seen + 1, self._steps
        self._speed += SPEED_WEIGHT * (1 - weight) * error

    def seconds(self, drafted: bool, size: int, context: int) -> float:
        return self._measured(size, context) * math.exp(self._correction(drafted, size))

    def with_drafts(self, sizes: Ints, context: int) -> Floats:
        """`seconds` of steps with drafts, of each of these ascending sizes."""
        shifts = np.maximum(0, np.frexp(sizes)[1] - 4)
        row = self.cost.row if self.cost is not None else 0.0
        factors: Floats = np.exp(self._corrections(True, 8 * shifts + (sizes >> shifts)))
        return factors * (self._measured(0, context) + row * sizes)

    def seen(self, drafted: bool, size: int) -> bool:
        """Whether the time of such a step has been seen lately."""
        known = self._known.get((drafted and self._apart, _bucket(size)))
        return known is not None and known[2] >= self._steps - TIMES_MEMORY

    def prompts(self, tokens: int) -> float:
        """What prompt tokens add to a step."""
        return self.cost.token * tokens if self.cost is not None else 0.0

    def _measured(self, size: int, context: int) -> float:
        cost = self.cost
        return cost.fixed + cost.row * size + cost.key * context + 1e-9 if cost is not None else 1.0

    def _correction(self, drafted: bool, size: int) -> float:
        return float(self._corrections(drafted, np.array([_bucket(size)]))[0])

    def _corrections(self, drafted: bool, buckets: Ints) -> Floats:
        """Interpolated between those of their sort that have been seen lately; if none has, between the
        others."""
        since = self._steps - TIMES_MEMORY
        fresh = sorted((key, found[0]) for key, found in self._known.items() if found[2] >= since)
        fresh = [each for each in fresh if each[0][0] == (drafted and self._apart)] or fresh
        if not fresh:
            return np.zeros(len(buckets))
        return np.interp(buckets, [bucket for (_, bucket), _ in fresh], [found for _, found in fresh])


def _bucket(size: int) -> int:
    """Sizes of about the same time: each up to 16, then eight between powers of two."""
    shift = max(0, size.bit_length() - 4)
    return 8 * shift + (size >> shift)


class DraftLengths:
    """Chooses the lengths of a node's drafts, and learns from what became of them."""

    def __init__(self, padding: Callable[[int, int], int] | None = None, computes: bool = False) -> None:
        """`padding(rows, longest)`: the tokens that a step with drafts computes, on a device that computes
        each row as long as the longest; None: those that it has. `computes`: see Drafter."""
        self.times = StepTimes(apart=padding is not None)
        self._padding, self._computes = padding, computes
        self._kinds: dict[tuple[DraftKind, int], _Rate] = {}
        """(kind, index in the row) -> the drafts there, if those before them were right."""
        self._purse = 0.0
        """Seconds that may be spent on drafts that are not expected to pay."""
        self._pause = 0
        """Steps for which rows were last not asked, because no row's drafts paid."""
        self.until = 0
        """The step before which no row is asked: the last were in vain."""

    def choose(
        self,
        drafts: Sequence[tuple[RowDrafts, DraftKind, int]],
        rows: int,
        room: int,
        context: int,
        prompt_tokens: int,
        step: int,
    ) -> list[int]:
        """Drafts of each row. `drafts`: the rows for which the drafter has any; of each what is known of it,
        the drafts' kind, and how many. `rows`: all decode rows; `context`: the tokens that they attend to.
        `room`: drafts of all rows, at most."""
        times, padding = self.times, self._padding
        others = times.prompts(prompt_tokens)
        plain = others + times.seconds(False, rows, context)
        self._purse = min(self._purse + PROBE_SHARE * plain, 2 * plain)
        if not drafts:
            return []
        survivals, counts = self._survivals(drafts)
        levels = levels_of(survivals, counts, padding is not None)
        sizes = rows + levels.drafts[1:]
        if padding is not None:
            sizes = np.array([padding(rows, level) for level in range(1, len(levels.drafts))], np.int64)
        seconds = np.concatenate(([plain], others + times.with_drafts(sizes, context)))
        best = 0
        if times.seen(False, rows):
            best, rate = best_level(levels, rows, room, seconds)
            if self._computes and (best or step >= self.until):  # else new rows might wait for ever
                self._pause = 0 if best else min(LONGEST_PAUSE, 2 * self._pause + 1)
                self.until = 0 if best else step + 1 + self._pause
            best += self._probes(levels, best, rate, rows, room, seconds)
        lengths: list[int] = levels.lengths(best, counts).tolist()
        most = LONGEST_PAUSE if self._computes else min(LONGEST_PAUSE, rows // 4)
        for (row, _, _), length in zip(drafts, lengths, strict=True):
            row.taken = length
            row.pause = 0 if length else min(most, 2 * row.pause + 1)
            row.until = max(step + 1 + row.pause, self.until)
        return lengths

    def _probes(self, levels: Levels, best: int, rate: float, rows: int, room: int, seconds: Floats) -> bool:
        """Whether to take a level more than pays: the first of all, since its chances may have changed, or
        one whose time was never seen. Takes what that is expected to lose from the purse."""
        if len(levels.gains) == best or (count := int(levels.drafts[best + 1])) > room:
            return False
        if best and self.times.seen(True, self._size(rows, count, best + 1)):
            return False
        loss = float(seconds[best + 1] - (rows + levels.gains[: best + 1].sum()) / rate)
        if loss > self._purse:
            return False
        self._purse -= max(0.0, loss)
        return True

    def verified(self, row: RowDrafts, kind: DraftKind, count: int, right: int) -> None:
        """The first `right` of `count` drafts were right."""
        for at in range(min(count, right + 1)):
            self._kinds.setdefault((kind, at), _Rate()).add(at < right, KIND_MEMORY)
            row.rate.add(at < right, ROW_MEMORY)

    def timed(self, rows: int, drafts: int, longest: int, context: int, seconds: float) -> None:
        """A step without prompts has taken `seconds` > 0."""
        self.times.add(drafts > 0, self._size(rows, drafts, longest), context, seconds)

    def _survivals(self, drafts: Sequence[tuple[RowDrafts, DraftKind, int]]) -> tuple[Floats, Ints]:
        """[rows, longest]: the chance of each draft that it is delivered; and of each row how many count:
        those behind the first that have a chance below LEAST_CHANCE do not."""
        rows, kinds, given = zip(*drafts, strict=True)
        counts, most = np.array(given), max(given)
        columns = {kind: at for at, kind in enumerate(dict.fromkeys(kinds))}
        known = np.array([[self._chance(kind, at) for at in range(most)] for kind in columns])
        known = known[[columns[kind] for kind in kinds]] if len(columns) > 1 else known
        right = np.array([row.rate.right for row in rows])
        seen = np.array([row.rate.seen for row in rows]) + KIND_WEIGHT
        chances = (right[:, None] + KIND_WEIGHT * known) / seen[:, None]
        survivals = chances.cumprod(1)
        likely = np.maximum((survivals >= LEAST_CHANCE).sum(1), 1)
        return survivals, np.minimum(likely, counts)

    def _chance(self, kind: DraftKind, at: int) -> float:
        known = self._kinds.get((kind, at), _Rate())
        return (known.right + GUESS_WEIGHT * FIRST_GUESS) / (known.seen + GUESS_WEIGHT)

    def _size(self, rows: int, drafts: int, longest: int) -> int:
        if not drafts or self._padding is None:
            return rows + drafts
        return self._padding(rows, longest)
