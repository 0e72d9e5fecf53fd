"""Triton: a projection of one token by a matrix of 8 or 4 bits, fused as `gemv` is.

The matrix is read as it is stored and computed with in float32. Needs a GPU: import it where one is in use.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from baton.layers.quantization.weight_method import QuantizedWeight

_PIECE = tl.constexpr(8)
"""Columns of the token that a thread reads at a time. Of 8 bits it reads as many of a row, of 4 bits four
times as many, so that both lie in the same threads."""


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


def _int4() -> str:
    """The products of four words of codes of 4 bits ($2 to $5) with words of 8 bits: those of the low halves
    of bytes ($6 to $9 -> $0), and 16 times those of the high ones ($10 to $13 -> $1)."""
    lines = [".reg .b32 a;"]
    for word in range(4):
        for half, mask in enumerate(("0x0f0f0f0f", "0xf0f0f0f0")):
            lines.append(f"and.b32 a, ${2 + word}, {mask};")
            before = f"${half}" if word else "0"
            lines.append(f"dp4a.u32.s32 ${half}, a, ${6 + 4 * half + word}, {before};")
    return "\n".join(["{", *lines, "}"])


_INT4 = tl.constexpr(_int4())
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
def _fourth(x):
    """[..., 4] -> its four parts"""
    even, odd = tl.split(tl.reshape(x, (x.shape[0], x.shape[1], 2, 2)))
    first, third = tl.split(even)
    second, fourth = tl.split(odd)
    return first, second, third, fourth


@triton.jit
def _in_8_bits(low, high):
    """16 columns of the token, [pieces, 1, 8] each -> the words that codes of 4 bits are multiplied with,
    what 1 stands for in them, and the columns' sum: [pieces, 1] each"""
    # Integers, so that a number that is none is the largest.
    most = tl.maximum(tl.abs(low).to(tl.int32, bitcast=True), tl.abs(high).to(tl.int32, bitcast=True))
    unit = tl.maximum(tl.max(most, 2), 0x0DA24260).to(tl.float32, bitcast=True) / 127
    even, odd = tl.split(tl.reshape(low, (low.shape[0], 1, 4, 2)))
    even_high, odd_high = tl.split(tl.reshape(high, (low.shape[0], 1, 4, 2)))
    factor = tl.broadcast_to((1 / unit)[:, :, None], even.shape)
    words = tl.inline_asm_elementwise(
        _PACK,
        "=r,f,f,f,f,f",
        [even, even_high, odd, odd_high, factor],
        dtype=tl.int32,
        is_pure=True,
        pack=1,
    )
    one, two, three, four = _fourth(words)
    added = tl.inline_asm_elementwise(
        _SUM, "=&r,r,r,r,r", [one, two, three, four], dtype=tl.int32, is_pure=True, pack=1
    )
    return one, two, three, four, unit, added.to(tl.float32) * unit


@triton.jit
def _four_bit_sum(codes, low, high, zero):
    """The products of each piece of 4 bits with the token, whose halves are in 8 bits: [pieces, rows]."""
    first, second, third, fourth = _fourth(codes)
    one, two, three, four, unit, added = low
    five, six, seven, eight, unit_high, added_high = high
    product, product_high = tl.inline_asm_elementwise(
        _INT4,
        "=&r,=&r,r,r,r,r,r,r,r,r,r,r,r,r",
        [first, second, third, fourth, one, two, three, four, five, six, seven, eight],
        dtype=(tl.int32, tl.int32),
        is_pure=True,
        pack=1,
    )
    total = product.to(tl.float32) * unit + product_high.to(tl.float32) * (unit_high / 16)
    return total - zero * (added + added_high)


@triton.jit
def _activations(x, norm, at, mask, squares, NORM: tl.constexpr):
    """x and the sum of its squares before it is multiplied with the norm's weight."""
    value = tl.load(x + at, mask=mask, other=0.0).to(tl.float32)
    if NORM:
        squares += value * value
        value = value * tl.load(norm + at, mask=mask, other=0.0).to(tl.float32)
    return value, squares


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
    words: tl.constexpr = 4 if BITS == 4 else 2
    wide: tl.constexpr = 32 * words // BITS
    total_pieces: tl.constexpr = K // wide
    n = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    pieces = tl.arange(0, PIECES)
    within = tl.arange(0, _PIECE)[None, None, :]
    at = (n.to(tl.int64)[None, :] * total_pieces + pieces[:, None])[:, :, None] * words
    at += tl.arange(0, words)[None, None, :]
    second = rows.to(tl.int64) * (total_pieces * words)
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
        low, squares = _activations(x, norm, k, there, squares, NORM)
        if BITS == 4:
            high, squares = _activations(x, norm, k + 8, there, squares, NORM)
            more, squares = _activations(x, norm, k + 16, there, squares, NORM)
            most, squares = _activations(x, norm, k + 24, there, squares, NORM)
            half, other = _in_8_bits(low, high), _in_8_bits(more, most)
            part = _four_bit_sum(w, half, other, z)
            if GATED:
                part_gate = _four_bit_sum(u, half, other, v)
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
        ahead = at + (start + PIECES) * words
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
    warps. Columns are a multiple of 16, of 4 bits of 32."""
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
        return 4, 1, 1 if weight.bits == 4 else 2
    deep = weight.shape[1] > 4096
    if weight.bits == 4 and rows > 1024:
        return (8, 1, 2) if rows > 2**16 else (8 if deep else 16, 1, 4)
    if weight.floating and rows > 1024 and not deep:
        return (4, 2, 2) if rows > 4096 else (8, 2, 4)
    return (4 if rows > 1024 else 2), 1, 4
