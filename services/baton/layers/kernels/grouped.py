"""Triton: the products of a mixture's experts, for any number of tokens.

A tile has rows of one expert only (`routing.sort`), so that each weight is read for its own tokens alone.
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

from baton.layers.experts import ExpertMatrix, Experts
from baton.layers.kernels.activation import gated, gating
from baton.layers.kernels.routing import Tiles


@dataclass(frozen=True, slots=True)
class Tile:
    """Of one program."""

    columns: int
    inner: int
    """Step along the dimension that is added up."""
    warps: int
    stages: int


@triton.jit
def _added(total, a, w, unit, row, start, K: tl.constexpr, SCALED: tl.constexpr, SWAP: tl.constexpr):
    """total plus the product of a step; `row`: the tile's first row of the matrix of all experts."""
    if SCALED != "":
        w = w.to(tl.float32).to(a.dtype)  # in two steps: the processor has no fast one to bfloat16
    if SCALED == "blocks":  # a tile and a step are of one block
        part = tl.dot(w, a.T) if SWAP else tl.dot(a, w.T)
        return total + part * tl.load(unit + row // 128 * (K // 128) + start // 128)
    return tl.dot(w, a.T, total) if SWAP else tl.dot(a, w.T, total)


@triton.jit
def _row_units(total, unit, row, n, columns, SWAP: tl.constexpr):
    """total times the scales of its rows of the matrix."""
    units = tl.load(unit + row + n, mask=n < columns, other=0.0)
    return total * (units[:, None] if SWAP else units[None, :])


@triton.jit
def _gate_up(
    x,
    weight,
    unit,
    bias,
    order,
    tile_experts,
    num_tiles,
    out,
    pairs,
    K: tl.constexpr,
    COLUMNS: tl.constexpr,
    TOP_K: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    SWAP: tl.constexpr,
    SCALED: tl.constexpr,
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
        k = tl.arange(0, BK)
        at = x + (pair // TOP_K).to(tl.int64)[:, None] * K + k[None, :]
        there = (pair < pairs)[:, None]
        gate = tl.zeros((BN, BM) if SWAP else (BM, BN), tl.float32)
        up = tl.zeros((BN, BM) if SWAP else (BM, BN), tl.float32)
        for start in range(0, K, BK):
            a = tl.load(at + start, mask=there & (start + k < K)[None, :], other=0.0)
            gate = _added(gate, a, weight.load([top, start]), unit, top, start, K, SCALED, SWAP)
            second = top + COLUMNS
            up = _added(up, a, weight.load([second, start]), unit, second, start, K, SCALED, SWAP)
        if SCALED == "rows":
            gate = _row_units(gate, unit, top, tl.arange(0, BN), COLUMNS - left, SWAP)
            up = _row_units(up, unit, top + COLUMNS, tl.arange(0, BN), COLUMNS - left, SWAP)
        n = left + tl.arange(0, BN)
        if BIAS:
            at = bias + top + tl.arange(0, BN)
            own = tl.load(at, mask=n < COLUMNS, other=0.0).to(tl.float32)
            more = tl.load(at + COLUMNS, mask=n < COLUMNS, other=0.0).to(tl.float32)
            gate += own[:, None] if SWAP else own[None, :]
            up += more[:, None] if SWAP else more[None, :]
        y = gated(gate, up, CLAMPED, ALPHA, LIMIT)
        y = y.to(out.dtype.element_ty)
        if SWAP:
            y = y.T
        tl.store(out + m.to(tl.int64)[:, None] * COLUMNS + n[None, :], y, mask=(n < COLUMNS)[None, :])


@triton.jit
def _down(
    x,
    weight,
    unit,
    bias,
    weights,
    order,
    tile_experts,
    num_tiles,
    out,
    pairs,
    K: tl.constexpr,
    COLUMNS: tl.constexpr,
    TOP_K: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    SWAP: tl.constexpr,
    SCALED: tl.constexpr,
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
        for start in range(0, K, BK):
            y = _added(
                y, x.load([tile * BM, start]), weight.load([top, start]), unit, top, start, K, SCALED, SWAP
            )
        if SCALED == "rows":
            y = _row_units(y, unit, top, tl.arange(0, BN), COLUMNS - left, SWAP)
        pair = tl.load(order + tile * BM + tl.arange(0, BM))
        there = pair < pairs
        scale = tl.load(weights + pair, mask=there, other=0.0)
        n = left + tl.arange(0, BN)
        if BIAS:
            own = tl.load(bias + top + tl.arange(0, BN), mask=n < COLUMNS, other=0.0).to(tl.float32)
            y += own[:, None] if SWAP else own[None, :]
        # Part by part, as `gemm.add_norm` adds them up.
        row = (pair % TOP_K).to(tl.int64) * (pairs // TOP_K) + pair // TOP_K
        if SWAP:
            y = (y * scale[None, :]).to(out.dtype.element_ty).T
        else:
            y = (y * scale[:, None]).to(out.dtype.element_ty)
        tl.store(out + row[:, None] * COLUMNS + n[None, :], y, mask=there[:, None] & (n < COLUMNS)[None, :])


def gate_up(
    x: torch.Tensor, experts: Experts, tiles: Tiles, top_k: int, tile: Tile, *, pdl: bool = True
) -> torch.Tensor:
    """Gate and up of each choice's token, activated and multiplied: x [tokens, hidden] -> [rows of all tiles,
    inner], sorted."""
    matrix, _ = experts.matrices()
    count, _, hidden = matrix.values.shape
    inner = experts.inner
    out = torch.empty(len(tiles.order), inner, dtype=x.dtype, device=x.device)
    weight = matrix.values.view(count * 2 * inner, hidden)
    _gate_up[(len(tiles.experts) * triton.cdiv(inner, tile.columns),)](
        x,
        TensorDescriptor.from_tensor(weight, [tile.columns, tile.inner]),
        x if matrix.scale is None else matrix.scale,
        x if experts.gate_up_bias is None else experts.gate_up_bias,
        tiles.order,
        tiles.experts,
        tiles.count,
        out,
        x.shape[0] * top_k,
        K=hidden,
        COLUMNS=inner,
        TOP_K=top_k,
        BIAS=experts.gate_up_bias is not None,
        **gating(experts),
        **_options(tiles, tile, matrix, pdl),
    )
    return out


def down(
    x: torch.Tensor,
    experts: Experts,
    weights: torch.Tensor,
    tiles: Tiles,
    out: torch.Tensor,
    tile: Tile,
    *,
    pdl: bool = True,
) -> None:
    """The experts' down projection of what `gate_up` returned, times `weights` [tokens, top_k], into `out`
    [top_k, tokens, hidden]."""
    _, matrix = experts.matrices()
    count, hidden, inner = matrix.values.shape
    _down[(len(tiles.experts) * triton.cdiv(hidden, tile.columns),)](
        TensorDescriptor.from_tensor(x, [tiles.rows, tile.inner]),
        TensorDescriptor.from_tensor(matrix.values.view(count * hidden, inner), [tile.columns, tile.inner]),
        weights if matrix.scale is None else matrix.scale,
        weights if experts.down_bias is None else experts.down_bias,
        weights,
        tiles.order,
        tiles.experts,
        tiles.count,
        out,
        weights.numel(),
        K=inner,
        COLUMNS=hidden,
        TOP_K=weights.shape[1],
        BIAS=experts.down_bias is not None,
        **_options(tiles, tile, matrix, pdl),
    )


def _options(tiles: Tiles, tile: Tile, matrix: ExpertMatrix, pdl: bool) -> dict[str, int | bool | str]:
    return {
        "SCALED": matrix.scaled,
        "BM": tiles.rows,
        "BN": tile.columns,
        "BK": tile.inner,
        # Codes become numbers in registers, where only the tall operand may lie.
        "SWAP": tile.columns >= 64 and (tiles.rows < 64 or bool(matrix.scaled)),
        "PDL": pdl,
        "num_warps": tile.warps,
        "num_stages": tile.stages,
        "launch_pdl": pdl,
    }
