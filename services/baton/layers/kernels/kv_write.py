"""Triton: writes a layer's keys and values of all tokens into the pool, in one launch.

Needs a GPU: import it where one is in use.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from baton.layers.kernels.qkv import limited, mark


@triton.jit
def _write(
    k,
    v,
    positions,
    slots,
    damage,
    tables,
    keys,
    values,
    kv_scales,
    table_stride,
    k_token,
    k_head,
    v_token,
    v_head,
    page_stride,
    token_stride,
    head_stride,
    most,
    DIM: tl.constexpr,
    PAGE: tl.constexpr,
    FP8: tl.constexpr,
    BLOCK: tl.constexpr,
):
    token, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    position = tl.load(positions + token)
    slot = tl.load(slots + token).to(tl.int64)
    page = tl.load(tables + slot * table_stride + position // PAGE).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    inside = columns < DIM
    at = page * page_stride + (position % PAGE) * token_stride + head * head_stride + columns
    key = tl.load(k + token * k_token + head * k_head + columns, mask=inside).to(tl.float32)
    value = tl.load(v + token * v_token + head * v_head + columns, mask=inside).to(tl.float32)
    mark(damage, slot, value, inside)
    if FP8:
        key = key / tl.load(kv_scales + head)
        value = value / tl.load(kv_scales + tl.num_programs(1) + head)
    tl.store(keys + at, limited(key, most, False), mask=inside)
    tl.store(values + at, limited(value, most, True), mask=inside)


def write_kv(
    k: torch.Tensor,
    v: torch.Tensor,
    positions: torch.Tensor,
    slots: torch.Tensor,
    damage: torch.Tensor,
    tables: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    kv_scales: torch.Tensor | None = None,
) -> None:
    """k, v [tokens, kv heads, head_dim], views with a contiguous last axis, into a layer's
    keys and values [pages, page_size, kv heads, head_dim], at the positions int32 [tokens] of their batch
    slots int32 [tokens], whose page tables are `tables` int32 [slots, pages]; damage: float32 [slots], see
    `qkv.mark`; kv_scales: float32
    [2, kv heads], where the pool is in FP8."""
    tokens, heads, dim = k.shape
    assert k.stride(2) == v.stride(2) == keys.stride(3) == 1 and keys.stride() == values.stride()
    _write[(tokens, heads)](
        k,
        v,
        positions,
        slots,
        damage,
        tables,
        keys,
        values,
        tables if kv_scales is None else kv_scales,
        tables.stride(0),
        k.stride(0),
        k.stride(1),
        v.stride(0),
        v.stride(1),
        keys.stride(0),
        keys.stride(1),
        keys.stride(2),
        torch.finfo(keys.dtype).max,
        DIM=dim,
        PAGE=keys.shape[1],
        FP8=kv_scales is not None,
        BLOCK=triton.next_power_of_2(dim),
        num_warps=1 if dim <= 128 else 4,
    )
