"""Triton: projections of 2 to 16 rows, which are bound by the weights' bytes, as those of one row are.

The matrix is the tall operand of the tensor cores and the rows are 8 or 16 columns of the other: tiles of 64
rows (`gemm`) would multiply padding. Small tiles leave room for several programs on a multiprocessor, which
keep more bytes under way. Needs a GPU: import it where one is in use.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from baton.layers.linear import Linear

MOST_ROWS = 16


@triton.jit(do_not_specialize=["tokens"])
def _skinny(
    x,
    weight,
    bias,
    out,
    tokens,
    rows,
    K: tl.constexpr,
    SPLITS: tl.constexpr,
    GATED: tl.constexpr,
    BIAS: tl.constexpr,
    TOKENS: tl.constexpr,
    ROWS: tl.constexpr,
    DEPTH: tl.constexpr,
    STAGES: tl.constexpr,
):
    gdc_launch_dependents()
    part: tl.constexpr = K // SPLITS
    split = tl.program_id(1)
    n = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    t = tl.arange(0, TOKENS)
    k = split * part + tl.arange(0, DEPTH)
    inside = (n < rows)[:, None]
    there = (t < tokens)[None, :]
    at = weight + n.to(tl.int64)[:, None] * K + k[None, :]
    up_at = at + rows.to(tl.int64) * K
    total = tl.zeros((ROWS, TOKENS), tl.float32)
    up = tl.zeros((ROWS, TOKENS), tl.float32)
    gdc_wait()
    for start in tl.range(0, part, DEPTH, num_stages=STAGES):
        values = tl.load(x + t[None, :] * K + (start + k)[:, None], mask=there, other=0.0)
        w = tl.load(at + start, mask=inside, other=0.0, eviction_policy="evict_first")
        total = tl.dot(w, values, total)
        if GATED:
            w = tl.load(up_at + start, mask=inside, other=0.0, eviction_policy="evict_first")
            up = tl.dot(w, values, up)
    if BIAS:
        total += tl.load(bias + n, mask=n < rows, other=0.0).to(tl.float32)[:, None]
    if GATED:
        total = total / (1 + tl.exp(-total)) * up
    to = out + (split * tokens + t).to(tl.int64)[None, :] * rows + n[:, None]
    tl.store(to, total.to(out.dtype.element_ty), mask=inside & there)


class Tile(NamedTuple):
    rows: int
    """Of the matrix."""
    depth: int
    splits: int
    """Parts of the depth of the whole matrix."""
    stages: int


def fits(rows: int, linear: Linear) -> bool:
    """Whether these compute x [rows, in] of this layer, of a plain weight of 16 bits."""
    weight = linear.weight
    if not 1 < rows <= MOST_ROWS or weight is None or weight.dtype.itemsize != 2:
        return False
    return weight.shape[1] % 256 == 0 and weight.is_cuda


def project(x: torch.Tensor, linear: Linear, tile: Tile | None = None) -> torch.Tensor:
    """W x + b of x [rows, in] -> [rows, out]"""
    assert linear.weight is not None
    out = x.new_empty(len(x), linear.weight.shape[0])
    return _launch(x, linear, out, tile or _tile(*linear.weight.shape), gated=False, bias=linear.bias)


def project_parts(x: torch.Tensor, linear: Linear, tile: Tile | None = None) -> torch.Tensor:
    """W x of x [rows, in], in parts to be added: float32 [parts, rows, out]"""
    assert linear.weight is not None
    tile = tile or _tile(*linear.weight.shape)
    out = torch.empty(tile.splits, len(x), linear.weight.shape[0], dtype=torch.float32, device=x.device)
    return _launch(x, linear, out, tile, gated=False)


def gated(x: torch.Tensor, linear: Linear, tile: Tile | None = None) -> torch.Tensor:
    """silu(gate) * up of x [rows, in] -> [rows, out]; W holds the rows of gate, then those of up."""
    assert linear.weight is not None
    out = x.new_empty(len(x), linear.weight.shape[0] // 2)
    return _launch(x, linear, out, tile or Tile(32, 256, 1, 3), gated=True)


def _launch(
    x: torch.Tensor,
    linear: Linear,
    out: torch.Tensor,
    tile: Tile,
    *,
    gated: bool,
    bias: torch.Tensor | None = None,
) -> torch.Tensor:
    weight, rows = linear.weight, out.shape[-1]
    assert weight is not None
    _skinny[(triton.cdiv(rows, tile.rows), tile.splits)](
        x.contiguous(),
        weight,
        weight if bias is None else bias,
        out,
        len(x),
        rows,
        K=weight.shape[1],
        SPLITS=tile.splits,
        GATED=gated,
        BIAS=bias is not None,
        TOKENS=8 if len(x) <= 8 else 16,
        ROWS=tile.rows,
        DEPTH=tile.depth,
        STAGES=tile.stages,
        num_warps=4,
        num_stages=tile.stages,
        launch_pdl=True,
    )
    return out


def _tile(rows: int, columns: int) -> Tile:
    return Tile(32, 256, 1, 3)
