"""Triton: projections by a matrix of 8 or 4 bits whose activations stay in 16, fused as those of `gemm` are.

Codes become the activations' dtype on their way to the tensor cores, whose tall operand they are. Scales of
rows multiply sums, those of blocks the sums of a block; 4 bits are dequantized first. Needs a GPU: import it
where one is in use.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from baton.layers.weights.method import QuantizedWeight

_SPLITS = (8, 4, 2, 1)
Tile = tuple[int, int, int, int, int]
"""Rows, columns and depth of a tile, warps, stages."""


@triton.jit
def added(total, low, high, weight, scale, zero, at, scales, mask, BITS: tl.constexpr, GROUPED: tl.constexpr):
    """total [columns, rows] plus the product of a tile of weights with the rows' tile; of 4 bits `low` and
    `high` are columns of the low and of the high halves of its bytes."""
    codes = tl.load(weight + at, mask=mask, other=0.0)
    if BITS == 4:
        s = tl.load(scale + scales)
        z = (s * (-128.0 - tl.load(zero + scales)))[:, None]
        # In bits 16 to 19 behind the exponent of 128, a code is 128 + code: cheaper than a conversion.
        wide = codes.to(tl.int32)
        first = ((wide << 16) & 0xF0000 | 0x43000000).to(tl.float32, bitcast=True) * s[:, None] + z
        second = ((wide << 12) & 0xF0000 | 0x43000000).to(tl.float32, bitcast=True) * s[:, None] + z
        total = tl.dot(first.to(low.dtype), low.T, total)
        return tl.dot(second.to(low.dtype), high.T, total)
    if GROUPED:
        return total + tl.dot(codes.to(tl.float32).to(low.dtype), low.T) * tl.load(scale + scales)[:, None]
    return tl.dot(codes.to(tl.float32).to(low.dtype), low.T, total)


@triton.jit
def _gemm(
    x,
    weight,
    scale,
    zero,
    bias,
    out,
    rows,
    columns,
    K: tl.constexpr,
    BITS: tl.constexpr,
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
    width: tl.constexpr = BK * BITS // 8
    own = tl.minimum(n, columns - 1)
    byte = tl.arange(0, width)
    column = byte if BITS == 8 else byte // 8 * 16 + byte % 8
    at = own.to(tl.int64)[:, None] * (K * BITS // 8) + byte[None, :]
    second = columns.to(tl.int64) * (K * BITS // 8)
    scales = own // SHARED * GROUPS
    second_scales = columns // SHARED * GROUPS
    tokens = x + m.to(tl.int64)[:, None] * K + column[None, :]
    total = tl.zeros((BN, BM), tl.float32)
    up = tl.zeros((BN, BM), tl.float32)
    for step in range(0, part, BK):
        k = split * part + step
        there = k + column < K
        known = (m < rows)[:, None] & there[None, :]
        low = tl.load(tokens + k, mask=known, other=0.0)
        high = low
        if BITS == 4:
            high = tl.load(tokens + k + 8, mask=known, other=0.0)
        here = at + k * BITS // 8
        group = scales + k // GROUP
        mask = there[None, :]
        grouped: tl.constexpr = GROUPS > 1
        total = added(total, low, high, weight, scale, zero, here, group, mask, BITS, grouped)
        if GATED:
            group += second_scales
            up = added(up, low, high, weight, scale, zero, here + second, group, mask, BITS, grouped)
    if GROUPS == 1 and BITS == 8:
        total *= tl.load(scale + scales)[:, None]
        if GATED:
            up *= tl.load(scale + scales + second_scales)[:, None]
    if BIAS:
        total += tl.load(bias + own).to(tl.float32)[:, None]
        if GATED:
            up += tl.load(bias + columns + own).to(tl.float32)[:, None]
    if GATED:
        total = total / (1 + tl.exp(-total)) * up
    place = (split * rows + m).to(tl.int64)[:, None] * columns + n[None, :]
    inside = (m < rows)[:, None] & (n < columns)[None, :]
    tl.store(out + place, total.to(out.dtype.element_ty).T, mask=inside)


@triton.jit
def _dequantize(codes, scale, zero, out, rows, K: tl.constexpr, GROUP: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    byte = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    there = byte < K // 2
    pair = tl.load(codes + row * (K // 2) + byte, mask=there, other=0)
    column = byte // 8 * 16 + byte % 8
    group = row * (K // GROUP) + column // GROUP
    s = tl.load(scale + group, mask=there, other=0.0)
    z = tl.load(zero + group, mask=there, other=0.0)
    at = out + row * K + column
    tl.store(at, (((pair & 15).to(tl.float32) - z) * s).to(out.dtype.element_ty), mask=there)
    tl.store(at + 8, (((pair >> 4).to(tl.float32) - z) * s).to(out.dtype.element_ty), mask=there)


def dequantize(weight: QuantizedWeight, dtype: torch.dtype) -> torch.Tensor:
    """Of 4 bits -> [out, in]"""
    rows, columns = weight.shape
    out = torch.empty(rows, columns, dtype=dtype, device=weight.device)
    block = min(1024, triton.next_power_of_2(columns // 2))
    _dequantize[(rows, triton.cdiv(columns // 2, block))](
        weight.codes, weight.scale, weight.zero, out, rows, K=columns, GROUP=weight.group, BLOCK=block
    )
    return out


def project(
    x: torch.Tensor, weight: QuantizedWeight, bias: torch.Tensor | None = None, *, invariant: bool = False
) -> torch.Tensor:
    """x W^T + b of x [rows, in] -> [rows, out]. `invariant`: added up in one order for any number of rows."""
    out = torch.empty(1, len(x), weight.shape[0], dtype=x.dtype, device=x.device)
    if len(x):
        launch(x, weight, out, INVARIANT if invariant else _tile(len(x)), bias=bias)
    return out[0]


def project_parts(x: torch.Tensor, weight: QuantizedWeight) -> torch.Tensor:
    """x W^T of x [rows, in] in parts to be added: float32 [parts, rows, out]."""
    rows, (columns, k) = len(x), weight.shape
    tile = _tile(rows)
    programs = triton.cdiv(rows, tile[0]) * triton.cdiv(columns, tile[1])
    possible = [n for n in _SPLITS if n == 1 or k % (n * _depth(tile, weight)) == 0]
    processors = torch.cuda.get_device_properties(x.device).multi_processor_count
    splits = next((n for n in possible if programs * n <= 2 * processors), 1)
    out = torch.empty(splits, rows, columns, dtype=torch.float32, device=x.device)
    launch(x, weight, out, tile, splits=splits)
    return out


def gated(x: torch.Tensor, weight: QuantizedWeight) -> torch.Tensor:
    """silu(gate) * up of x [rows, in]; W holds the rows of gate, then those of up."""
    out = torch.empty(1, len(x), weight.shape[0] // 2, dtype=x.dtype, device=x.device)
    launch(x, weight, out, _tile(len(x)), gated=True)
    return out[0]


INVARIANT: Tile = (64, 64, 128, 4, 4)


def _depth(tile: Tile, weight: QuantizedWeight) -> int:
    """A step has one scale a row."""
    return min(tile[2], weight.group) if weight.grouped else tile[2]


def _tile(rows: int) -> Tile:
    return (16, 64, 128, 4, 4) if rows <= 16 else (64, 64, 128, 4, 4)


def launch(
    x: torch.Tensor,
    weight: QuantizedWeight,
    out: torch.Tensor,
    tile: Tile,
    *,
    bias: torch.Tensor | None = None,
    splits: int = 1,
    gated: bool = False,
    pdl: bool = True,
) -> None:
    """x [rows, in] -> out [splits, rows, out]; a split's columns are whole tiles deep."""
    rows, k = x.shape
    columns = weight.shape[0] // 2 if gated else weight.shape[0]
    height, width, _, warps, stages = tile
    _gemm[(triton.cdiv(rows, height) * triton.cdiv(columns, width), splits)](
        x,
        weight.codes,
        weight.scale,
        weight.scale if weight.zero is None else weight.zero,
        x if bias is None else bias,
        out,
        rows,
        columns,
        K=k,
        BITS=weight.bits,
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
