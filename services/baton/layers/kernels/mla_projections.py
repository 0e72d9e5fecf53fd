"""Triton: what surrounds attention to latents in the absorbed form, one launch before it and one behind it.

Needs a GPU: import it where one is in use.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

_WRITTEN = 4
"""Tokens whose latents one program writes."""


@triton.jit
def _turn(rope, position, source, target, there, ROTATED: tl.constexpr):
    """Rotates the values from `source` [n] on into those from `target` [n] on."""
    half = tl.arange(0, ROTATED // 2)
    mask = there[:, None]
    angle = rope + position.to(tl.int64)[:, None] * ROTATED + half[None, :]
    cos = tl.load(angle, mask=mask, other=0.0)
    sin = tl.load(angle + ROTATED // 2, mask=mask, other=0.0)
    low = tl.load(source[:, None] + half[None, :], mask=mask, other=0.0).to(tl.float32)
    high = tl.load(source[:, None] + ROTATED // 2 + half[None, :], mask=mask, other=0.0).to(tl.float32)
    tl.store(target[:, None] + half[None, :], low * cos - high * sin, mask=mask)
    tl.store(target[:, None] + ROTATED // 2 + half[None, :], high * cos + low * sin, mask=mask)


@triton.jit(do_not_specialize=["tokens", "q_stride", "latent_stride", "table_stride"])
def _absorb(
    q,
    latents,
    keys,
    norm,
    rope,
    positions,
    slots,
    tables,
    cache,
    out,
    tokens,
    q_stride,
    latent_stride,
    head_stride,
    table_stride,
    page_stride,
    eps,
    HEADS: tl.constexpr,
    PLAIN: tl.constexpr,
    PLAIN_UP: tl.constexpr,
    ROTATED: tl.constexpr,
    RANK: tl.constexpr,
    PAGE: tl.constexpr,
    BLOCK: tl.constexpr,
    COLUMNS: tl.constexpr,
    WRITTEN: tl.constexpr,
    PDL: tl.constexpr,
):
    WIDTH: tl.constexpr = RANK + ROTATED
    PARTS: tl.constexpr = RANK // COLUMNS
    job = tl.program_id(1)
    if PDL:
        gdc_launch_dependents()
    if job < HEADS * PARTS:
        head, part = job // PARTS, job % PARTS
        token = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
        there = token < tokens
        plain = tl.arange(0, PLAIN_UP)
        real = plain < PLAIN
        columns = part * COLUMNS + tl.arange(0, COLUMNS)
        # Weights do not depend on the previous kernel.
        weight_at = keys + head * head_stride + plain[:, None] * RANK + columns[None, :]
        w = tl.load(weight_at, mask=real[:, None], other=0.0)
        if PDL:
            gdc_wait()
        source = q + token.to(tl.int64) * q_stride + head * (PLAIN + ROTATED)
        x = tl.load(source[:, None] + plain[None, :], mask=there[:, None] & real[None, :], other=0.0)
        target = out + (token.to(tl.int64) * HEADS + head) * WIDTH
        y = tl.dot(x, w, input_precision="tf32x3")
        tl.store(target[:, None] + columns[None, :], y, mask=there[:, None])
        if part == 0:
            position = tl.load(positions + token, mask=there, other=0)
            _turn(rope, position, source + PLAIN, target + RANK, there, ROTATED)
    else:
        written = tl.program_id(0) * BLOCK + (job - HEADS * PARTS) * WRITTEN + tl.arange(0, WRITTEN)
        owned = written < tokens
        wide = tl.arange(0, RANK)
        weight = tl.load(norm + wide).to(tl.float32)
        if PDL:
            gdc_wait()
        at = tl.load(positions + written, mask=owned, other=0)
        slot = tl.load(slots + written, mask=owned, other=0).to(tl.int64)
        page = tl.load(tables + slot * table_stride + at // PAGE, mask=owned, other=0).to(tl.int64)
        entry = cache + page * page_stride + (at % PAGE) * WIDTH
        latent = latents + written.to(tl.int64) * latent_stride
        v = tl.load(latent[:, None] + wide[None, :], mask=owned[:, None], other=0.0).to(tl.float32)
        factor = tl.rsqrt(tl.sum(v * v, 1) / RANK + eps)
        tl.store(entry[:, None] + wide[None, :], v * factor[:, None] * weight[None, :], mask=owned[:, None])
        _turn(rope, at, latent + RANK, entry + RANK, owned, ROTATED)


@triton.jit(do_not_specialize=["tokens"])
def _project(
    attended,
    values,
    out,
    tokens,
    head_stride,
    HEADS: tl.constexpr,
    RANK: tl.constexpr,
    VALUE: tl.constexpr,
    BLOCK: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
    PDL: tl.constexpr,
):
    PARTS: tl.constexpr = (VALUE + COLUMNS - 1) // COLUMNS
    if PDL:
        gdc_launch_dependents()
    head, part = tl.program_id(1) // PARTS, tl.program_id(1) % PARTS
    token = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    there = token < tokens
    columns = part * COLUMNS + tl.arange(0, COLUMNS)
    real = columns < VALUE
    depth = tl.arange(0, DEPTH)
    weight = values + head * head_stride + columns[None, :] * RANK
    pair = token.to(tl.int64) * HEADS + head
    if PDL:
        gdc_wait()
    y = tl.zeros((BLOCK, COLUMNS), tl.float32)
    for start in tl.range(0, RANK, DEPTH):
        k = start + depth
        w = tl.load(weight + k[:, None], mask=real[None, :], other=0.0)
        x = tl.load(attended + pair[:, None] * RANK + k[None, :], mask=there[:, None], other=0.0)
        y = tl.dot(x, w, y, input_precision="tf32x3")
    target = out + (token.to(tl.int64) * HEADS + head)[:, None] * VALUE + columns[None, :]
    tl.store(target, y, mask=there[:, None] & real[None, :])


def absorb(
    q: torch.Tensor,
    latents: torch.Tensor,
    keys: torch.Tensor,
    norm: torch.Tensor,
    rope: torch.Tensor,
    positions: torch.Tensor,
    slots: torch.Tensor,
    tables: torch.Tensor,
    cache: torch.Tensor,
    eps: float,
    pdl: bool = True,
) -> torch.Tensor:
    """Rotates and absorbs queries; normalizes latents, rotates their keys and writes both into the pool.

    q: [tokens, heads * (plain + rotated)], latents: [tokens, rank + rotated], any stride between tokens;
    keys: [heads, plain, rank], each head's contiguous; norm: [rank]; rope: float32 [positions, rotated],
    cosines and then sines; positions, slots: int32 [tokens]; tables: int32 [slots, pages]; cache: a layer's
    [pages, page_size, rank + rotated], each page's contiguous. rank and rotated are powers of two.
    -> [tokens, heads, rank + rotated]. Sums are float32. `pdl`: starts while the kernel before ends.
    """
    tokens = q.shape[0]
    heads, plain, rank = keys.shape
    rotated = latents.shape[1] - rank
    block = _block(tokens)
    columns = min(rank, 128)
    out = torch.empty(tokens, heads, rank + rotated, dtype=q.dtype, device=q.device)
    written = triton.cdiv(min(tokens, block), _WRITTEN)
    _absorb[(triton.cdiv(tokens, block), heads * (rank // columns) + written)](
        q,
        latents,
        keys,
        norm,
        rope,
        positions,
        slots,
        tables,
        cache,
        out,
        tokens,
        q.stride(0),
        latents.stride(0),
        keys.stride(0),
        tables.stride(0),
        cache.stride(0),
        eps,
        HEADS=heads,
        PLAIN=plain,
        PLAIN_UP=max(16, triton.next_power_of_2(plain)),
        ROTATED=rotated,
        RANK=rank,
        PAGE=cache.shape[1],
        BLOCK=block,
        COLUMNS=columns,
        WRITTEN=_WRITTEN,
        PDL=pdl,
        num_warps=8 if block == 128 else 4,
        launch_pdl=pdl,
    )
    return out


def project(attended: torch.Tensor, values: torch.Tensor, out: torch.Tensor, pdl: bool = True) -> None:
    """Weighted latents [tokens, heads, rank] -> each head's values, `out` [tokens, heads, value], contiguous.

    values: [heads, value, rank], each head's contiguous; rank is a power of two. Sums are float32. `pdl`:
    starts while the kernel before ends, and waits for it.
    """
    tokens, heads, value = out.shape
    rank = values.shape[2]
    block = _block(tokens)
    columns = min(max(16, triton.next_power_of_2(value)), 32 if tokens <= 16 else 128)
    _project[(triton.cdiv(tokens, block), heads * triton.cdiv(value, columns))](
        attended,
        values,
        out,
        tokens,
        values.stride(0),
        HEADS=heads,
        RANK=rank,
        VALUE=value,
        BLOCK=block,
        COLUMNS=columns,
        DEPTH=min(rank, 64 if block == 128 else 128),
        PDL=pdl,
        num_warps=8 if block == 128 else 4,
        launch_pdl=pdl,
    )


def _block(tokens: int) -> int:
    """Tokens of a tile."""
    return 128 if tokens >= 512 else min(64, max(16, triton.next_power_of_2(tokens)))
