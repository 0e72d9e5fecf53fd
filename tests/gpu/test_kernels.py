"""Kernels against their definition in float32."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from rig import CUDA

from baton.layers.linear import Linear


@pytest.mark.parametrize("pdl", [False, True])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize(
    ("gated", "add", "norm"), [(False, False, True), (False, True, False), (True, False, True)]
)
@pytest.mark.parametrize(
    ("rows", "columns"), [(1024, 2048), (6144, 4096), (4096, 12288), (40, 96), (1000, 1500)]
)
def test_gemv(rows, columns, gated, add, norm, bias, pdl):
    from baton.layers.kernels.gemv import gemv

    torch.manual_seed(rows)
    total = rows * (2 if gated else 1)
    weight = torch.randn(total, columns, device=CUDA).bfloat16() / columns**0.5
    linear = Linear(weight, torch.randn(total, device=CUDA).bfloat16() if bias else None)
    x, scale = torch.randn(1, columns, device=CUDA).bfloat16(), torch.rand(columns, device=CUDA).bfloat16()
    before = torch.randn(1, rows, device=CUDA).bfloat16()
    seen = F.rms_norm(x.float(), (columns,), scale.float(), 1e-6) if norm else x.float()
    want = F.linear(seen, weight.float(), None if linear.bias is None else linear.bias.float())
    if gated:
        want = F.silu(want[:, :rows]) * want[:, rows:]
    if add:
        want = want + before.float()
    out = before.clone() if add else torch.full_like(before, torch.nan)
    gemv(x, linear, out, norm=scale if norm else None, eps=1e-6, gated=gated, add=add, pdl=pdl)
    assert ((out.float() - want).norm() / want.norm()).item() < 4e-3
