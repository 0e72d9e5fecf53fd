"""Triton: Gated DeltaNet (Yang et al., arXiv:2412.06464) over states in pages.

Rows of one token: one launch, in which a program reads a head's state, updates, writes and norms. Longer
rows: by pieces (`gated_delta_chunks`). With `StateRows.one_by_one` all rows go token by token: `_walk`. Needs
a GPU: import it where one is in use.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from baton.layers.batch import StateLocations, StateRows
from baton.layers.kernels.gated_delta_chunks import log_decay, longer_rows
from baton.layers.kernels.short_convolution import page_of

_WALKED = 16
"""Values of a head's state in a program of `_walk`."""


@triton.jit
def _step(
    mixed,
    z,
    gates,
    rates,
    biases,
    norm,
    out,
    states,
    tables,
    slots,
    positions,
    mixed_stride,
    z_stride,
    gates_stride,
    page_stride,
    table_stride,
    scale,
    eps,
    l2_eps,
    KEY_HEADS: tl.constexpr,
    HEADS: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    K_UP: tl.constexpr,
    V_UP: tl.constexpr,
    PAGE: tl.constexpr,
):
    row, head = tl.program_id(0), tl.program_id(1)
    key_head = head // (HEADS // KEY_HEADS)
    position, slot = tl.load(positions + row), tl.load(slots + row)
    read = page_of(tables, slot, table_stride, position - 1, PAGE)
    write = page_of(tables, slot, table_stride, position, PAGE)
    k, v = tl.arange(0, K_UP), tl.arange(0, V_UP)
    at = head * (K * V) + k[:, None] * V + v[None, :]
    inside = (k < K)[:, None] & (v < V)[None, :]
    state = tl.load(states + read * page_stride + at, mask=inside & (position > 0), other=0.0)
    projected = mixed + row.to(tl.int64) * mixed_stride
    query = tl.load(projected + key_head * K + k, mask=k < K, other=0.0).to(tl.float32)
    key = tl.load(projected + (KEY_HEADS + key_head) * K + k, mask=k < K, other=0.0).to(tl.float32)
    query = query * (tl.rsqrt(tl.sum(query * query, 0) + l2_eps) * scale)
    key = key * tl.rsqrt(tl.sum(key * key, 0) + l2_eps)
    value = tl.load(projected + 2 * KEY_HEADS * K + head * V + v, mask=v < V, other=0.0).to(tl.float32)
    gate = gates + row.to(tl.int64) * gates_stride + head
    beta = 1 / (1 + tl.exp(-tl.load(gate).to(tl.float32)))
    a = tl.load(gate + HEADS).to(tl.float32)
    state = state * tl.exp(log_decay(a, tl.load(rates + head), tl.load(biases + head)))
    change = (value - tl.sum(key[:, None] * state, 0)) * beta
    state += key[:, None] * change[None, :]
    tl.store(states + write * page_stride + at, state, mask=inside)
    result = tl.sum(query[:, None] * state, 0).to(out.dtype.element_ty).to(tl.float32)
    result = result * tl.rsqrt(tl.sum(result * result, 0) / V + eps)
    result = result * tl.load(norm + v, mask=v < V, other=0.0).to(tl.float32)
    open_by = tl.load(z + row.to(tl.int64) * z_stride + head * V + v, mask=v < V, other=0.0).to(tl.float32)
    result = result * open_by / (1 + tl.exp(-open_by))
    tl.store(out + (row.to(tl.int64) * HEADS + head) * V + v, result, mask=v < V)


@triton.jit
def _walk(
    mixed,
    gates,
    rates,
    biases,
    out,
    states,
    tables,
    slots,
    positions,
    pieces,
    starts,
    mixed_stride,
    gates_stride,
    page_stride,
    table_stride,
    scale,
    l2_eps,
    KEY_HEADS: tl.constexpr,
    HEADS: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    K_UP: tl.constexpr,
    PAGE: tl.constexpr,
    VALUES: tl.constexpr,
):
    low, high = tl.load(starts + tl.program_id(0)), tl.load(starts + tl.program_id(0) + 1)
    head = tl.program_id(1)
    key_head = head // (HEADS // KEY_HEADS)
    v = tl.program_id(2) * VALUES + tl.arange(0, VALUES)
    k = tl.arange(0, K_UP)
    begin = tl.load(pieces + low * 4 + 2)
    position, slot = tl.load(positions + begin), tl.load(slots + begin)
    page = page_of(tables, slot, table_stride, position - 1, PAGE)
    at = head * (K * V) + k[:, None] * V + v[None, :]
    inside = (k < K)[:, None] & (v < V)[None, :]
    state = tl.load(states + page * page_stride + at, mask=inside & (position > 0), other=0.0)
    rate, bias = tl.load(rates + head), tl.load(biases + head)
    for piece in range(low, high):
        first, count = tl.load(pieces + piece * 4), tl.load(pieces + piece * 4 + 1)
        for token in tl.range(first, first + count):
            where = tl.cast(token, tl.int64)
            projected = mixed + where * mixed_stride
            query = tl.load(projected + key_head * K + k, mask=k < K, other=0.0).to(tl.float32)
            key = tl.load(projected + (KEY_HEADS + key_head) * K + k, mask=k < K, other=0.0).to(tl.float32)
            value = tl.load(projected + 2 * KEY_HEADS * K + head * V + v, mask=v < V, other=0.0).to(
                tl.float32
            )
            gate = gates + where * gates_stride + head
            beta = 1 / (1 + tl.exp(-tl.load(gate).to(tl.float32)))
            a = tl.load(gate + HEADS).to(tl.float32)
            query = query * (tl.rsqrt(tl.sum(query * query, 0) + l2_eps) * scale)
            key = key * tl.rsqrt(tl.sum(key * key, 0) + l2_eps)
            state = state * tl.exp(log_decay(a, rate, bias))
            change = (value - tl.sum(key[:, None] * state, 0)) * beta
            state += key[:, None] * change[None, :]
            result = tl.sum(query[:, None] * state, 0)
            tl.store(out + (where * HEADS + head) * V + v, result, mask=v < V)
        if tl.load(pieces + piece * 4 + 3) != 0:
            page = page_of(tables, slot, table_stride, position + first + count - begin - 1, PAGE)
            tl.store(states + page * page_stride + at, state, mask=inside)


