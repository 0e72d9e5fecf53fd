"""Triton: head norms, rotation and the write of keys and values into the pool, in one launch a layer.

Needs a GPU: import it where one is in use.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

_HEAD_BLOCK = 8


@triton.jit
def limited(x, most, value):
    """Within +-most. A value that is no number becomes 0, because FlashAttention 3 multiplies values that a
    row does not see by 0; `mark` says so. A key stays, so that whoever sees it has no numbers either."""
    bounded = tl.minimum(tl.maximum(x, -most), most)
    return tl.where(x == x, bounded, tl.where(value, 0.0, x))


@triton.jit
def mark(nan_flags, slot, x, mask):
    """Makes `nan_flags` NaN at the slot if one of x, float32, is infinite or no number. By its bits: where x
    is a product, x - x may be contracted to what rounding took from it. Attention alone would not tell: where
    FlashAttention 3 splits a row's keys, it leaves out parts without numbers."""
    exponent: tl.constexpr = 0x7F800000
    at = nan_flags + slot + tl.zeros_like(x).to(tl.int32)
    not_finite = (x.to(tl.int32, bitcast=True) & exponent) == exponent
    tl.store(at, tl.full(x.shape, float("nan"), tl.float32), mask=mask & not_finite)


@triton.jit
def _to_fp8(x, out, stride, SIZE: tl.constexpr, BLOCK: tl.constexpr):
    token, columns = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < SIZE
    value = tl.load(x + token * stride + columns, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + token * SIZE + columns, limited(value, 448.0, False), mask=inside)


def to_fp8(x: torch.Tensor) -> torch.Tensor:
    """x [tokens, heads, head_dim], each token contiguous, in e4m3, limited to its range; contiguous."""
    tokens, heads, dim = x.shape
    out = torch.empty(tokens, heads, dim, dtype=torch.float8_e4m3fn, device=x.device)
    block = min(triton.next_power_of_2(heads * dim), 1024)
    grid = tokens, triton.cdiv(heads * dim, block)
    _to_fp8[grid](x, out, x.stride(0), SIZE=heads * dim, BLOCK=block, num_warps=4)
    return out


