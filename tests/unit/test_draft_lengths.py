"""A step takes the drafts that deliver most tokens a second, by what is known of chances and times."""

from __future__ import annotations

import itertools
import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from baton.engine.draft.length import DraftLengths, RowDrafts, StepTimes, best_level, graph_tokens, levels_of
from baton.step_cost import StepCost

KIND = (0, 0)


@settings(deadline=None, max_examples=200)
@given(
    chances=st.lists(st.lists(st.floats(0.01, 0.99), min_size=1, max_size=3), max_size=4),
    more=st.integers(0, 4),
    room=st.integers(0, 12),
    base=st.floats(0.1, 10),
    steps=st.lists(st.floats(0, 2), min_size=16, max_size=16),
    by_longest=st.booleans(),
)
def test_no_other_lengths_deliver_more(chances, more, room, base, steps, by_longest):
    survivals = [list(itertools.accumulate(row, lambda a, b: a * b)) for row in chances]
    rows = len(survivals) + more or 1
    times = [base, *itertools.accumulate(steps, initial=base + steps[0])]

    def rate(lengths):
        tokens = rows + sum(sum(row[:n]) for row, n in zip(survivals, lengths, strict=True))
        return tokens / times[max(lengths, default=0) if by_longest else sum(lengths)]

    counts = np.array([len(row) for row in survivals], np.int64)
    # Behind a row's last draft anything may be.
    padded = np.array([row + [9.0] * (3 - len(row)) for row in survivals]).reshape(-1, 3)
    levels = levels_of(padded, counts, by_longest)
    best, expected = best_level(levels, rows, room, np.array(times[: len(levels.drafts)]))
    found = levels.lengths(best, counts).tolist()
    assert sum(found) == levels.drafts[best] <= room
    every = itertools.product(*(range(len(row) + 1) for row in survivals))
    allowed = [each for each in every if sum(each) <= room]
    if by_longest:  # a row has no reason to have less than the longest
        allowed = [
            each
            for each in allowed
            if all(n == min(max(each), len(row)) for n, row in zip(each, survivals, strict=True))
        ]
    assert rate(found) == pytest.approx(expected)
    assert rate(found) >= max(map(rate, allowed)) * (1 - 1e-9)


def cost(row):
    return StepCost(fixed=1.0, row=row, key=0.0, token=row, pair=0.0)


class Node:
    """Steps of rows whose drafts are right with a chance, on a machine whose times are those of `cost`."""

    def __init__(self, cost, rows, chance, padding=None, told=None, computes=False):
        self.lengths = DraftLengths(padding, computes)
        self.lengths.times.cost = told if told is not None else cost
        self.cost, self.padding, self.rng = cost, padding, random.Random(1)
        self.rows = [RowDrafts() for _ in range(rows)]
        self.chance = chance
        self.step = 0
        self.seconds = 0.0
        self.tokens = 0
        self.drafted = 0
        self.asked = 0

    def time(self, drafts, longest):
        tokens = len(self.rows) + drafts
        if self.padding is not None and drafts:
            tokens = self.padding(len(self.rows), longest)
        return self.cost.fixed + self.cost.row * tokens

    def turn(self, fixed=None):
        self.step += 1
        asked = [row for row in self.rows if self.step >= (row.until or self.lengths.until)]
        self.asked += len(asked)
        if fixed is None:
            drafts = [(row, KIND, 7) for row in asked]
            counts = self.lengths.choose(drafts, len(self.rows), 10**6, 0, 0, self.step)
        else:
            counts = [fixed] * len(asked)
        seconds = self.time(sum(counts), max(counts, default=0))
        for row, count in zip(asked, counts, strict=True):
            right = next((i for i in range(count) if self.rng.random() >= self.chance), count)
            if count:
                self.lengths.verified(row, KIND, count, right)
            self.tokens += right
        self.lengths.timed(len(self.rows), sum(counts), max(counts, default=0), 0, seconds)
        self.tokens += len(self.rows)
        self.drafted += sum(counts)
        self.seconds += seconds

    def rate(self, steps, fixed=None):
        for _ in range(steps):
            self.turn(fixed)
        return self.tokens / self.seconds


@pytest.mark.parametrize("padding", [None, graph_tokens])
@pytest.mark.parametrize("rows", [1, 16, 128])
@pytest.mark.parametrize("chance", [0.5, 0.8])
def test_as_good_as_the_best_fixed_length(rows, chance, padding):
    fixed = max(Node(cost(0.01), rows, chance, padding).rate(60, n) for n in (0, 1, 3, 5, 7))
    assert Node(cost(0.01), rows, chance, padding).rate(1500 if rows < 64 else 400) >= 0.95 * fixed


