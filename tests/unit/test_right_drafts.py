"""Which drafts are right is decided on the device as a loop on the host would decide it."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch

from baton.engine.sampler_ops import position_keys, row_keys, seed_keys
from baton.engine.step_sampling import verify


@pytest.mark.parametrize("seed", range(20))
def test_the_longest_run_of_right_drafts(seed):
    rng = random.Random(seed)
    depths = [rng.randrange(1, 6) for _ in range(rng.randrange(1, 9))]
    tokens, drafts, expected = [], [], []
    for depth in depths:
        sampled = [rng.randrange(2) for _ in range(depth)]
        behind = [rng.randrange(9), *(rng.randrange(2) for _ in range(depth - 1))]
        right = 0
        while right + 1 < depth and sampled[right] == behind[right + 1]:
            right += 1
        expected.append((right, sampled[right]))
        tokens += sampled
        drafts += behind
    ends = np.cumsum(depths)
    right, last = verify(
        torch.tensor(tokens, dtype=torch.int32),
        torch.tensor(drafts, dtype=torch.int32),
        torch.from_numpy(ends - depths),
        torch.tensor(depths),
        max(depths) + rng.randrange(3),
    )
    assert list(zip(right.tolist(), last.tolist(), strict=True)) == expected


def test_generator_states_of_positions_on_the_device():
    seeds = np.array([0, 1, 2**63, 2**64 - 1, 12345678901234567890], np.uint64)
    positions = np.array([0, 1, 77, 2**31 - 1, 4096], np.uint64)
    there = position_keys(torch.from_numpy(seed_keys(seeds)), torch.from_numpy(positions.astype(np.int32)))
    assert there.tolist() == row_keys(seeds, positions).tolist()