@triton.jit
def _norm(x, z, norm, out, z_stride, eps, HEADS: tl.constexpr, V: tl.constexpr, V_UP: tl.constexpr):
    token, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    v = tl.arange(0, V_UP)
    at = (token * HEADS + head) * V + v
    value = tl.load(x + at, mask=v < V, other=0.0).to(tl.float32)
    value = value * tl.rsqrt(tl.sum(value * value, 0) / V + eps)
    value = value * tl.load(norm + v, mask=v < V, other=0.0).to(tl.float32)
    open_by = tl.load(z + token * z_stride + head * V + v, mask=v < V, other=0.0).to(tl.float32)
    tl.store(out + at, value * open_by / (1 + tl.exp(-open_by)), mask=v < V)


def delta_rule(
    mixed: torch.Tensor,
    z: torch.Tensor,
    gates: torch.Tensor,
    rates: torch.Tensor,
    biases: torch.Tensor,
    norm: torch.Tensor,
    states: torch.Tensor,
    locations: StateLocations,
    rows: StateRows,
    key_heads: int,
    eps: float,
    l2_eps: float,
) -> torch.Tensor:
    """mixed [tokens, queries + keys + values], z [tokens, values], gates [tokens, 2 * heads] (of the update,
    of the decay), each token contiguous; rates and biases float32 [heads]; norm [value_dim]; states: float32
    [pages, heads, key_dim, value_dim], of each page contiguous, become those behind the rows -> [tokens,
    values], normed and gated. Computes in float32, chunks of 16-bit models with products in TF32."""
    heads, key_dim, value_dim = states.shape[1:]
    tokens = len(mixed)
    out = mixed.new_empty(tokens, heads * value_dim)
    tables, slots, positions, page_size = locations
    strides = states.stride(0), tables.stride(0)
    up = {"K_UP": max(16, triton.next_power_of_2(key_dim))}
    sizes = {"KEY_HEADS": key_heads, "HEADS": heads, "K": key_dim}
    scale = key_dim**-0.5
    value_up = triton.next_power_of_2(value_dim)
    if singles := rows.singles:
        _step[(singles, heads)](
            mixed,
            z,
            gates,
            rates,
            biases,
            norm,
            out,
            states,
            tables,
            slots,
            positions,
            mixed.stride(0),
            z.stride(0),
            gates.stride(0),
            *strides,
            scale,
            eps,
            l2_eps,
            V=value_dim,
            V_UP=value_up,
            PAGE=page_size,
            num_warps=8,
            **sizes,
            **up,
        )
    if rows.pieces is None or rows.starts is None:
        return out
    raw = torch.empty_like(out)
    where = states, tables, slots, positions, rows.pieces, rows.starts
    if rows.one_by_one:
        _walk[(len(rows.starts) - 1, heads, triton.cdiv(value_dim, _WALKED))](
            mixed,
            gates,
            rates,
            biases,
            raw,
            *where,
            mixed.stride(0),
            gates.stride(0),
            *strides,
            scale,
            l2_eps,
            V=value_dim,
            PAGE=page_size,
            VALUES=_WALKED,
            num_warps=1,
            **sizes,
            **up,
        )
    else:
        longer_rows(mixed, gates, rates, biases, raw, where, scale, l2_eps, {**sizes, **up}, page_size)
    longer = slice(rows.singles, None)
    _norm[(tokens - rows.singles, heads)](
        raw[longer],
        z[longer],
        norm,
        out[longer],
        z.stride(0),
        eps,
        HEADS=heads,
        V=value_dim,
        V_UP=value_up,
        num_warps=1,
    )
    return out
