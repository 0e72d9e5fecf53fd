"""The split-or-local decision beside both pure policies, in virtual time (two_nodes.py): without noise.

benchmarks/cost_model.py is the same with real processes and real time.
"""

from __future__ import annotations

from random import Random

import numpy as np
import pytest
from two_nodes import HOP, Job, World

from baton.handoff.pull_cost import PullCost
from baton.step_cost import StepCost

COST = StepCost(fixed=4e-3, row=5e-5, key=3e-8, token=2e-5, pair=1.5e-9)
PULL = PullCost(fixed=1e-3, token=2e-7)
SHORT, LONG = ((16, 128), (4, 12)), ((2000, 3500), (8, 24))
CHAT = ((16, 256), (32, 128))
REQUESTS = 400


def latencies(mode: str, rate: float, kinds, hop: float = HOP) -> tuple[np.ndarray, float]:
    draw, at, jobs = Random(1), 0.0, []
    for _ in range(REQUESTS):
        at += draw.expovariate(rate)
        prompt, output = draw.choice(kinds)
        jobs.append(Job(at, draw.randint(*prompt), draw.randint(*output)))
    world = World(mode, COST, PULL, hop)
    return np.array(world.run(jobs)), world.handed_off / REQUESTS


@pytest.mark.parametrize(
    ("rate", "kinds", "least_gain"),
    [
        (36, [SHORT], 0.0),
        (100, [SHORT], 0.0),
        (8, [LONG], 0.05),
        (20, [SHORT, SHORT, SHORT, LONG], 0.1),
        (40, [CHAT], 0.0),
    ],
    ids=["short", "short and many", "long", "mixed", "long outputs"],
)
def test_auto_is_as_good_as_the_better_of_the_two(rate, kinds, least_gain):
    """And better, where each of them leaves a node idle while the other one has fallen behind."""
    auto, handed_off = latencies("auto", rate, kinds)
    others = [latencies(mode, rate, kinds)[0] for mode in ("always", "never")]
    mean = min(each.mean() for each in others)
    assert auto.mean() <= (1.05 - least_gain) * mean, (auto.mean() / mean, handed_off)
    late = min(np.percentile(each, 99) for each in others)
    assert np.percentile(auto, 99) <= 1.1 * late, (np.percentile(auto, 99) / late, handed_off)


@pytest.mark.parametrize("rate", [36, 100])
def test_what_the_reckoning_leaves_out_is_learned(rate):
    """Messages take as long as a step does, which nobody told the gateway."""
    auto = latencies("auto", rate, [SHORT], 5e-3)[0]
    others = [latencies(mode, rate, [SHORT], 5e-3)[0] for mode in ("always", "never")]
    assert auto.mean() <= 1.02 * min(each.mean() for each in others)
    assert np.percentile(auto, 99) <= 1.1 * min(np.percentile(each, 99) for each in others)


def test_neither_pure_policy_is_the_better_one_everywhere():
    short, mixed = (36, [SHORT]), (20, [SHORT, SHORT, SHORT, LONG])
    assert latencies("never", *short)[0].mean() < latencies("always", *short)[0].mean()
    assert latencies("always", *mixed)[0].mean() < latencies("never", *mixed)[0].mean()
