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
ONE_BY_ONE = [name for name in MODULES if name != "mamba"]


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


class Pool:
    """States of rows in pages of any order, as kernels take them."""

    def __init__(self, module, rows, seed=5):
        self.rows = rows
        order = torch.randperm(len(rows) * PAGES, generator=torch.Generator().manual_seed(seed)).tolist()
        self.tables = [tuple(order[i * PAGES : (i + 1) * PAGES]) for i in range(len(rows))]
        generator = torch.Generator().manual_seed(seed + 1)
        self.states = [
            torch.randn(len(order), *shape, generator=generator).to(DEVICE) for shape in module.cache.shapes
        ]

    def plan(self, spans):
        """Rows of the step: (row, first position, tokens), those of one token first."""
        return [PlanRow(row, (0,) * count, start, (self.tables[row],)) for row, start, count in spans]

    def batch(self, module, spans, one_by_one):
        rows = self.plan(spans)
        alone = 0 if one_by_one else sum(row.count == 1 for row in rows)
        pieces, starts = state_pieces(rows[alone:], alone, PAGE)
        divided = torch.from_numpy(pieces).to(DEVICE), torch.from_numpy(starts).to(DEVICE)
        positions = [torch.arange(row.start, row.start + row.count) for row in rows]
        # Parts of larger tensors, as pages are.
        tensors = [torch.nn.functional.pad(each.flatten(1), (3, 5)) for each in self.states]
        tensors = [
            each[:, 3 : 3 + own[0].numel()].view(own.shape)
            for each, own in zip(tensors, self.states, strict=True)
        ]
        return Batch(
            torch.zeros(0),
            torch.cat(positions).int().to(DEVICE),
            States([], []),
            [StateCache(torch.tensor(self.tables).int().to(DEVICE), tensors, PAGE)],
            torch.tensor([row.slot for row in rows for _ in range(row.count)]).int().to(DEVICE),
            states=StateRows(alone, *divided, one_by_one),
        )


@pytest.mark.parametrize(
    ("name", "one_by_one"), [*((name, False) for name in MODULES), *((name, True) for name in ONE_BY_ONE)]
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_outputs_and_states_are_those_of_the_torch_code(name, dtype, one_by_one):
    module = filled(MODULES[name], dtype)
    pool = Pool(module, ROWS)
    spans = [(row, start, count) for row, (start, count) in enumerate(ROWS)]
    x = torch.randn(sum(count for _, count in ROWS), HIDDEN, device=DEVICE).to(dtype)
    batch = pool.batch(module, spans, one_by_one)
    with torch.inference_mode():
        got = module.write(module.project(x), batch)
        own = Batch(torch.zeros(0), batch.positions, States(pool.plan(spans), pool.states))
        want = module.write(module.project(x), own)
    near = 1e-4 if dtype == torch.float32 else 3e-2
    # Where 16 bits nearly cancel out, single numbers are far off, in both.
    error = (got.float() - want.float()).square().mean().sqrt() / want.float().square().mean().sqrt()
    assert error.item() < near
    for one, other in zip(batch.caches[0].tensors, pool.states, strict=True):
        torch.testing.assert_close(one, other, atol=near * other.abs().max().item(), rtol=near)


@pytest.mark.parametrize("name", ONE_BY_ONE)
def test_one_by_one_the_bits_do_not_depend_on_how_a_sequence_is_divided(name):
    """Whole, in chunks, and token by token, beside other rows and alone."""
    module = filled(MODULES[name], torch.bfloat16)
    x = torch.randn(3, 100, HIDDEN, device=DEVICE).bfloat16()
    with torch.inference_mode():
        projected = torch.stack([module.project(own) for own in x])
    found = []
    for cuts in ((100,), (37, 64, 70, 100), (*range(64, 80), 100)):
        pool, start, outputs = Pool(module, ROWS[:3]), 0, []
        for end in cuts:
            rows = range(3) if start % 3 else range(1)
            batch = pool.batch(module, [(row, start, end - start) for row in rows], True)
            with torch.inference_mode():
                out = module.write(projected[list(rows), start:end].flatten(0, 1), batch)
            outputs.append(out[: end - start])
            pool.states = [each.clone() for each in batch.caches[0].tensors]
            start = end
        found.append((torch.cat(outputs), [each[pool.tables[0][99 // PAGE]] for each in pool.states]))
    for outputs, states in found[1:]:
        assert torch.equal(outputs, found[0][0])
        assert all(torch.equal(*pair) for pair in zip(states, found[0][1], strict=True))
