"""Kernels of recurrent layers against the layers' torch code: rows of one token beside chunks that begin, go
on and end anywhere, states in pages of any order."""

from __future__ import annotations

import pytest
import torch

from baton.attention.base import AttentionRows
from baton.attention.state_runs import state_pieces, state_runs
from baton.engine.plan import PlanRow
from baton.layers.batch import Batch, StateCache, StateRows
from baton.layers.gated_delta_net import DeltaNetShape, GatedDeltaNet
from baton.layers.mamba2 import Mamba2, Mamba2Shape
from baton.layers.parameters import Parameters
from baton.layers.short_convolution import GatedConvolution

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
"""A CPU: by Triton's interpreter."""
HIDDEN, PAGE, PAGES = 32, 16, 8
ROWS = ((0, 1), (5, 1), (16, 1), (31, 1), (0, 70), (15, 2), (16, 80), (3, 29), (14, 3))
"""First position and tokens."""


def delta_net(parameters, by_key_head=False):
    return GatedDeltaNet(parameters, 0, HIDDEN, DeltaNetShape(2, 4, 24, 40, 4), 1e-6, by_key_head=by_key_head)


def large_delta_net(parameters):
    return GatedDeltaNet(parameters, 0, HIDDEN, DeltaNetShape(1, 2, 128, 128, 4), 1e-6, by_key_head=False)


def mamba(parameters):
    return Mamba2(parameters, 0, HIDDEN, Mamba2Shape(6, 24, 3, 40, 4), 1e-6, step_limits=(0.01, 2.0))


def convolution(parameters):
    return GatedConvolution(parameters, 0, HIDDEN, 3, bias=True)


MODULES = {each.__name__: each for each in (delta_net, large_delta_net, mamba, convolution)}


class States:
    """`StepAttention.states` of rows, in pages of one layer."""

    def __init__(self, rows, tensors):
        self.tensors, self.runs = tensors, []
        singles = sum(row.count == 1 for row in rows)
        for part, first in ((rows[:singles], 0), (rows[singles:], singles)):
            if part:
                count = sum(row.count for row in part)
                longest = max(row.count for row in part)
                self.runs += state_runs(AttentionRows(part, first, count, longest=longest), 0, PAGE, DEVICE)

    def states(self, layer):
        return self.runs, self.tensors


def filled(make, dtype):
    torch.manual_seed(3)
    parameters = Parameters(dtype, DEVICE)
    module = make(parameters)
    for name, parameter in parameters.table.items():
        noise = torch.randn(parameter.shape) * (0.4 if "weight" in name else 0.7)
        noise = 1 + 0.3 * noise if parameter.fill == "ones" and "A_log" not in name else noise
        value = noise if parameter.convert is None else parameter.convert(noise)
        parameter.target.copy_(value.to(DEVICE))
    return module


@pytest.mark.parametrize("name", MODULES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_outputs_and_states_are_those_of_the_torch_code(name, dtype):
    module = filled(MODULES[name], dtype)
    order = torch.randperm(len(ROWS) * PAGES).tolist()
    tables = [tuple(order[i * PAGES : (i + 1) * PAGES]) for i in range(len(ROWS))]
    slots = torch.randperm(len(ROWS)).tolist()
    rows = [PlanRow(slots[i], (0,) * count, start, (tables[i],)) for i, (start, count) in enumerate(ROWS)]
    singles = sum(row.count == 1 for row in rows)
    x = torch.randn(sum(row.count for row in rows), HIDDEN, device=DEVICE).to(dtype)
    want_states = [torch.randn(len(order), *shape, device=DEVICE) for shape in module.cache.shapes]
    got_states = [torch.nn.functional.pad(each.flatten(1), (3, 5)) for each in want_states]
    got_states = [
        each[:, 3 : 3 + want[0].numel()].view(want.shape)
        for each, want in zip(got_states, want_states, strict=True)
    ]
    positions = torch.cat([torch.arange(row.start, row.start + row.count) for row in rows]).int()
    token_slots = torch.tensor([row.slot for row in rows for _ in range(row.count)]).int()
    with torch.inference_mode():
        own = Batch(torch.zeros(0), positions, States(rows, want_states))
        want = module._advance_all(x, own)
        by_slot = torch.tensor([tables[slots.index(slot)] for slot in range(len(ROWS))]).int()
        cache = StateCache(by_slot.to(DEVICE), got_states, PAGE)
        pieces, starts = state_pieces(rows[singles:], singles, PAGE)
        batch = Batch(
            torch.zeros(0),
            positions.to(DEVICE),
            States([], []),
            [cache],
            token_slots.to(DEVICE),
            states=StateRows(
                singles, torch.from_numpy(pieces).to(DEVICE), torch.from_numpy(starts).to(DEVICE)
            ),
        )
        got = module._advance_all(x, batch)
    near = 1e-4 if dtype == torch.float32 else 3e-2
    # Where 16 bits nearly cancel out, single numbers are far off, in both.
    error = (got.float() - want.float()).square().mean().sqrt() / want.float().square().mean().sqrt()
    assert error.item() < near
    for one, other in zip(got_states, want_states, strict=True):
        torch.testing.assert_close(one, other, atol=near * other.abs().max().item(), rtol=near)
