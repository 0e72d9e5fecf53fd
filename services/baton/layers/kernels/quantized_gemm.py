"""Triton: projections by a matrix of 8 or 4 bits whose activations stay in 16, fused as those of `gemm` are.

Codes become the activations' dtype on their way to the tensor cores, whose tall operand they are. Scales of
rows multiply sums, those of blocks the sums of a block; 4 bits have a kernel of their own (`int4_gemm`).
Needs a GPU: import it where one is in use.
"""

from __future__ import annotations

from functools import cache

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from baton.layers.kernels import int4_gemm
from baton.layers.kernels.tensor_cores import awaited
from baton.layers.quantization.weight_method import QuantizedWeight

_SPLITS = (8, 4, 2, 1)
GemmTile = tuple[int, int, int, int, int]
"""Rows, columns and depth of a tile, warps, stages."""


@triton.jit
def _added(total, tokens, weight, scale, at, scales, mask, GROUPED: tl.constexpr):
    """total [columns, rows] plus the product of a tile of weights with the rows' tile."""
    codes = tl.load(weight + at, mask=mask, other=0.0).to(tl.float32).to(tokens.dtype)
    if GROUPED:
        return total + tl.dot(codes, tokens.T) * tl.load(scale + scales)[:, None]
    return awaited(tl.dot(codes, tokens.T, total))


@triton.jit
def _gemm(
    x,
    weight,
    scale,
    bias,
    out,
    rows,
    columns,
    K: tl.constexpr,
    GROUP: tl.constexpr,
    GROUPS: tl.constexpr,
    SHARED: tl.constexpr,
    BIAS: tl.constexpr,
    GATED: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    SPLITS: tl.constexpr,
    PDL: tl.constexpr,
):
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    tiles = tl.cdiv(rows, BM)
    m = tl.program_id(0) % tiles * BM + tl.arange(0, BM)
    n = tl.program_id(0) // tiles * BN + tl.arange(0, BN)
    split = tl.program_id(1)
    part: tl.constexpr = (K + SPLITS - 1) // SPLITS
    output = tl.minimum(n, columns - 1)
    column = tl.arange(0, BK)
    at = output.to(tl.int64)[:, None] * K + column[None, :]
    second = columns.to(tl.int64) * K
    scales = output // SHARED * GROUPS
    second_scales = columns // SHARED * GROUPS
    tokens = x + m.to(tl.int64)[:, None] * K + column[None, :]
    total = tl.zeros((BN, BM), tl.float32)
    up = tl.zeros((BN, BM), tl.float32)
    for step in range(0, part, BK):
        k = split * part + step
        there = k + column < K
        known = (m < rows)[:, None] & there[None, :]
        values = tl.load(tokens + k, mask=known, other=0.0)
        group = scales + k // GROUP
        mask = there[None, :]
        grouped: tl.constexpr = GROUPS > 1
        total = _added(total, values, weight, scale, at + k, group, mask, grouped)
        if GATED:
            up = _added(up, values, weight, scale, at + k + second, group + second_scales, mask, grouped)
    if GROUPS == 1:
        total *= tl.load(scale + scales)[:, None]
        if GATED:
            up *= tl.load(scale + scales + second_scales)[:, None]
    if BIAS:
        total += tl.load(bias + output).to(tl.float32)[:, None]
        if GATED:
            up += tl.load(bias + columns + output).to(tl.float32)[:, None]
    if GATED:
        total = total / (1 + tl.exp(-total)) * up
    offset = (split * rows + m).to(tl.int64)[:, None] * columns + n[None, :]
    inside = (m < rows)[:, None] & (n < columns)[None, :]
    tl.store(out + offset, total.to(out.dtype.element_ty).T, mask=inside)


