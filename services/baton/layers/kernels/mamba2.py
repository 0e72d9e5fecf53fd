"""Triton: Mamba-2 (Dao and Gu, arXiv:2405.21060) over states in pages.

Rows of one token: one launch, in which a program has a head's state. Longer rows: one that passes through
pieces of 64 tokens with a part of a head's state in registers. Needs a GPU: import it where one is in use.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from baton.layers.batch import StateLocations, StateRows
from baton.layers.kernels.short_convolution import page_of

_VALUES = 32
"""Values of a head's state in a program of `_scan`."""


@triton.jit
def _size(x, bias, least, most):
    """Sizes of tokens' steps."""
    x = x.to(tl.float32) + bias
    x = tl.where(x > 20, x, tl.log(1 + tl.exp(tl.minimum(x, 20.0))))
    return tl.minimum(tl.maximum(x, least), most)


@triton.jit
def _step(
    mixed,
    gates,
    steps,
    rates,
    biases,
    skips,
    out,
    states,
    tables,
    slots,
    positions,
    mixed_stride,
    gates_stride,
    page_stride,
    table_stride,
    least,
    most,
    HEADS: tl.constexpr,
    GROUPS: tl.constexpr,
    N: tl.constexpr,
    P: tl.constexpr,
    N_UP: tl.constexpr,
    P_UP: tl.constexpr,
    PAGE: tl.constexpr,
):
    row, head = tl.program_id(0), tl.program_id(1)
    group = head // (HEADS // GROUPS)
    position, slot = tl.load(positions + row), tl.load(slots + row)
    read = page_of(tables, slot, table_stride, position - 1, PAGE)
    write = page_of(tables, slot, table_stride, position, PAGE)
    n, p = tl.arange(0, N_UP), tl.arange(0, P_UP)
    at = head * (N * P) + n[:, None] * P + p[None, :]
    inside = (n < N)[:, None] & (p < P)[None, :]
    state = tl.load(states + read * page_stride + at, mask=inside & (position > 0), other=0.0)
    projected = mixed + row.to(tl.int64) * mixed_stride
    keys = projected + HEADS * P + group * N + n
    key = tl.load(keys, mask=n < N, other=0.0).to(tl.float32)
    query = tl.load(keys + GROUPS * N, mask=n < N, other=0.0).to(tl.float32)
    value = tl.load(projected + head * P + p, mask=p < P, other=0.0).to(tl.float32)
    of_gates = row.to(tl.int64) * gates_stride + head
    size = _size(tl.load(steps + of_gates), tl.load(biases + head), least, most)
    state = state * tl.exp(-tl.load(rates + head) * size) + key[:, None] * (value * size)[None, :]
    tl.store(states + write * page_stride + at, state, mask=inside)
    result = tl.sum(query[:, None] * state, 0) + tl.load(skips + head) * value
    open_by = gates + row.to(tl.int64) * gates_stride + head * P + p
    gate = tl.load(open_by, mask=p < P, other=0.0).to(tl.float32)
    result = result * gate / (1 + tl.exp(-gate))
    tl.store(out + (row.to(tl.int64) * HEADS + head) * P + p, result, mask=p < P)


