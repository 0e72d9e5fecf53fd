"""Triton: activations in 8 bits, quantized where they are written: by the norm, or by SiLU and product.

A token has one scale, or one for each 128 columns, which a matrix in blocks asks for. Needs a GPU: import it
where one is in use.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

BLOCK = 128
"""Columns of a block's scale."""


@dataclass(slots=True)
class Quantized:
    """x [tokens, columns] is codes * scale."""

    codes: torch.Tensor
    """E4M3 or int8 [tokens, columns]"""
    scale: torch.Tensor
    """float32 [tokens, 1], or [tokens, blocks] with tokens as neighbours."""

    @staticmethod
    def empty(tokens: int, columns: int, dtype: torch.dtype, blocks: bool, device: torch.device) -> Quantized:
        codes = torch.empty(tokens, columns, dtype=dtype, device=device)
        parts = -(-columns // BLOCK) if blocks else 1
        # A multiple of four tokens, as `fp8_blockwise_scaled_mm` asks.
        scale = torch.empty(parts, -(-tokens // 4) * 4, dtype=torch.float32, device=device)
        return Quantized(codes, scale.t()[:tokens] if blocks else scale.view(-1, 1)[:tokens])


@triton.jit
def largest(y, AXIS: tl.constexpr):
    """The largest magnitude along an axis, at least 1e-10. No number if one of them is none: as integers
    those are the largest, while the maximum of floats passes over them."""
    bits = tl.max(tl.abs(y).to(tl.int32, bitcast=True), AXIS)
    return tl.maximum(bits, 0x2EDBE6FF).to(tl.float32, bitcast=True)


@triton.jit
def quantized(y, dtype: tl.constexpr, AXIS: tl.constexpr):
    """y in units of which an axis shares one, ready to be converted to `dtype`, and these units."""
    most: tl.constexpr = 448.0 if dtype == tl.float8e4nv else 127.0
    unit = largest(y, AXIS) / most
    y = y / tl.expand_dims(unit, AXIS)
    if dtype == tl.int8:
        y = y + tl.where(y < 0, -0.5, 0.5)  # conversion cuts off
    return tl.minimum(tl.maximum(y, -most), most), unit


@triton.jit
def _store(y, row, codes, scale, stride, COLUMNS: tl.constexpr, BLOCK: tl.constexpr, BLOCKS: tl.constexpr):
    """Quantizes a row y [BLOCK], zeros behind its columns; or, with BLOCKS, y [BLOCKS, 128]."""
    if BLOCKS > 0:
        y, unit = quantized(tl.reshape(y, (BLOCKS, BLOCK // BLOCKS)), codes.dtype.element_ty, 1)
        block = tl.arange(0, BLOCKS)
        tl.store(scale + block * stride + row, unit, mask=block < (COLUMNS + 127) // 128)
        y = tl.reshape(y, (BLOCK,))
    else:
        y, unit = quantized(tl.reshape(y, (1, BLOCK)), codes.dtype.element_ty, 1)
        tl.store(scale + row + tl.arange(0, 1), unit)
        y = tl.reshape(y, (BLOCK,))
    columns = tl.arange(0, BLOCK)
    tl.store(codes + row * COLUMNS + columns, y.to(codes.dtype.element_ty), mask=columns < COLUMNS)


@triton.jit
def _quantize(
    x,
    x_stride,
    codes,
    scale,
    stride,
    COLUMNS: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCKS: tl.constexpr,
    PDL: tl.constexpr,
):
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    y = tl.load(x + row * x_stride + columns, mask=columns < COLUMNS, other=0.0).to(tl.float32)
    _store(y, row, codes, scale, stride, COLUMNS, BLOCK, BLOCKS)


@triton.jit
def _silu_and_mul(
    x,
    codes,
    scale,
    stride,
    COLUMNS: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCKS: tl.constexpr,
    PDL: tl.constexpr,
):
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    inside = columns < COLUMNS
    at = x + row * (2 * COLUMNS) + columns
    gate = tl.load(at, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(at + COLUMNS, mask=inside, other=0.0).to(tl.float32)
    _store(gate / (1 + tl.exp(-gate)) * up, row, codes, scale, stride, COLUMNS, BLOCK, BLOCKS)


@triton.jit
def _add_norm(
    residual,
    parts,
    weight,
    codes,
    scale,
    stride,
    eps,
    rows,
    COLUMNS: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCKS: tl.constexpr,
    PARTS: tl.constexpr,
    PDL: tl.constexpr,
):
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    inside = columns < COLUMNS
    y = tl.load(residual + row * COLUMNS + columns, mask=inside, other=0.0).to(tl.float32)
    if PARTS > 0:
        for part in tl.static_range(PARTS):
            at = parts + (part * rows + row) * COLUMNS + columns
            y += tl.load(at, mask=inside, other=0.0).to(tl.float32)
        tl.store(residual + row * COLUMNS + columns, y.to(residual.dtype.element_ty), mask=inside)
    y = y * tl.rsqrt(tl.sum(y * y, 0) / COLUMNS + eps)
    y = y * tl.load(weight + columns, mask=inside, other=0.0).to(tl.float32)
    _store(y, row, codes, scale, stride, COLUMNS, BLOCK, BLOCKS)


def _sizes(columns: int, blocks: bool) -> dict[str, int]:
    block = triton.next_power_of_2(columns)
    return {"BLOCK": block, "BLOCKS": max(1, block // BLOCK) if blocks else 0}


def _launch(sizes: dict[str, int], pdl: bool) -> dict[str, int | bool]:
    return {"num_warps": min(16, max(1, sizes["BLOCK"] // 512)), "PDL": pdl, "launch_pdl": pdl}


def quantize(x: torch.Tensor, dtype: torch.dtype, blocks: bool = False, *, pdl: bool = True) -> Quantized:
    """x [tokens, columns], its columns neighbours, to E4M3 or int8. `blocks`: with scales of 128 columns."""
    tokens, columns = x.shape
    out = Quantized.empty(tokens, columns, dtype, blocks, x.device)
    sizes = _sizes(columns, blocks)
    _quantize[(tokens,)](
        x, x.stride(0), out.codes, out.scale, out.scale.stride(1), COLUMNS=columns, **sizes,
        **_launch(sizes, pdl),
    )  # fmt: skip
    return out


def silu_and_mul(x: torch.Tensor, dtype: torch.dtype, blocks: bool = False, *, pdl: bool = True) -> Quantized:
    """x [tokens, 2 * columns], gate and up -> silu(gate) * up."""
    tokens, columns = x.shape[0], x.shape[1] // 2
    out = Quantized.empty(tokens, columns, dtype, blocks, x.device)
    sizes = _sizes(columns, blocks)
    _silu_and_mul[(tokens,)](
        x, out.codes, out.scale, out.scale.stride(1), COLUMNS=columns, **sizes,
        **_launch(sizes, pdl),
    )  # fmt: skip
    return out


def add_norm(
    residual: torch.Tensor,
    parts: torch.Tensor | None,
    weight: torch.Tensor,
    eps: float,
    dtype: torch.dtype,
    blocks: bool = False,
    *,
    pdl: bool = True,
) -> Quantized:
    """residual [tokens, columns] += sum of `parts` [parts, tokens, columns]; -> the normalized residual times
    `weight` [columns]. In float32, rounded once."""
    tokens, columns = residual.shape
    out = Quantized.empty(tokens, columns, dtype, blocks, residual.device)
    sizes = _sizes(columns, blocks)
    _add_norm[(tokens,)](
        residual,
        residual if parts is None else parts,
        weight,
        out.codes,
        out.scale,
        out.scale.stride(1),
        eps,
        tokens,
        COLUMNS=columns,
        **sizes,
        PARTS=0 if parts is None else len(parts),
        **_launch(sizes, pdl),
    )
    return out
