"""Kernels of steps with drafts do what loops on the host would."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch

from baton.engine.device_slots import DeviceSlots
from baton.engine.sampler_ops import position_keys, row_keys, seed_keys
from rig import CUDA
from settled_rows import settle

CPU = torch.device("cpu")
SLOTS = 40


def ints(values, device=CUDA, dtype=torch.int32):
    return torch.tensor(values, dtype=dtype, device=device)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("seed", range(10))
def test_the_longest_run_of_right_drafts(seed, dtype):
    from baton.layers.kernels.draft_steps import verify

    rng = random.Random(seed)
    depths = [rng.randrange(1, 9) for _ in range(rng.randrange(1, 30))]
    slots = rng.sample(range(SLOTS), len(depths))
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
    firsts = [sum(depths[:at]) for at in range(len(depths))]
    last_token, slots_right = ints([-7] * SLOTS), ints([-7] * SLOTS)
    right = ints([-7] * len(depths))
    verify(
        torch.stack((ints(tokens), ints([99] * len(tokens))), 1),
        ints(drafts),
        *(ints(each, dtype=dtype) for each in (slots, firsts, depths)),
        max(depths) + rng.randrange(3),
        last_token,
        slots_right,
        right,
    )
    assert right.tolist() == [count for count, _ in expected]
    found = dict(
        zip(slots, zip(slots_right[slots].tolist(), last_token[slots].tolist(), strict=True), strict=True)
    )
    assert found == dict(zip(slots, expected, strict=True))
    others = [slot for slot in range(SLOTS) if slot not in slots]
    assert (last_token[others] == -7).all() and (slots_right[others] == -7).all()


@pytest.mark.parametrize("rows", [1, 7, 40, 300, 700])
def test_rows_settle_as_on_the_host(rows):
    """Tokens and rows beyond one block, too."""
    rng = random.Random(rows)
    slots = rows + 3
    there = [DeviceSlots(slots, 4, 99, device) for device in (CPU, CUDA)]
    for each in there:
        each.last_token.copy_(ints([1000 + slot for slot in range(slots + 1)]))
        each.right.copy_(ints([slot % 4 for slot in range(slots + 1)]))
    ids, positions, lengths, token_slots, row_slots, drafts = [], [], [], [], [], [5]
    for slot in rng.sample(range(slots), rows):
        count, follows, start = rng.randrange(1, 5), rng.random() < 0.5, rng.randrange(50)
        first = -2 - len(drafts)
        kinds = [[7] * count, [-1, *range(first, first + 1 - count, -1)]]
        ids += kinds[follows or rng.random() < 0.5]
        drafts += [rng.randrange(500) for _ in range(count + 3)]
        positions += [-1 - at if follows else at for at in range(start, start + count)]
        lengths.append(-(start + count) if follows else start + count)
        token_slots += [slot] * count
        row_slots.append(slot)
    found = []
    for each, device in zip(there, (CPU, CUDA), strict=True):
        lanes = [ints(lane, device) for lane in (ids, positions, lengths, token_slots, row_slots, drafts)]
        if device.type == "cpu":
            settle(each, *lanes)
        else:
            each.settle(*lanes)
        found.append([lane.tolist() for lane in (*lanes, each.right, each.last_token)])
    assert found[0] == found[1]


def test_generator_states_of_positions():
    """Of several positions of each row, as the drafts of a head have them."""
    seeds = np.array([0, 1, 2**63, 2**64 - 1, 12345678901234567890], np.uint64)
    positions = np.array([[0, 1, 77, 2**31 - 2, 4096], [5, 6, 7, 8, 9]], np.int32)
    keys = torch.from_numpy(seed_keys(seeds)).to(CUDA)
    for dtype in (torch.int32, torch.int64):
        there = position_keys(keys, torch.from_numpy(positions).to(CUDA, dtype))
        expected = [row_keys(seeds, each.astype(np.uint64)).tolist() for each in positions]
        assert there.tolist() == expected