@triton.jit
def _write_qkv(
    qkv,
    weight,
    rope,
    turns,
    positions,
    slots,
    nan_flags,
    tables,
    cache,
    kv_scales,
    row_stride,
    table_stride,
    page_stride,
    head_stride,
    eps,
    most,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    DIM: tl.constexpr,
    ROTARY: tl.constexpr,
    PAGE: tl.constexpr,
    NORM: tl.constexpr,
    FP8: tl.constexpr,
    HEAD_BLOCK: tl.constexpr,
    HALF_BLOCK: tl.constexpr,
    REST_BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    half: tl.constexpr = ROTARY // 2
    token = tl.program_id(0)
    heads = tl.program_id(1) * HEAD_BLOCK + tl.arange(0, HEAD_BLOCK)
    columns = tl.arange(0, HALF_BLOCK)
    inside = columns < half
    position = tl.load(positions + token)
    turn = tl.load(turns + token).to(tl.int64)
    slot = tl.load(slots + token).to(tl.int64)
    page = tl.load(tables + slot * table_stride + position // PAGE).to(tl.int64)
    mask = (heads < HEADS + 2 * KV_HEADS)[:, None] & inside[None, :]
    row = qkv + token.to(tl.int64) * row_stride
    at = heads[:, None] * DIM + columns[None, :]
    low = tl.load(row + at, mask=mask, other=0.0).to(tl.float32)
    high = tl.load(row + at + half, mask=mask, other=0.0).to(tl.float32)
    # Queries and keys are normalized and rotated, values are only copied.
    turned = (heads < HEADS + KV_HEADS)[:, None]
    x, y = low, high
    if ROTARY < DIM:
        # What follows the rotated values of a head.
        more = ROTARY + tl.arange(0, REST_BLOCK)
        beyond = (heads < HEADS + 2 * KV_HEADS)[:, None] & (more < DIM)[None, :]
        rest_at = heads[:, None] * DIM + more[None, :]
        rest = tl.load(row + rest_at, mask=beyond, other=0.0).to(tl.float32)
    if NORM:
        squares = tl.sum(low * low, 1) + tl.sum(high * high, 1)
        if ROTARY < DIM:
            squares += tl.sum(rest * rest, 1)
        scale = tl.rsqrt(squares / DIM + eps)[:, None]
        if ROTARY < DIM:
            factor = tl.load(weight + rest_at, mask=beyond & turned, other=0.0).to(tl.float32)
            rest = tl.where(turned, rest * scale * factor, rest)
        x = low * scale * tl.load(weight + at, mask=mask & turned, other=0.0).to(tl.float32)
        y = high * scale * tl.load(weight + at + half, mask=mask & turned, other=0.0).to(tl.float32)
    angle = rope + turn * ROTARY + columns
    cos = tl.load(angle, mask=inside, other=0.0)[None, :]
    sin = tl.load(angle + half, mask=inside, other=0.0)[None, :]
    low = tl.where(turned, x * cos - y * sin, low)
    high = tl.where(turned, y * cos + x * sin, high)
    query = (heads < HEADS)[:, None]
    tl.store(row + at, low, mask=mask & query)
    tl.store(row + at + half, high, mask=mask & query)
    kv = heads - HEADS
    value = (kv >= KV_HEADS).to(tl.int32)
    offset = (value * PAGE + position % PAGE) * DIM + (kv - value * KV_HEADS) * head_stride
    is_value = (value == 1)[:, None]
    if (tl.program_id(1) + 1) * HEAD_BLOCK > HEADS + KV_HEADS:
        mark(nan_flags, slot, low, mask & is_value)
        mark(nan_flags, slot, high, mask & is_value)
    if FP8:
        by = tl.load(kv_scales + kv, mask=(kv >= 0) & (kv < 2 * KV_HEADS), other=1.0)[:, None]
        low, high = low / by, high / by
    low, high = limited(low, most, is_value), limited(high, most, is_value)
    target = cache + page * page_stride + offset[:, None] + columns[None, :]
    tl.store(target, low, mask=mask & (query == 0))
    tl.store(target + half, high, mask=mask & (query == 0))
    if ROTARY < DIM:
        if NORM:
            tl.store(row + rest_at, rest, mask=beyond & query)
        mark(nan_flags, slot, rest, beyond & is_value)
        if FP8:
            rest = rest / by
        rest = limited(rest, most, is_value)
        target = cache + page * page_stride + offset[:, None] + more[None, :]
        tl.store(target, rest, mask=beyond & (query == 0))


def write_qkv(
    qkv: torch.Tensor,
    weight: torch.Tensor | None,
    rope: torch.Tensor,
    positions: torch.Tensor,
    slots: torch.Tensor,
    nan_flags: torch.Tensor,
    tables: torch.Tensor,
    cache: torch.Tensor,
    num_heads: int,
    eps: float,
    kv_scales: torch.Tensor | None = None,
    pdl: bool = True,
    turns: torch.Tensor | None = None,
) -> None:
    """Normalizes (where there is a weight) and rotates queries in place; keys too, into the pool, as values.

    qkv: [tokens, (heads + 2 kv heads) * head_dim], each token contiguous; weight: [heads + kv heads,
    head_dim]; rope: float32 [positions, rotary], cosines and then sines for the first values of each head;
    turns: int32 [tokens], the row of `rope` of each token, None: that of its position; positions, slots:
    int32 [tokens]; damage: float32 [slots], see `mark`; tables: int32 [slots, pages]; cache: a layer's pages,
    [pages, kv heads, 2, page_size, head_dim], each head contiguous; kv_scales: float32 [2, kv heads], where
    the cache is in FP8. Computes in float32 and rounds once. `pdl`: starts while
    the kernel before ends, and waits for it.
    """
    _, kv_heads, _, page_size, dim = cache.shape
    blocks = triton.cdiv(num_heads + 2 * kv_heads, _HEAD_BLOCK)
    _write_qkv[(qkv.shape[0], blocks)](
        qkv,
        rope if weight is None else weight,
        rope,
        positions if turns is None else turns,
        positions,
        slots,
        nan_flags,
        tables,
        cache,
        rope if kv_scales is None else kv_scales,
        qkv.stride(0),
        tables.stride(0),
        cache.stride(0),
        cache.stride(1),
        eps,
        torch.finfo(cache.dtype).max,
        HEADS=num_heads,
        KV_HEADS=kv_heads,
        DIM=dim,
        ROTARY=rope.shape[1],
        PAGE=page_size,
        NORM=weight is not None,
        FP8=kv_scales is not None,
        HEAD_BLOCK=_HEAD_BLOCK,
        HALF_BLOCK=triton.next_power_of_2(rope.shape[1] // 2),
        REST_BLOCK=triton.next_power_of_2(max(dim - rope.shape[1], 1)),
        PDL=pdl,
        num_warps=4,
        launch_pdl=pdl,
    )
