"""Triton: a projection of one token by a matrix of 8 or 4 bits, fused as `gemv` is.

The matrix is read as it is stored and computed with in float32. Needs a GPU: import it where one is in use.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from baton.layers.weights.method import QuantizedWeight

_PIECE = tl.constexpr(8)
"""Bytes of a row that a thread reads at a time: as many columns as it reads of the token, so that both lie
in the same threads."""


_FP8 = tl.constexpr(
    """{
    .reg .b16 low, high, a, b, c, d;
    .reg .b32 first, second;
    mov.b32 {low, high}, $4;
    cvt.rn.f16x2.e4m3x2 first, low;
    cvt.rn.f16x2.e4m3x2 second, high;
    mov.b32 {a, b}, first;
    mov.b32 {c, d}, second;
    cvt.f32.f16 $0, a;
    cvt.f32.f16 $1, b;
    cvt.f32.f16 $2, c;
    cvt.f32.f16 $3, d;
}"""
)
# A number of few bits among the bits behind a float's point: 2^23 + code, of which the first is taken away.
_INT8 = tl.constexpr(
    """{
    .reg .b32 t;
    xor.b32 t, $4, 0x80808080;
    prmt.b32 $0, t, 0x4b000000, 0x7650;
    prmt.b32 $1, t, 0x4b000000, 0x7651;
    prmt.b32 $2, t, 0x4b000000, 0x7652;
    prmt.b32 $3, t, 0x4b000000, 0x7653;
    add.f32 $0, $0, 0fCB000080;
    add.f32 $1, $1, 0fCB000080;
    add.f32 $2, $2, 0fCB000080;
    add.f32 $3, $3, 0fCB000080;
}"""
)
# Four numbers times a factor, rounded to 8 bits: the last byte of 1.5 * 2^23 + the product.
_PACK = tl.constexpr(
    """{
    .reg .b32 a, b, c, d;
    fma.rn.f32 a, $1, $5, 0f4B400000;
    fma.rn.f32 b, $2, $5, 0f4B400000;
    fma.rn.f32 c, $3, $5, 0f4B400000;
    fma.rn.f32 d, $4, $5, 0f4B400000;
    prmt.b32 a, a, b, 0x0040;
    prmt.b32 c, c, d, 0x0040;
    prmt.b32 $0, a, c, 0x5410;
}"""
)
# 16 times the product of two words of codes of 4 bits with four words of 8 bits: those of the low halves,
# then those of the high ones.
_INT4 = tl.constexpr(
    """{
    .reg .b32 low, high, a, b;
    and.b32 a, $1, 0x0f0f0f0f;
    and.b32 b, $1, 0xf0f0f0f0;
    dp4a.u32.s32 low, a, $3, 0;
    dp4a.u32.s32 high, b, $5, 0;
    and.b32 a, $2, 0x0f0f0f0f;
    and.b32 b, $2, 0xf0f0f0f0;
    dp4a.u32.s32 low, a, $4, low;
    dp4a.u32.s32 high, b, $6, high;
    mad.lo.s32 $0, low, 16, high;
}"""
)
_SUM = tl.constexpr(
    """{
    dp4a.s32.s32 $0, $1, 0x01010101, 0;
    dp4a.s32.s32 $0, $2, 0x01010101, $0;
    dp4a.s32.s32 $0, $3, 0x01010101, $0;
    dp4a.s32.s32 $0, $4, 0x01010101, $0;
}"""
)


@triton.jit
def quarters(x):
    """[pieces, 1, 8] -> what the four bytes of words are multiplied with: each [pieces, 1, 2]"""
    even, odd = tl.split(tl.reshape(x, (x.shape[0], 1, 2, 2, 2)))
    first, third = tl.split(even)
    second, fourth = tl.split(odd)
    return first, second, third, fourth


@triton.jit
def _piece_sum(codes, x, FLOATING: tl.constexpr):
    """The products of each piece of 8 bits with the token, added up: [pieces, rows]. Written for the
    processor: what the compiler makes of bytes takes twice as many instructions, which bound this kernel."""
    asm: tl.constexpr = _FP8 if FLOATING else _INT8
    first, second, third, fourth = tl.inline_asm_elementwise(
        asm,
        "=f,=f,=f,=f,r",
        [codes],
        (tl.float32, tl.float32, tl.float32, tl.float32),
        is_pure=True,
        pack=1,
    )
    return tl.sum(first * x[0] + second * x[1] + third * x[2] + fourth * x[3], 2)


@triton.jit
def _packed(x, factor):
    """x [pieces, 1, 8] * factor [pieces, 1] in 8 bits: two words, [pieces, 1] each"""
    first, second, third, fourth = quarters(x)
    factor = tl.broadcast_to(factor[:, :, None], first.shape)
    words = tl.inline_asm_elementwise(
        _PACK, "=r,f,f,f,f,f", [first, second, third, fourth, factor], dtype=tl.int32, is_pure=True, pack=1
    )
    return tl.split(words)


@triton.jit
def _four_bit_sum(codes, x, unit, total, zero):
    """The products of each piece of 4 bits with the token, in four words of 8 bits that count `unit` each and
    add up to `total`: [pieces, rows]."""
    first, second = tl.split(codes)
    product = tl.inline_asm_elementwise(
        _INT4,
        "=r,r,r,r,r,r,r",
        [first, second, x[0], x[1], x[2], x[3]],
        dtype=tl.int32,
        is_pure=True,
        pack=1,
    )
    return product.to(tl.float32) * (unit / 16) - zero * total


@triton.jit
def _gemv(
    x,
    weight,
    scale,
    zero,
    bias,
    norm,
    out,
    rows,
    eps,
    K: tl.constexpr,
    BITS: tl.constexpr,
    FLOATING: tl.constexpr,
    GROUP: tl.constexpr,
    GROUPS: tl.constexpr,
    SHARED: tl.constexpr,
    NORM: tl.constexpr,
    GATED: tl.constexpr,
    ADD: tl.constexpr,
    BIAS: tl.constexpr,
    ROWS: tl.constexpr,
    PIECES: tl.constexpr,
    PDL: tl.constexpr,
):
    # Pieces are the first axis, so that neighbouring threads take neighbours of them, and each all rows.
    # Weights do not depend on the previous kernel: the first are fetched while it ends.
    wide: tl.constexpr = 8 * _PIECE // BITS
    total_pieces: tl.constexpr = K // wide
    n = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    pieces = tl.arange(0, PIECES)
    within = tl.arange(0, _PIECE)[None, None, :]
    at = (n.to(tl.int64)[None, :] * total_pieces + pieces[:, None])[:, :, None] * 2
    at += tl.arange(0, 2)[None, None, :]
    second = rows.to(tl.int64) * (total_pieces * 2)
    here = (n < rows)[None, :]
    inside = here & (pieces < total_pieces)[:, None]
    scales = (n // SHARED)[None, :] * GROUPS + (pieces * wide // GROUP)[:, None]
    second_scales = rows // SHARED * GROUPS
    if PDL:
        gdc_launch_dependents()
    w = tl.load(weight + at, mask=inside[:, :, None], other=0, eviction_policy="evict_first")
    if GATED:
        u = tl.load(weight + second + at, mask=inside[:, :, None], other=0, eviction_policy="evict_first")
    if GROUPS > 1:
        s = tl.load(scale + scales, mask=inside, other=0.0)
        if GATED:
            t = tl.load(scale + second_scales + scales, mask=inside, other=0.0)
    if BITS == 4:
        z = tl.load(zero + scales, mask=inside, other=0.0)
        if GATED:
            v = tl.load(zero + second_scales + scales, mask=inside, other=0.0)
    if PDL:
        gdc_wait()
    total = tl.zeros((PIECES, ROWS), tl.float32)
    gate = tl.zeros((PIECES, ROWS), tl.float32)
    squares = tl.zeros((PIECES, 1, _PIECE), tl.float32)
    for start in range(0, total_pieces, PIECES):
        there = ((start + pieces) < total_pieces)[:, None, None]
        k = (start + pieces)[:, None, None] * wide + within
        low = tl.load(x + k, mask=there, other=0.0).to(tl.float32)
        high = low
        if NORM:
            squares += low * low
            low = low * tl.load(norm + k, mask=there, other=0.0).to(tl.float32)
        if BITS == 4:
            high = tl.load(x + k + _PIECE, mask=there, other=0.0).to(tl.float32)
            if NORM:
                squares += high * high
                high = high * tl.load(norm + k + _PIECE, mask=there, other=0.0).to(tl.float32)
        if BITS == 4:
            # Integers, so that a number that is none is the largest.
            most = tl.maximum(tl.abs(low).to(tl.int32, bitcast=True), tl.abs(high).to(tl.int32, bitcast=True))
            unit = tl.maximum(tl.max(most, 2), 0x0DA24260).to(tl.float32, bitcast=True) / 127
            one, two = _packed(low, 1 / unit)
            three, four = _packed(high, 1 / unit)
            words = one, two, three, four
            added = tl.inline_asm_elementwise(
                _SUM, "=&r,r,r,r,r", [one, two, three, four], dtype=tl.int32, is_pure=True, pack=1
            )
            added = added.to(tl.float32) * unit
            part = _four_bit_sum(w, words, unit, added, z)
            if GATED:
                part_gate = _four_bit_sum(u, words, unit, added, v)
        else:
            four = quarters(low)
            part = _piece_sum(w, four, FLOATING)
            if GATED:
                part_gate = _piece_sum(u, four, FLOATING)
        if GROUPS > 1:
            part *= s
            if GATED:
                part_gate *= t
        total += part
        if GATED:
            gate += part_gate
        following = here & ((start + PIECES + pieces) < total_pieces)[:, None]
        ahead = at + (start + PIECES) * 2
        w = tl.load(weight + ahead, mask=following[:, :, None], other=0, eviction_policy="evict_first")
        if GATED:
            u = tl.load(
                weight + second + ahead, mask=following[:, :, None], other=0, eviction_policy="evict_first"
            )
        if GROUPS > 1:
            later = (n // SHARED)[None, :] * GROUPS + ((start + PIECES + pieces) * wide // GROUP)[:, None]
            s = tl.load(scale + later, mask=following, other=0.0)
            if GATED:
                t = tl.load(scale + second_scales + later, mask=following, other=0.0)
            if BITS == 4:
                z = tl.load(zero + later, mask=following, other=0.0)
                if GATED:
                    v = tl.load(zero + second_scales + later, mask=following, other=0.0)
    y = tl.sum(total, 0)
    g = tl.sum(gate, 0)
    if GROUPS == 1:
        y *= tl.load(scale + n // SHARED, mask=n < rows, other=0.0)
        if GATED:
            g *= tl.load(scale + second_scales + n // SHARED, mask=n < rows, other=0.0)
    if NORM:
        factor = tl.rsqrt(tl.sum(tl.sum(tl.sum(squares, 2), 1), 0) / K + eps)
        y = y * factor
        g = g * factor
    if BIAS:
        y += tl.load(bias + n, mask=n < rows, other=0.0).to(tl.float32)
        if GATED:
            g += tl.load(bias + rows + n, mask=n < rows, other=0.0).to(tl.float32)
    if GATED:
        y = y / (1 + tl.exp(-y)) * g
    if ADD:
        y += tl.load(out + n, mask=n < rows, other=0.0).to(tl.float32)
    tl.store(out + n, y.to(out.dtype.element_ty), mask=n < rows)


def gemv(
    x: torch.Tensor,
    weight: QuantizedWeight,
    out: torch.Tensor | None,
    *,
    bias: torch.Tensor | None = None,
    norm: torch.Tensor | None = None,
    eps: float = 0.0,
    gated: bool = False,
    add: bool = False,
    block: tuple[int, int, int] | None = None,
    pdl: bool = True,
) -> torch.Tensor:
    """As `gemv.gemv`. `block`: rows of a tile, pieces of each that a thread takes at a time, and
    warps. Columns are a multiple of 16."""
    columns = weight.shape[1]
    rows = weight.shape[0] // 2 if gated else weight.shape[0]
    if out is None:
        out = x.new_empty(1, rows)
    tile, pieces, warps = block or _block(rows, weight, gated)
    _gemv[(triton.cdiv(rows, tile),)](
        x,
        weight.codes.view(torch.int32),
        weight.scale,
        weight.scale if weight.zero is None else weight.zero,
        x if bias is None else bias,
        x if norm is None else norm,
        out,
        rows,
        eps,
        K=columns,
        BITS=weight.bits,
        FLOATING=weight.floating,
        GROUP=weight.group,
        GROUPS=weight.scale.shape[1],
        SHARED=weight.block,
        NORM=norm is not None,
        GATED=gated,
        ADD=add,
        BIAS=bias is not None,
        ROWS=tile,
        PIECES=32 * warps * pieces,
        PDL=pdl,
        num_warps=warps,
        launch_pdl=pdl,
    )
    return out


def _block(rows: int, weight: QuantizedWeight, gated: bool) -> tuple[int, int, int]:
    """Rows of a tile, pieces a thread, warps: the best of about ten tried on an H200 for each matrix of an 8B
    model, in a graph of whole layers."""
    if gated:
        return 4, 1, 2
    deep = weight.shape[1] > 4096
    if weight.bits == 4 and rows > 1024:
        return (8, 1, 2) if rows > 2**16 else (8, 1, 4) if deep else (8, 2, 4)
    if weight.floating and rows > 1024 and not deep:
        return (4, 2, 2) if rows > 4096 else (8, 2, 4)
    return (4 if rows > 1024 else 2), 1, 4
