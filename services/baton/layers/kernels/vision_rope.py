"""Triton: the rotation of a vision tower's queries and keys, in place.

Needs a GPU: import it where one is in use.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

_HEAD_BLOCK = 8


@triton.jit
def _rotate(
    qkv,
    cos,
    sin,
    row_stride,
    HEADS: tl.constexpr,
    DIM: tl.constexpr,
    BLOCK: tl.constexpr,
    GROUP: tl.constexpr,
):
    half: tl.constexpr = DIM // 2
    token = tl.program_id(0).to(tl.int64)
    heads, columns = tl.program_id(1) * GROUP + tl.arange(0, GROUP), tl.arange(0, BLOCK)
    inside = columns < half
    mask = (heads < HEADS)[:, None] & inside[None, :]
    at = qkv + token * row_stride + heads[:, None] * DIM + columns[None, :]
    low = tl.load(at, mask=mask, other=0.0).to(tl.float32)
    high = tl.load(at + half, mask=mask, other=0.0).to(tl.float32)
    c = tl.load(cos + token * DIM + columns, mask=inside, other=0.0)[None, :]
    s = tl.load(sin + token * DIM + half + columns, mask=inside, other=0.0)[None, :]
    tl.store(at, low * c - high * s, mask=mask)
    tl.store(at + half, high * c + low * s, mask=mask)


def rotate(qkv: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> None:
    """`layers.rope.apply_rope` for queries and keys of qkv [patches, 3, heads, dim], contiguous. cos, sin:
    float32 [patches, 1, dim], the first half of `sin` negative. Computes in float32 and rounds once."""
    patches, _, heads, dim = qkv.shape
    grid = patches, triton.cdiv(2 * heads, _HEAD_BLOCK)
    block = triton.next_power_of_2(dim // 2)
    _rotate[grid](qkv, cos, sin, qkv.stride(0), HEADS=2 * heads, DIM=dim, BLOCK=block, GROUP=_HEAD_BLOCK)
