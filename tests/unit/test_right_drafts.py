"""Which drafts are right is decided on the device as a loop on the host would decide it."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from baton.engine.device_slots import DeviceSlots
from baton.engine.launched_step import Chains, LaunchedStep, PendingSampling
from baton.engine.plan import PlanRow, SlotInit
from baton.engine.sampler import Sampler
from baton.engine.sampler_ops import position_keys, row_keys, seed_keys
from baton.engine.sampling_params import SamplingParams
from baton.engine.step_sampling import StepSampling

CPU = torch.device("cpu")


def test_generator_states_of_positions_on_the_device():
    seeds = np.array([0, 1, 2**63, 2**64 - 1, 12345678901234567890], np.uint64)
    positions = np.array([0, 1, 77, 2**31 - 1, 4096], np.uint64)
    there = position_keys(torch.from_numpy(seed_keys(seeds)), torch.from_numpy(positions.astype(np.int32)))
    assert there.tolist() == row_keys(seeds, positions).tolist()


@pytest.mark.parametrize("guess", ["the same noise", "the likeliest token"])
def test_what_is_kept_follows_the_softmax(guess):
    """100,000 tokens of rows with drafts, a third of which are spoiled: at each place of a row."""
    weights, temperature = torch.tensor([2.0, 1.0, 0.5, 0.0, -0.5, -1.0, -2.0, -3.0]), 1.3
    rows, most, draws = 2048, 4, 100_000
    sampler, drafter = Sampler(rows, len(weights), CPU), Sampler(rows, len(weights), CPU)
    for slot in range(rows):
        params = SamplingParams(temperature=temperature, seed=slot)
        sampler.init(SlotInit(slot, params, slot, (), ()))
        drafter.init(SlotInit(slot, params, slot, (), ()))
    sampling = StepSampling(sampler, DeviceSlots(rows, 1, 0, CPU), None)
    rng, slots, at = np.random.default_rng(3), np.arange(rows), np.full(rows, 10)
    counts = np.zeros((1 + most, len(weights)), np.int64)
    step = 0
    while counts.sum() < draws:
        step += 1
        drafts = np.zeros((rows, 1 + most), np.int32)
        for place in range(most):
            drawn = drafter.sample(weights.repeat(rows, 1), slots, at + place).tokens.numpy()
            drafts[:, 1 + place] = 0 if guess == "the likeliest token" else drawn
        spoiled = rng.random(drafts.shape) < 1 / 3
        drafts[spoiled] = rng.integers(len(weights), size=spoiled.sum())
        planned = [PlanRow(i, None, int(at[i]) - 1, ((),), (i,), drafts=tuple(drafts[i, 1:])) for i in slots]
        launched = LaunchedStep(step, tuple(planned))
        positions = (at[:, None] - 1 + np.arange(1 + most)).ravel()
        chains = Chains(
            np.full(rows, 1 + most), torch.from_numpy(drafts.ravel()), torch.from_numpy(positions)
        )
        logits = weights.repeat(rows * (1 + most), 1)
        sampling.sample(launched, PendingSampling(logits, slots, at, [], chains))
        for i, result in enumerate(sampling.read(launched)):
            for place, token in enumerate(result.tokens):
                counts[place, token] += 1
            at[i] += len(result.tokens)
    expected = (weights / temperature).softmax(0).tolist()
    for own in (counts.sum(0), *counts):
        total = own.sum()
        assert total > 500
        # 7 degrees of freedom: 29.9 is passed once in 10,000.
        assert sum((n - total * p) ** 2 / (total * p) for n, p in zip(own, expected, strict=True)) < 29.9