@triton.jit
def _scan(
    mixed,
    gates,
    steps,
    rates,
    biases,
    skips,
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
    least,
    most,
    HEADS: tl.constexpr,
    GROUPS: tl.constexpr,
    N: tl.constexpr,
    P: tl.constexpr,
    N_UP: tl.constexpr,
    PAGE: tl.constexpr,
    VALUES: tl.constexpr,
    PREC: tl.constexpr,
):
    low, high = tl.load(starts + tl.program_id(0)), tl.load(starts + tl.program_id(0) + 1)
    head = tl.program_id(1)
    p = tl.program_id(2) * VALUES + tl.arange(0, VALUES)
    n, i = tl.arange(0, N_UP), tl.arange(0, 64)
    begin = tl.load(pieces + low * 4 + 2)
    position, slot = tl.load(positions + begin), tl.load(slots + begin)
    page = page_of(tables, slot, table_stride, position - 1, PAGE)
    at = head * (N * P) + n[:, None] * P + p[None, :]
    inside = (n < N)[:, None] & (p < P)[None, :]
    state = tl.trans(tl.load(states + page * page_stride + at, mask=inside & (position > 0), other=0.0))
    keys = mixed + HEADS * P + head // (HEADS // GROUPS) * N
    rate, bias, skip = tl.load(rates + head), tl.load(biases + head), tl.load(skips + head)
    for piece in range(low, high):
        first, count = tl.load(pieces + piece * 4), tl.load(pieces + piece * 4 + 1)
        end = first + count
        token = first + i
        where = token.to(tl.int64)
        there = (token < end)[:, None]
        raw = tl.load(steps + where * gates_stride + head, mask=token < end, other=0.0)
        size = _size(raw, bias, least, most)
        size = tl.where(token < end, size, 0.0)
        passed, total = tl.cumsum(-rate * size, 0), tl.sum(-rate * size, 0)
        of_keys = where[:, None] * mixed_stride + n[None, :]
        key = tl.load(keys + of_keys, mask=there & (n < N)[None, :], other=0.0).to(tl.float32)
        query = tl.load(keys + GROUPS * N + of_keys, mask=there & (n < N)[None, :], other=0.0).to(tl.float32)
        of_values = where[:, None] * mixed_stride + head * P + p[None, :]
        value = tl.load(mixed + of_values, mask=there & (p < P)[None, :], other=0.0).to(tl.float32)
        change = tl.trans(value) * size[None, :]
        between = tl.where(i[:, None] <= i[None, :], passed[None, :] - passed[:, None], -float("inf"))
        seen = tl.dot(key, tl.trans(query), input_precision=PREC) * tl.exp(between)
        result = tl.dot(state, tl.trans(query), input_precision=PREC) * tl.exp(passed)[None, :]
        result = tl.trans(tl.dot(change, seen, result, input_precision=PREC)) + skip * value
        open_by = gates + where[:, None] * gates_stride + head * P + p[None, :]
        gate = tl.load(open_by, mask=there & (p < P)[None, :], other=0.0).to(tl.float32)
        to = out + (where[:, None] * HEADS + head) * P + p[None, :]
        tl.store(to, result * gate / (1 + tl.exp(-gate)), mask=there & (p < P)[None, :])
        left = change * tl.exp(total - passed)[None, :]
        state = tl.dot(left, key, state * tl.exp(total), input_precision=PREC)
        if tl.load(pieces + piece * 4 + 3) != 0:
            page = page_of(tables, slot, table_stride, position + end - begin - 1, PAGE)
            tl.store(states + page * page_stride + at, tl.trans(state), mask=inside)


def scan(
    mixed: torch.Tensor,
    gates: torch.Tensor,
    steps: torch.Tensor,
    rates: torch.Tensor,
    biases: torch.Tensor,
    skips: torch.Tensor,
    step_limits: tuple[float, float],
    groups: int,
    states: torch.Tensor,
    locations: StateLocations,
    rows: StateRows,
) -> torch.Tensor:
    """mixed [tokens, values + keys + queries]; gates [tokens, values] and steps [tokens, heads], parts of one
    tensor; of all each token contiguous; rates, biases and skips float32 [heads]; states: float32 [pages,
    heads, state_dim, head_dim], of each page contiguous, become those behind the rows -> float32 [tokens,
    values], gated. Computes in float32, chunks of 16-bit models with products in TF32."""
    heads, state_dim, head_dim = states.shape[1:]
    assert gates.stride(0) == steps.stride(0)
    out = torch.empty(len(mixed), heads * head_dim, dtype=torch.float32, device=mixed.device)
    inputs = mixed, gates, steps, rates, biases, skips, out, states, *locations[:3]
    strides = mixed.stride(0), gates.stride(0), states.stride(0), locations.tables.stride(0), *step_limits
    sizes = {"HEADS": heads, "GROUPS": groups, "N": state_dim, "P": head_dim, "PAGE": locations.page_size}
    sizes["N_UP"] = max(16, triton.next_power_of_2(state_dim))
    if singles := rows.singles:
        width = triton.next_power_of_2(head_dim)
        _step[(singles, heads)](*inputs, *strides, P_UP=width, num_warps=4, **sizes)
    if rows.pieces is None or rows.starts is None:
        return out
    assert not rows.one_by_one, "models with Mamba-2 are refused with batch_invariant"
    precision = "tf32x3" if mixed.dtype == torch.float32 else "tf32"
    # With four warps the tensor cores would read a tile of 64 rows from registers: see `tensor_cores`.
    _scan[(len(rows.starts) - 1, heads, triton.cdiv(head_dim, _VALUES))](
        *inputs,
        rows.pieces,
        rows.starts,
        *strides,
        VALUES=_VALUES,
        PREC=precision,
        num_warps=2,
        num_stages=1,
        **sizes,
    )
    return out