def test_new_rows_are_not_asked_for_what_others_were_asked_in_vain():
    """Of a drafter that computes; in time they are asked again, and drafts that would pay are found."""
    node = Node(cost(0.02), 4, 0.0, computes=True)
    for step in range(1200):
        if step % 6 == 0:  # a request has 24 tokens
            node.rows[step // 6 % 4] = RowDrafts()
        if step == 200:
            node.asked = 0
        if step == 1000:
            assert 4 <= node.asked < 0.06 * 4 * 800
            node.chance, node.drafted = 0.9, 0
        node.turn()
    assert node.drafted > 1000


def test_a_new_row_does_not_wait_for_ever_for_others_that_are_asked_by_turns():
    """A row that the drafter had no guess for is asked a step later than others from then on."""
    node = Node(cost(0.02), 3, 0.0, computes=True)
    node.rate(300)
    node.rows[1].until += 1
    node.rate(40)
    new = node.rows[2] = RowDrafts()
    node.rate(40)
    assert new.until, "it has been asked"


@pytest.mark.parametrize("padding", [None, graph_tokens])
@pytest.mark.parametrize("rows", [1, 16, 128])
def test_drafts_that_are_never_right_cost_nothing(rows, padding):
    node = Node(cost(0.02), rows, 0.0, padding)
    assert node.rate(1000 if rows < 64 else 300) >= 0.98 * Node(cost(0.02), rows, 0.0, padding).rate(1, 0)
    assert node.drafted, "drafts are never tried again"


def test_drafts_come_back_when_they_are_right_again():
    node = Node(cost(0.02), 4, 0.0)
    node.rate(1000)
    node.chance, node.tokens, node.seconds = 0.95, 0, 0.0
    assert node.rate(1500) > 0.8 * Node(cost(0.02), 4, 0.95).rate(1500, 7)


@pytest.mark.parametrize("told", [cost(0.1), cost(0.001)])
def test_a_wrong_cost_is_corrected_by_the_times_of_steps(told):
    """A machine that is told to be too slow for drafts, and one that is told to have them for nothing."""
    truth = cost(0.02) if told.row == 0.1 else cost(0.5)
    fixed = max(Node(truth, 8, 0.7).rate(60, n) for n in (0, 1, 3, 5, 7))
    assert Node(truth, 8, 0.7, told=told).rate(1000) >= 0.9 * fixed


def test_a_size_between_those_seen_takes_a_time_between_theirs():
    """Told nothing of rows, it knows one token's time and eight tokens': two do not take that of eight."""
    times = StepTimes()
    times.cost = cost(0.0)
    times.add(False, 1, 0, 1.0)
    times.add(True, 8, 0, 1.5)
    assert 1.0 < times.seconds(True, 2, 0) < 1.1 < times.seconds(True, 5, 0) < 1.5
    seconds = times.with_drafts(np.arange(2, 9), 0)
    assert (np.diff(seconds) > 0).all() and seconds[0] == times.seconds(True, 2, 0)
    apart = StepTimes(apart=True)  # as in CUDA graphs
    apart.cost = times.cost
    apart.add(False, 1, 0, 1.0)
    assert apart.seconds(True, 4, 0) == pytest.approx(1.0)
    apart.add(True, 8, 0, 1.5)
    assert apart.seconds(True, 2, 0) == pytest.approx(1.5)
    assert apart.seconds(False, 1, 0) == pytest.approx(1.0)


def test_an_accident_is_forgotten():
    times = StepTimes()
    times.cost = cost(0.02)
    times.add(False, 1, 0, 1.02)
    times.add(True, 5, 0, 50.0)
    assert times.seconds(True, 5, 0) / times.seconds(False, 1, 0) > 1.8
    for _ in range(600):
        times.add(False, 1, 0, 1.02)
    assert times.seconds(True, 5, 0) / times.seconds(False, 1, 0) < 1.1


def test_a_slow_hour_says_nothing_about_drafts():
    """All steps take three times as long: the ratio between sizes stays."""
    times = StepTimes()
    times.cost = cost(0.02)
    for _ in range(50):
        times.add(False, 1, 0, 1.02)
        times.add(True, 5, 0, 1.1)
    before = times.seconds(True, 5, 0) / times.seconds(False, 1, 0)
    for _ in range(50):
        times.add(False, 1, 0, 3.06)
    assert times.seconds(True, 5, 0) / times.seconds(False, 1, 0) == pytest.approx(before, rel=0.35)


def test_chances_end_where_they_are_small():
    """Drafts that hardly ever come true do not count, but for a row's first; kinds and rows are apart."""
    lengths = DraftLengths()
    good, bad = RowDrafts(), RowDrafts()
    for _ in range(300):
        lengths.verified(RowDrafts(), (1, 0), 3, 0)
        lengths.verified(good, (2, 0), 3, 3)
    survivals, counts = lengths._survivals([(bad, (1, 0), 3), (good, (2, 0), 2), (bad, (2, 0), 3)])
    assert counts.tolist() == [1, 2, 3]
    assert survivals[0, 0] < 0.02 and (survivals[1, :2] > 0.95).all()
    assert lengths._survivals([(bad, (3, 0), 2)])[0][0] == pytest.approx([0.6, 0.36])  # nothing is known


def test_a_step_with_prompts_makes_drafts_cheaper():
    lengths = DraftLengths()
    lengths.times.cost = StepCost(fixed=1.0, row=1.0, key=0.0, token=0.1, pair=0.0)
    rows = [(RowDrafts(), KIND, 4)]
    for count in (0, 0, 1, 1, 2, 2):
        lengths.timed(1, count, count, 0, 2.0 + 1.0 * count)
    lengths.verified(rows[0][0], KIND, 4, 0)
    assert lengths.choose(rows, 1, 100, 0, 0, 1) == [0]
    assert sum(lengths.choose(rows, 1, 100, 0, 200, 2)) > 0


def test_rows_learn_apart():
    """A row whose drafts are wrong gets fewer than one whose drafts are right."""
    lengths = DraftLengths()
    lengths.times.cost = cost(0.1)
    good, bad = RowDrafts(), RowDrafts()
    for _ in range(10):
        lengths.verified(good, KIND, 4, 4)
        lengths.verified(bad, KIND, 4, 0)
    lengths.timed(2, 0, 0, 0, 1.2)
    found = lengths.choose([(good, KIND, 7), (bad, KIND, 7)], 2, 100, 0, 0, 1)
    assert found[0] >= 4 and found[1] <= 1
