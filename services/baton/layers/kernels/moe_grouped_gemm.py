"""Triton: the products of a mixture's experts, for any number of tokens.

A tile has rows of one expert only (`moe_align.sort`), so that each weight is read for its own tokens alone.
With few rows a tile the products are computed transposed: the tensor cores' tall operand is then the weights,
which stream through shared memory once. Needs a Hopper GPU (its tensor memory access): import it where one is
in use.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait
from triton.tools.tensor_descriptor import TensorDescriptor

from baton.layers.kernels.activation import gated, gating
from baton.layers.kernels.moe_align import Tiles
from baton.layers.kernels.quantize import BLOCK, Quantized, quantized
from baton.layers.kernels.tensor_cores import awaited
from baton.layers.moe import ExpertMatrix, Experts


@dataclass(frozen=True, slots=True)
class GroupedTile:
    """Tile sizes of one program."""

    columns: int
    inner: int
    """Step along the dimension that is added up."""
    warps: int
    stages: int


@triton.jit
def _added(
    total,
    a,
    units,
    w,
    unit,
    row,
    start,
    K: tl.constexpr,
    SCALED: tl.constexpr,
    EIGHT: tl.constexpr,
    SWAP: tl.constexpr,
):
    """total plus the product of a step; `row`: the tile's first row of the matrix of all experts;
    `units`: the step's scales of the rows of `a`, where a row has several. `EIGHT`: what shares a scale in
    `a`, if that has 8 bits, too."""
    if SCALED != "" and EIGHT == "":
        w = w.to(tl.float32).to(a.dtype)  # in two steps: the processor has no fast one to bfloat16
    if SWAP:
        first, second = w, a.T
    else:
        first, second = a, w.T
    if EIGHT == "blocks" or SCALED == "blocks":  # a tile and a step are of one block
        sums: tl.constexpr = tl.int32 if a.dtype == tl.int8 else tl.float32
        part = tl.dot(first, second, out_dtype=sums).to(tl.float32)
        if EIGHT == "blocks":
            part *= units[None, :] if SWAP else units[:, None]
        if SCALED == "blocks":
            part *= tl.load(unit + row // 128 * (K // 128) + start // 128)
        return total + part
    else:
        total = tl.dot(first, second, total, out_dtype=total.dtype)
        return awaited(total) if SCALED != "" and EIGHT == "" else total


@triton.jit
def _row_units(total, unit, row, n, columns, SWAP: tl.constexpr):
    """total times the scales of its rows of the matrix."""
    units = tl.load(unit + row + n, mask=n < columns, other=0.0)
    return total * (units[:, None] if SWAP else units[None, :])


@triton.jit
def _columns(BK: tl.constexpr, GROUP: tl.constexpr):
    """Columns of a step: all, or of 4 bits those of the low halves of its bytes; those of the high ones
    follow 8 columns later."""
    if GROUP:
        byte = tl.arange(0, BK // 2)
        return byte // 8 * 16 + byte % 8
    else:
        return tl.arange(0, BK)


@triton.jit
def _four_bits(
    total, low, high, weight, unit, zero, row, columns, start, K: tl.constexpr, GROUP: tl.constexpr
):
    """As `_added`, of 4 bits; `columns`: of the matrix from the tile's first on. A step is of one group."""
    n = tl.arange(0, total.shape[0])
    inside = n < columns
    row += tl.where(inside, n, 0)
    byte = start // 2 + tl.arange(0, low.shape[1])
    at = row.to(tl.int64)[:, None] * (K // 2) + byte[None, :]
    scales = row * (K // GROUP) + start // GROUP
    codes = tl.load(weight + at, mask=inside[:, None], other=0)
    s = tl.load(unit + scales)
    z = (s * (-128.0 - tl.load(zero + scales)))[:, None]
    # In bits 16 to 19 behind the exponent of 128, a code is 128 + code: cheaper than a conversion.
    wide = codes.to(tl.int32)
    first = ((wide << 16) & 0xF0000 | 0x43000000).to(tl.float32, bitcast=True) * s[:, None] + z
    second = ((wide << 12) & 0xF0000 | 0x43000000).to(tl.float32, bitcast=True) * s[:, None] + z
    total = tl.dot(first.to(low.dtype), low.T, total)
    return tl.dot(second.to(low.dtype), high.T, total)


@triton.jit(do_not_specialize=["pairs"])
def _gate_up(
    x,
    x_unit,
    weight,
    unit,
    zero,
    bias,
    order,
    tile_experts,
    num_tiles,
    out,
    out_unit,
    pairs,
    x_unit_stride,
    out_unit_stride,
    K: tl.constexpr,
    COLUMNS: tl.constexpr,
    TOP_K: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    SWAP: tl.constexpr,
    SCALED: tl.constexpr,
    EIGHT: tl.constexpr,
    GROUP: tl.constexpr,
    BIAS: tl.constexpr,
    CLAMPED: tl.constexpr,
    ALPHA: tl.constexpr,
    LIMIT: tl.constexpr,
    PDL: tl.constexpr,
):
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    across: tl.constexpr = (COLUMNS + BN - 1) // BN
    tile = tl.program_id(0) // across
    if tile < tl.load(num_tiles):
        left = tl.program_id(0) % across * BN
        top = tl.load(tile_experts + tile) * (2 * COLUMNS) + left
        m = tile * BM + tl.arange(0, BM)
        pair = tl.load(order + m)
        k = _columns(BK, GROUP)
        token = pair // TOP_K
        at = x + token.to(tl.int64)[:, None] * K + k[None, :]
        there = (pair < pairs)[:, None]
        sums: tl.constexpr = tl.int32 if EIGHT == "tokens" and x.dtype.element_ty == tl.int8 else tl.float32
        gate = tl.zeros((BN, BM) if SWAP else (BM, BN), sums)
        up = tl.zeros((BN, BM) if SWAP else (BM, BN), sums)
        units = tl.zeros((BM,), tl.float32)
        if EIGHT == "tokens":
            units = tl.load(x_unit + token, mask=pair < pairs, other=0.0)
        for start in range(0, K, BK):
            a = tl.load(at + start, mask=there & (start + k < K)[None, :], other=0.0)
            if EIGHT == "blocks":  # a step is of one block
                units = tl.load(x_unit + start // 128 * x_unit_stride + token, mask=pair < pairs, other=0.0)
            second = top + COLUMNS
            if GROUP:
                b = tl.load(at + start + 8, mask=there & (start + k < K)[None, :], other=0.0)
                gate = _four_bits(gate, a, b, weight, unit, zero, top, COLUMNS - left, start, K, GROUP)
                up = _four_bits(up, a, b, weight, unit, zero, second, COLUMNS - left, start, K, GROUP)
            else:
                w = weight.load([top, start])
                gate = _added(gate, a, units, w, unit, top, start, K, SCALED, EIGHT, SWAP)
                w = weight.load([second, start])
                up = _added(up, a, units, w, unit, second, start, K, SCALED, EIGHT, SWAP)
        if EIGHT == "tokens":
            gate = gate.to(tl.float32) * (units[None, :] if SWAP else units[:, None])
            up = up.to(tl.float32) * (units[None, :] if SWAP else units[:, None])
        if SCALED == "rows":
            gate = _row_units(gate, unit, top, tl.arange(0, BN), COLUMNS - left, SWAP)
            up = _row_units(up, unit, top + COLUMNS, tl.arange(0, BN), COLUMNS - left, SWAP)
        n = left + tl.arange(0, BN)
        if BIAS:
            at = bias + top + tl.arange(0, BN)
            bias_values = tl.load(at, mask=n < COLUMNS, other=0.0).to(tl.float32)
            more = tl.load(at + COLUMNS, mask=n < COLUMNS, other=0.0).to(tl.float32)
            gate += bias_values[:, None] if SWAP else bias_values[None, :]
            up += more[:, None] if SWAP else more[None, :]
        y = gated(gate, up, CLAMPED, ALPHA, LIMIT)
        if EIGHT != "":  # a tile is a block
            y, own_units = quantized(y, out.dtype.element_ty, 0 if SWAP else 1)
            tl.store(out_unit + left // BN * out_unit_stride + m, own_units)
        y = y.to(out.dtype.element_ty)
        if SWAP:
            y = y.T
        tl.store(out + m.to(tl.int64)[:, None] * COLUMNS + n[None, :], y, mask=(n < COLUMNS)[None, :])


@triton.jit(do_not_specialize=["pairs"])
def _down(
    x,
    x_unit,
    weight,
    unit,
    zero,
    bias,
    weights,
    order,
    tile_experts,
    num_tiles,
    out,
    pairs,
    x_unit_stride,
    K: tl.constexpr,
    COLUMNS: tl.constexpr,
    TOP_K: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    SWAP: tl.constexpr,
    SCALED: tl.constexpr,
    EIGHT: tl.constexpr,
    GROUP: tl.constexpr,
    BIAS: tl.constexpr,
    PDL: tl.constexpr,
):
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    across: tl.constexpr = (COLUMNS + BN - 1) // BN
    tile = tl.program_id(0) // across
    if tile < tl.load(num_tiles):
        left = tl.program_id(0) % across * BN
        top = tl.load(tile_experts + tile) * COLUMNS + left
        y = tl.zeros((BN, BM) if SWAP else (BM, BN), tl.float32)
        units = tl.zeros((BM,), tl.float32)
        for start in range(0, K, BK):
            if EIGHT != "":
                at = x_unit + start // 128 * x_unit_stride + tile * BM
                units = tl.load(at + tl.arange(0, BM))
            if GROUP:
                m = tile * BM + tl.arange(0, BM)
                at = x + m.to(tl.int64)[:, None] * K + start + _columns(BK, GROUP)[None, :]
                a, b = tl.load(at), tl.load(at + 8)
                y = _four_bits(y, a, b, weight, unit, zero, top, COLUMNS - left, start, K, GROUP)
            else:
                a, w = x.load([tile * BM, start]), weight.load([top, start])
                y = _added(y, a, units, w, unit, top, start, K, SCALED, EIGHT, SWAP)
        if SCALED == "rows":
            y = _row_units(y, unit, top, tl.arange(0, BN), COLUMNS - left, SWAP)
        pair = tl.load(order + tile * BM + tl.arange(0, BM))
        there = pair < pairs
        scale = tl.load(weights + pair, mask=there, other=0.0)
        n = left + tl.arange(0, BN)
        if BIAS:
            bias_values = tl.load(bias + top + tl.arange(0, BN), mask=n < COLUMNS, other=0.0).to(tl.float32)
            y += bias_values[:, None] if SWAP else bias_values[None, :]
        # Part by part, as `gemm.add_norm` adds them up.
        row = (pair % TOP_K).to(tl.int64) * (pairs // TOP_K) + pair // TOP_K
        if SWAP:
            y = (y * scale[None, :]).to(out.dtype.element_ty).T
        else:
            y = (y * scale[:, None]).to(out.dtype.element_ty)
        tl.store(out + row[:, None] * COLUMNS + n[None, :], y, mask=there[:, None] & (n < COLUMNS)[None, :])


def fits(experts: Experts) -> bool:
    """Whether both operands can have 8 bits: the weights have, and activations divide into blocks."""
    matrix, _ = experts.matrices()
    eight = matrix.scaled in ("rows", "blocks")
    return eight and experts.inner % BLOCK == 0 and experts.hidden % BLOCK == 0


def gate_up(
    x: torch.Tensor | Quantized,
    experts: Experts,
    tiles: Tiles,
    top_k: int,
    tile: GroupedTile,
    *,
    pdl: bool = True,
) -> torch.Tensor | Quantized:
    """Gate and up of each choice's token, activated and multiplied: x [tokens, hidden] -> [rows of all tiles,
    inner], sorted. Of a quantized x it is quantized, in blocks; tiles have `BLOCK` columns and step then."""
    matrix, _ = experts.matrices()
    inner, rows = experts.inner, len(tiles.order)
    codes, x_unit, stride = _of(x)
    eight = ""
    out: torch.Tensor | Quantized
    if isinstance(x, Quantized):
        eight = "blocks" if matrix.scaled == "blocks" else "tokens"
        assert tile.columns == tile.inner == BLOCK
        out = Quantized.empty(rows, inner, codes.dtype, True, codes.device)
    else:
        out = torch.empty(rows, inner, dtype=x.dtype, device=x.device)
    target, out_unit, out_stride = _of(out)
    _gate_up[(len(tiles.experts) * triton.cdiv(inner, tile.columns),)](
        codes,
        x_unit,
        _weights(matrix, tile),
        codes if matrix.scale is None else matrix.scale,
        codes if matrix.zero is None else matrix.zero,
        codes if experts.gate_up_bias is None else experts.gate_up_bias,
        tiles.order,
        tiles.experts,
        tiles.count,
        target,
        out_unit,
        codes.shape[0] * top_k,
        stride,
        out_stride,
        K=experts.hidden,
        COLUMNS=inner,
        TOP_K=top_k,
        EIGHT=eight,
        BIAS=experts.gate_up_bias is not None,
        **gating(experts),
        **_options(tiles, tile, matrix, eight, pdl),
    )
    return out


def down(
    x: torch.Tensor | Quantized,
    experts: Experts,
    weights: torch.Tensor,
    tiles: Tiles,
    out: torch.Tensor,
    tile: GroupedTile,
    *,
    pdl: bool = True,
) -> None:
    """The experts' down projection of what `gate_up` returned, times `weights` [tokens, top_k], into `out`
    [top_k, tokens, hidden]."""
    _, matrix = experts.matrices()
    hidden, inner = experts.hidden, experts.inner
    codes, x_unit, stride = _of(x)
    eight = "blocks" if isinstance(x, Quantized) else ""
    assert not eight or tile.inner == BLOCK
    _down[(len(tiles.experts) * triton.cdiv(hidden, tile.columns),)](
        codes if matrix.group else TensorDescriptor.from_tensor(codes, [tiles.rows, tile.inner]),
        x_unit,
        _weights(matrix, tile),
        weights if matrix.scale is None else matrix.scale,
        weights if matrix.zero is None else matrix.zero,
        weights if experts.down_bias is None else experts.down_bias,
        weights,
        tiles.order,
        tiles.experts,
        tiles.count,
        out,
        weights.numel(),
        stride,
        K=inner,
        COLUMNS=hidden,
        TOP_K=weights.shape[1],
        EIGHT=eight,
        BIAS=experts.down_bias is not None,
        **_options(tiles, tile, matrix, eight, pdl),
    )


def _of(x: torch.Tensor | Quantized) -> tuple[torch.Tensor, torch.Tensor, int]:
    """Values or codes, scales, and the distance of a row's scales."""
    return (x, x, 0) if isinstance(x, torch.Tensor) else (x.codes, x.scale, x.scale.stride(1))


def _weights(matrix: ExpertMatrix, tile: GroupedTile) -> torch.Tensor | TensorDescriptor:
    """Weights of all experts; those of 4 bits are read by pointers, in halves of a group that may have 16
    bytes."""
    values = matrix.values.flatten(0, 1)
    return values if matrix.group else TensorDescriptor.from_tensor(values, [tile.columns, tile.inner])


def _options(
    tiles: Tiles, tile: GroupedTile, matrix: ExpertMatrix, eight: str, pdl: bool
) -> dict[str, int | bool | str]:
    return {
        "SCALED": matrix.scaled,
        "BM": tiles.rows,
        "BN": tile.columns,
        "BK": min(tile.inner, matrix.group or tile.inner),
        "GROUP": matrix.group,
        # Codes that become numbers do so in registers, where only the tall operand may lie.
        "SWAP": tile.columns >= 64 and (tiles.rows < 64 or (bool(matrix.scaled) and not eight)),
        "PDL": pdl,
        "num_warps": tile.warps,
        "num_stages": tile.stages,
        "launch_pdl": pdl,
    }
