"""Kernels against their definition in float32."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from baton.layers.linear import Linear
from rig import CUDA


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


@pytest.mark.parametrize("rows", [3, 40])
def test_rows_that_lie_apart_are_multiplied(rows):
    """As a recurrent layer gives them, which has replayed drafts before them."""
    from baton.layers.kernels.gemm import gated, project_parts

    torch.manual_seed(rows)
    linear = Linear(torch.randn(4096, 1024, device=CUDA).bfloat16() / 32)
    x = torch.randn(rows, 2, 1024, device=CUDA).bfloat16()[:, 1]
    assert not x.is_contiguous()
    for product in (lambda x: project_parts(x, linear), lambda x: gated(x, linear, x.dtype)):
        assert torch.equal(product(x), product(x.clone(memory_format=torch.contiguous_format)))


@pytest.mark.parametrize("rows", [2, 7, 8, 9, 16, 17, 64, 65, 128, 136, 200, 256])
@pytest.mark.parametrize(
    ("columns", "k"),
    [
        (4096, 4096),
        (4096, 12288),
        (1024, 3072),
        (1000, 1504),
        (1000, 1536),
        (2048, 8960),
        (128, 2048),
        (96, 64),
    ],
)
@pytest.mark.parametrize("bias", [False, True])
def test_project_and_add_norm(rows, columns, k, bias):
    """Parts of a projection, added to the residual and normalized; a second time, as a graph's replay is."""
    from baton.layers.kernels.gemm import add_norm, fits, project_parts

    torch.manual_seed(rows)
    own = torch.randn(columns, device=CUDA).bfloat16() if bias else None
    linear = Linear(torch.randn(columns, k, device=CUDA).bfloat16() / k**0.5, own)
    assert fits(linear, bias=True) and fits(linear) == (not bias)
    x = torch.randn(rows, k, device=CUDA).bfloat16()
    scale = torch.rand(columns, device=CUDA).bfloat16()
    before = torch.randn(rows, columns, device=CUDA).bfloat16()
    assert linear.weight is not None
    total = before.float() + F.linear(x.float(), linear.weight.float(), None if own is None else own.float())
    want = F.rms_norm(total, (columns,), scale.float(), 1e-6)
    for _ in range(2):
        residual, out = before.clone(), torch.full_like(before, torch.nan)
        add_norm(residual, project_parts(x, linear), scale, out, 1e-6, own)
        assert ((residual.float() - total).norm() / total.norm()).item() < 4e-3
        assert ((out.float() - want).norm() / want.norm()).item() < 4e-3


@pytest.mark.parametrize("rows", [2, 7, 8, 9, 16, 17, 64, 65, 128, 136, 200, 256])
@pytest.mark.parametrize(
    ("columns", "k"), [(12288, 4096), (3072, 1024), (8960, 1536), (1000, 1504), (1000, 1536)]
)
def test_gated(rows, columns, k):
    from baton.layers.kernels.gemm import gated

    torch.manual_seed(rows)
    linear = Linear(torch.randn(2 * columns, k, device=CUDA).bfloat16() / k**0.5)
    x = torch.randn(rows, k, device=CUDA).bfloat16()
    assert linear.weight is not None
    both = x.float() @ linear.weight.float().t()
    want = F.silu(both[:, :columns]) * both[:, columns:]
    out = gated(x, linear, x.dtype)
    if out is None:
        assert rows > 64, "so few rows have few tiles"
        return
    assert ((out.float() - want).norm() / want.norm()).item() < 4e-3


@pytest.mark.parametrize("rows", [1, 7, 256, 2048])
@pytest.mark.parametrize("columns", [96, 1024, 4096])
def test_norms(rows, columns, monkeypatch):
    """sgl_kernel's own, also where FlashInfer is installed and cannot compile."""
    import sgl_kernel.elementwise as wrappers

    from baton.layers.kernels.rmsnorm import fused_add_rmsnorm, rmsnorm

    monkeypatch.setattr(wrappers, "_has_flashinfer", True)
    monkeypatch.setattr(wrappers, "_flashinfer_norm", None, raising=False)
    torch.manual_seed(rows)
    x, residual = (torch.randn(rows, columns, device=CUDA).bfloat16() for _ in range(2))
    scale = torch.rand(columns, device=CUDA).bfloat16()
    want = F.rms_norm(x.float(), (columns,), scale.float(), 1e-6)
    assert ((rmsnorm(x, scale, 1e-6).float() - want).norm() / want.norm()).item() < 4e-3
    total = x.float() + residual.float()
    want = F.rms_norm(total, (columns,), scale.float(), 1e-6)
    fused_add_rmsnorm(x, residual, scale, 1e-6)
    assert ((residual.float() - total).norm() / total.norm()).item() < 4e-3
    assert ((x.float() - want).norm() / want.norm()).item() < 4e-3
