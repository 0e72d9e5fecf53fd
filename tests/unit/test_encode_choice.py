"""Where images are encoded, by measured times."""

from __future__ import annotations

import random
from types import SimpleNamespace

import torch

from baton.handoff.pull_cost import PullCost, PullMeter
from baton.worker.images.choice import SIDES, EncodeChoice, measure_encoding


def meter(token, fixed=0.0):
    found = PullMeter()
    for tokens in (10, 100, 1000):
        found.add(tokens, fixed + token * tokens)
    return found


def test_the_sooner_of_two_measured_speeds_is_chosen_until_it_is_not_any_more():
    draw = random.Random(1)
    choice = EncodeChoice(meter(2e-3))
    there, changes, before = meter(1e-3), [], False
    for number in range(300):
        if number == 150:
            slow = 3e-3
        elif not number:
            slow = 1e-3
        tokens = draw.randrange(10, 1000)
        here = choice.in_place(tokens, 0, there.cost)
        if here != before:
            changes.append(number)
        before = here
        (choice.local if here else there).add(
            tokens, (2e-3 if here else slow) * tokens * draw.uniform(0.95, 1.05)
        )
        if not here:
            choice.pulls.add(tokens, 1e-4 * tokens)
    assert len(changes) == 1 and 150 < changes[0] < 220, changes


def test_equal_speeds_do_not_make_the_choice_go_back_and_forth():
    draw = random.Random(2)
    choice, there, changes, before = EncodeChoice(meter(1e-3)), meter(1e-3), 0, False
    for _ in range(1000):
        tokens = draw.randrange(10, 1000)
        here = choice.in_place(tokens, 0, there.cost)
        changes, before = changes + (here != before), here
        (choice.local if here else there).add(tokens, 1e-3 * tokens * draw.uniform(0.9, 1.1))
    assert changes <= 2


def test_what_waits_on_either_side_counts():
    choice, cost = EncodeChoice(meter(1e-3)), PullCost(token=1e-3)
    assert choice.in_place(100, 500, cost)
    choice.queued = 2000
    assert not choice.in_place(100, 500, cost)
    assert choice.in_place(100, 5000, cost)
    choice.pulls.add(100, 10.0)
    assert choice.in_place(100, 0, cost)


def test_without_measured_times_an_encode_node_is_asked():
    assert not EncodeChoice(PullMeter()).in_place(10, 10**6, PullCost(token=1.0))
    assert not EncodeChoice(meter(1e-9)).in_place(10, 10**6, None)


def test_a_tower_is_measured_at_several_sizes():
    sizes = []
    tower = SimpleNamespace(patch=2, merge=2, encode=lambda images: sizes.append(tuple(images[0].shape)))
    found = measure_encoding(tower, torch.device("cpu"))
    assert sizes == [(4 * side, 4 * side, 3) for side in SIDES for _ in range(2)] and found.cost is not None
