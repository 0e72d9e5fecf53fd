"""Triton: a projection of one token, fused with the operations before and after it.

One row is bound by the weights' bytes: each program streams some rows of the matrix. Needs a GPU: import it
where one is in use.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from baton.layers.kernels import quantized_gemv
from baton.layers.linear import Linear


@triton.jit
def _gemv(
    x,
    weight,
    bias,
    norm,
    out,
    rows,
    eps,
    K: tl.constexpr,
    NORM: tl.constexpr,
    GATED: tl.constexpr,
    ADD: tl.constexpr,
    BIAS: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    # Weights do not depend on the previous kernel: the first are fetched while it ends.
    n = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    columns = tl.arange(0, BLOCK)
    at = n.to(tl.int64)[:, None] * K + columns[None, :]
    inside = (n < rows)[:, None] & (columns < K)[None, :]
    if PDL:
        gdc_launch_dependents()
    w = tl.load(weight + at, mask=inside, other=0.0, eviction_policy="evict_first")
    if GATED:
        second = weight + rows.to(tl.int64) * K
        u = tl.load(second + at, mask=inside, other=0.0, eviction_policy="evict_first")
    if PDL:
        gdc_wait()
    total = tl.zeros((ROWS, BLOCK), tl.float32)
    gate = tl.zeros((ROWS, BLOCK), tl.float32)
    squares = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, K, BLOCK):
        k = start + columns
        value = tl.load(x + k, mask=k < K, other=0.0).to(tl.float32)
        if NORM:
            squares += value * value
            value = value * tl.load(norm + k, mask=k < K, other=0.0).to(tl.float32)
        total += w.to(tl.float32) * value[None, :]
        if GATED:
            gate += u.to(tl.float32) * value[None, :]
        following = (n < rows)[:, None] & (k + BLOCK < K)[None, :]
        ahead = at + start + BLOCK
        w = tl.load(weight + ahead, mask=following, other=0.0, eviction_policy="evict_first")
        if GATED:
            u = tl.load(second + ahead, mask=following, other=0.0, eviction_policy="evict_first")
    y = tl.sum(total, 1)
    z = tl.sum(gate, 1)
    if NORM:
        scale = tl.rsqrt(tl.sum(squares, 0) / K + eps)
        y = y * scale
        z = z * scale
    if BIAS:
        y += tl.load(bias + n, mask=n < rows, other=0.0).to(tl.float32)
        if GATED:
            z += tl.load(bias + rows + n, mask=n < rows, other=0.0).to(tl.float32)
    if GATED:
        y = y / (1 + tl.exp(-y)) * z
    if ADD:
        y += tl.load(out + n, mask=n < rows, other=0.0).to(tl.float32)
    tl.store(out + n, y, mask=n < rows)


def gemv(
    x: torch.Tensor,
    linear: Linear,
    out: torch.Tensor | None,
    *,
    norm: torch.Tensor | None = None,
    eps: float = 0.0,
    gated: bool = False,
    add: bool = False,
    block: tuple[int, int, int] | None = None,
    pdl: bool = True,
) -> torch.Tensor:
    """y = W x + b of one row x [1, in] into `out` [1, rows], or a new tensor; returns it.

    `norm` [in]: x is RMS-normalized with this weight first. `gated`: W is two matrices of `rows` rows, gate
    and up; y = silu(gate) * up. `add`: added to what `out` holds. All in float32, rounded once. `block`: rows
    and columns of a tile, and warps.
    """
    if linear.quantized is not None:
        return quantized_gemv.gemv(
            x, linear.quantized, out, bias=linear.bias, norm=norm, eps=eps, gated=gated, add=add, pdl=pdl
        )
    weight = linear.weight
    assert weight is not None
    columns = weight.shape[1]
    rows = weight.shape[0] // 2 if gated else weight.shape[0]
    if out is None:
        out = x.new_empty(1, rows)
    tile, width, warps = block or _block(rows, columns, gated)
    _gemv[(triton.cdiv(rows, tile),)](
        x,
        weight,
        weight if linear.bias is None else linear.bias,
        weight if norm is None else norm,
        out,
        rows,
        eps,
        K=columns,
        NORM=norm is not None,
        GATED=gated,
        ADD=add,
        BIAS=linear.bias is not None,
        ROWS=tile,
        BLOCK=width,
        PDL=pdl,
        num_warps=warps,
        launch_pdl=pdl,
    )
    return out


def _block(rows: int, columns: int, gated: bool) -> tuple[int, int, int]:
    """Tile rows, tile columns and warps: the best of those tried on an H200 for the shapes of 0.6B and 8B
    models. Few rows need small tiles, to occupy all multiprocessors."""
    if gated or rows > 4096:
        return 4, 1024, 4
    return (8 if rows > 1024 else 2), 1024, 4


class OneRowProduct:
    """A `Product` of a `Linear` with a plain weight of 16 bits: of one row by `gemv`."""

    __slots__ = ("_linear", "_weight")

    def __init__(self, linear: Linear) -> None:
        assert linear.weight is not None
        self._linear, self._weight = linear, linear.weight

    def apply(self, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        if len(x) == 1:
            return gemv(x.contiguous(), self._linear, None)
        return F.linear(x, self._weight, bias)

    def add_to(self, residual: torch.Tensor, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        if len(x) == 1:
            return gemv(x.contiguous(), self._linear, residual, add=True)
        return residual.add_(F.linear(x, self._weight, bias))