def project(
    x: torch.Tensor, weight: QuantizedWeight, bias: torch.Tensor | None = None, *, invariant: bool = False
) -> torch.Tensor:
    """x W^T + b of x [rows, in] -> [rows, out]. `invariant`: added up in one order for any number of rows."""
    out = torch.empty(1, len(x), weight.shape[0], dtype=x.dtype, device=x.device)
    if len(x):
        tile = INVARIANT
        if not invariant:
            tile = _tile(len(x), weight)
            if weight.bits == 4 and 32 < len(x) <= 64 and weight.shape[0] <= tile[1] * processors(x.device):
                tile = (*tile[:4], 6)  # one program a processor has more memory
        launch(x, weight, out, tile, bias=bias)
    return out[0]


def project_parts(x: torch.Tensor, weight: QuantizedWeight) -> torch.Tensor:
    """x W^T of x [rows, in] in parts to be added: float32 [parts, rows, out]."""
    rows, (columns, k) = len(x), weight.shape
    tile = _tile(rows, weight)
    programs = triton.cdiv(rows, tile[0]) * triton.cdiv(columns, tile[1])
    possible = [n for n in _SPLITS if n == 1 or k % (n * _depth(tile, weight)) == 0]
    # Two programs of up to 64 rows run on a processor at a time.
    most = (2 if tile[0] <= 64 else 1) * processors(x.device)
    splits = next((n for n in possible if programs * n <= most), 1)
    out = torch.empty(splits, rows, columns, dtype=torch.float32, device=x.device)
    launch(x, weight, out, tile, splits=splits)
    return out


def gated(x: torch.Tensor, weight: QuantizedWeight) -> torch.Tensor:
    """silu(gate) * up of x [rows, in]; W holds the rows of gate, then those of up."""
    out = torch.empty(1, len(x), weight.shape[0] // 2, dtype=x.dtype, device=x.device)
    launch(x, weight, out, _tile(len(x), weight), gated=True)
    return out[0]


@cache
def processors(device: torch.device) -> int:
    """The device's multiprocessors."""
    return torch.cuda.get_device_properties(device).multi_processor_count


INVARIANT: GemmTile = (64, 64, 128, 4, 4)


def _depth(tile: GemmTile, weight: QuantizedWeight) -> int:
    """A step of 8 bits has one scale a row, one of 4 bits up to four."""
    if weight.bits == 4:
        return min(tile[2], 4 * weight.group)
    return min(tile[2], weight.group) if weight.grouped else tile[2]


def _tile(rows: int, weight: QuantizedWeight) -> GemmTile:
    """Chooses the tile: for 4 bits the best of those tried on an H200 for each matrix of an 8B model.
    Triton 3.6 computes wrong sums with (128, 128, 128, 8, 4): it must not be chosen."""
    if weight.bits == 8 or 32 < rows <= 64:
        return (16, 64, 128, 4, 4) if rows <= 16 else (64, 64, 128, 4, 4)
    if rows <= 32:
        return 16 if rows <= 16 else 32, 64, 256, 4, 4
    return 128, 64, 128, 4, 4


def launch(
    x: torch.Tensor,
    weight: QuantizedWeight,
    out: torch.Tensor,
    tile: GemmTile,
    *,
    bias: torch.Tensor | None = None,
    splits: int = 1,
    gated: bool = False,
    pdl: bool = True,
) -> None:
    """x [rows, in] -> out [splits, rows, out]; a split's columns are whole tiles deep."""
    if weight.bits == 4:
        tile = (*tile[:2], _depth(tile, weight), *tile[3:])
        int4_gemm.launch(x, weight, out, tile, bias=bias, splits=splits, gated=gated, pdl=pdl)
        return
    rows, k = x.shape
    columns = weight.shape[0] // 2 if gated else weight.shape[0]
    height, width, _, warps, stages = tile
    _gemm[(triton.cdiv(rows, height) * triton.cdiv(columns, width), splits)](
        x,
        weight.codes,
        weight.scale,
        x if bias is None else bias,
        out,
        rows,
        columns,
        K=k,
        GROUP=weight.group,
        GROUPS=weight.scale.shape[1],
        SHARED=weight.block,
        BIAS=bias is not None,
        GATED=gated,
        BM=height,
        BN=width,
        BK=_depth(tile, weight),
        SPLITS=splits,
        PDL=pdl,
        num_warps=warps,
        num_stages=stages,
        launch_pdl=pdl,
    )
