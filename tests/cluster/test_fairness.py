"""Short requests beside prompts far longer than a step. Bounds are those of the design, plus what a busy
machine adds: benchmarks/fairness.py measures."""

from __future__ import annotations

import asyncio

import pytest
from fairness import full_step, make_deployment, measure

pytestmark = [pytest.mark.alone, pytest.mark.times]

SECONDS = 5.0
SLACK_SECONDS = 0.1
"""Of the processes around the steps: a machine with other work on it."""


@pytest.fixture(scope="module")
def gateways(tmp_path_factory, deployments):
    deployment, split, local = make_deployment(tmp_path_factory.mktemp("fairness"))
    with deployment:
        deployments.append(deployment)
        yield {"split": split, "aggregated": local}


@pytest.mark.parametrize("name", ["split", "aggregated"])
def test_long_prompts_do_not_hold_up_short_requests(gateways, name):
    outcome = asyncio.run(measure(gateways[name].address, SECONDS))
    step, alone, beside = full_step(), outcome.alone, outcome.beside
    print(f"alone {alone.milliseconds()}, beside {beside.milliseconds()} ms; a step {1e3 * step:.0f} ms")
    # The step under way, then one that has room for a short prompt whatever long ones there are.
    assert beside.ttft_p50 < 2 * alone.ttft_p50 + 2 * step + SLACK_SECONDS
    assert beside.ttft_p50 < outcome.long_seconds / 4
    if name == "split":
        # Tokens come from a node that computes no prompts.
        assert beside.itl_p50 < 3 * alone.itl_p50 + 0.005
    else:
        # A step holds one token budget, however long the prompts.
        assert beside.itl_p50 < 2 * alone.itl_p50 + step + SLACK_SECONDS / 2
