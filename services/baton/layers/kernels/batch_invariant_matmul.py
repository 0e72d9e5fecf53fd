"""Triton: matrix products that sum every row in the same order, for any number of rows.

What a library does differently for 1, 64 and 8,192 rows, splits of the inner dimension above all, makes a
token's logits depend on who shares its step (Horace He, Defeating Nondeterminism in LLM Inference, Thinking
Machines Lab, 2025). Here one program adds up an element over the whole inner dimension, from its start, in
the tensor core's own steps of 16; tiles differ by the number of rows, that order does not. Needs a GPU:
import it where one is in use.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from baton.layers.kernels import quantized_gemm
from baton.layers.linear import Linear


@dataclass(frozen=True, slots=True)
class MatmulTile:
    rows: int
    columns: int
    inner: int
    warps: int
    stages: int
    persistent: bool = False
    """One program per multiprocessor processes tile after tile."""


@triton.jit(do_not_specialize=["rows"])
def _matmul(
    x,
    weight,
    bias,
    out,
    rows,
    columns,
    inner,
    out_stride,
    BIAS: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    INNER: tl.constexpr,
    GROUP: tl.constexpr,
):
    tiles_down, tiles_across = tl.cdiv(rows, ROWS), tl.cdiv(columns, COLUMNS)
    for tile in tl.range(tl.program_id(0), tiles_down * tiles_across, tl.num_programs(0), flatten=True):
        # Tiles that run at the same time share what they read.
        group = tile // (GROUP * tiles_across)
        first = group * GROUP
        height = tl.minimum(tiles_down - first, GROUP)
        row = (first + (tile % (GROUP * tiles_across)) % height) * ROWS
        column = (tile % (GROUP * tiles_across)) // height * COLUMNS
        total = tl.zeros((ROWS, COLUMNS), tl.float32)
        for k in range(0, inner, INNER):
            total = tl.dot(x.load([row, k]), weight.load([column, k]).T, total)
        at_row = row + tl.arange(0, ROWS)
        at_column = column + tl.arange(0, COLUMNS)
        if BIAS:
            total += tl.load(bias + at_column, mask=at_column < columns, other=0.0).to(tl.float32)[None, :]
        inside = (at_row < rows)[:, None] & (at_column < columns)[None, :]
        offset = at_row.to(tl.int64)[:, None] * out_stride + at_column[None, :]
        tl.store(out + offset, total.to(out.dtype.element_ty), mask=inside)


def matmul(
    x: torch.Tensor, linear: Linear, out: torch.Tensor | None = None, tile: MatmulTile | None = None
) -> torch.Tensor:
    """x W^T + b for x [rows, in], into `out` [rows, out] if given, else into a new tensor. bfloat16 or
    float16, added up in float32, rounded once; rows contiguous and a multiple of 16 bytes apart.

    A row's result depends only on x's row and the weight. `tile`: another one than the fastest measured.
    Weights may be quantized.
    """
    if linear.quantized is not None:
        product = quantized_gemm.project(x, linear.quantized, linear.bias, invariant=True)
        return product if out is None else out.copy_(product)
    weight = linear.weight
    assert weight is not None and weight.is_contiguous()
    rows, inner = x.shape
    columns = weight.shape[0]
    if out is None:
        out = torch.empty(rows, columns, dtype=x.dtype, device=x.device)
    if not rows:
        return out
    tile = tile or tile_for(rows, columns)
    tiles = triton.cdiv(rows, tile.rows) * triton.cdiv(columns, tile.columns)
    if tile.persistent:
        tiles = min(tiles, quantized_gemm.processors(x.device))
    _matmul[(tiles,)](
        TensorDescriptor(x, [rows, inner], [x.stride(0), 1], [tile.rows, tile.inner]),
        TensorDescriptor(weight, [columns, inner], [inner, 1], [tile.columns, tile.inner]),
        weight if linear.bias is None else linear.bias,
        out,
        rows,
        columns,
        inner,
        out.stride(0),
        BIAS=linear.bias is not None,
        ROWS=tile.rows,
        COLUMNS=tile.columns,
        INNER=tile.inner,
        GROUP=8,
        num_warps=tile.warps,
        num_stages=tile.stages,
    )
    return out


def tile_for(rows: int, columns: int) -> MatmulTile:
    """Each is a multiple of 64 rows, so that all run on the same instructions."""
    if rows <= 64:
        return MatmulTile(64, 32 if columns <= 8192 else 64, 128, 4, 4)
    if rows <= 256:
        return MatmulTile(128, 64, 64, 4, 4)
    return MatmulTile(128, 256, 64, 8, 3, persistent=True)
