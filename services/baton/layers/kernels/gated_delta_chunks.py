"""Triton: Gated DeltaNet of rows of several tokens, by pieces.

Within a piece of 64 tokens the changes of the state solve a triangular system. `_solve` inverts its matrix,
of all pieces at once, by blocks of 16 (as fla's solve_tril does); `_scan` passes through a row's pieces, with
a part of a head's state in registers. There the tall operand of products is transposed, so that tiles have 32
rows: with 64 the tensor cores would need what `tensor_cores` tells. Needs a GPU: import it where one is in
use.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from baton.layers.batch import PIECE
from baton.layers.kernels.short_convolution import page_of

_VALUES = 32
"""Values of a head's state in a program of `_scan`."""


@triton.jit
def log_decay(a, rate, bias):
    """-rate * softplus(a + bias)"""
    x = a + bias
    return -rate * tl.where(x > 20, x, tl.log(1 + tl.exp(tl.minimum(x, 20.0))))


@triton.jit
def _unit(x, at, mask, eps):
    """Vectors of x, which lie along the last axis, divided by their lengths; float32."""
    value = tl.load(x + at, mask=mask, other=0.0).to(tl.float32)
    return value * tl.rsqrt(tl.sum(value * value, 1) + eps)[:, None]


@triton.jit
def _product(x, y, left, right, end, stride, l2_eps, K: tl.constexpr, K_UP: tl.constexpr, PREC: tl.constexpr):
    """Of the unit vectors at x of 16 tokens from `left`, and those at y of 16 from `right`: [16, 16]."""
    rows, columns = tl.arange(0, 16)[:, None], tl.arange(0, K_UP)[None, :]
    inside = columns < K
    first, second = left + rows, right + rows
    x = _unit(x, first.to(tl.int64) * stride + columns, inside & (first < end), l2_eps)
    y = _unit(y, second.to(tl.int64) * stride + columns, inside & (second < end), l2_eps)
    return tl.dot(x, tl.trans(y), input_precision=PREC)


@triton.jit
def _gates(gates, first, count: tl.constexpr, end, stride, rate, bias, HEADS: tl.constexpr):
    """Logarithms of the decay, and factors of the update, of `count` tokens from `first`."""
    token = first + tl.arange(0, count)
    at, there = gates + token.to(tl.int64) * stride, token < end
    a = tl.load(at + HEADS, mask=there, other=0.0).to(tl.float32)
    beta = 1 / (1 + tl.exp(-tl.load(at, mask=there, other=0.0).to(tl.float32)))
    return tl.where(there, log_decay(a, rate, bias), 0.0), beta


@triton.jit
def _inverse(product, passed, beta):
    """Of 1 + A; A [16, 16]: the products of the keys below the diagonal, times `beta` and what has decayed
    between. Row by row; A is read through its transpose."""
    rows, columns = tl.arange(0, 16)[:, None], tl.arange(0, 16)[None, :]
    between = tl.where(rows < columns, passed[None, :] - passed[:, None], -float("inf"))
    transposed = product * beta[None, :] * tl.exp(between)
    inverse = tl.where(rows == columns, 1.0, 0.0)
    for row in range(1, 16):
        factors = tl.sum(tl.where(columns == row, transposed, 0.0), 1)
        inverse -= tl.where(rows == row, tl.sum(factors[:, None] * inverse, 0)[None, :], 0.0)
    return inverse


@triton.jit
def _put(out, value, first, i: tl.constexpr, j: tl.constexpr, end, HEADS: tl.constexpr):
    """Block (i, j) of a piece's matrix, [token, head, 64]."""
    rows, columns = tl.arange(0, 16)[:, None], tl.arange(0, 16)[None, :]
    token = first + 16 * i + rows
    tl.store(out + token.to(tl.int64) * (HEADS * 64) + 16 * j + columns, value, mask=token < end)


@triton.jit
def _solve(
    mixed,
    gates,
    rates,
    biases,
    inverses,
    scores,
    pieces,
    mixed_stride,
    gates_stride,
    scale,
    l2_eps,
    KEY_HEADS: tl.constexpr,
    HEADS: tl.constexpr,
    K: tl.constexpr,
    K_UP: tl.constexpr,
    PREC: tl.constexpr,
):
    piece, head = pieces + tl.program_id(0) * 4, tl.program_id(1)
    f0, count = tl.load(piece), tl.load(piece + 1)
    f1, f2, f3, end = f0 + 16, f0 + 32, f0 + 48, f0 + count
    q = mixed + head // (HEADS // KEY_HEADS) * K
    k = q + KEY_HEADS * K
    rate, bias = tl.load(rates + head), tl.load(biases + head)
    gates += head
    out, low = scores + head * 64, inverses + head * 64
    d0, b0 = _gates(gates, f0, 16, end, gates_stride, rate, bias, HEADS)
    d1, b1 = _gates(gates, f1, 16, end, gates_stride, rate, bias, HEADS)
    d2, b2 = _gates(gates, f2, 16, end, gates_stride, rate, bias, HEADS)
    d3, b3 = _gates(gates, f3, 16, end, gates_stride, rate, bias, HEADS)
    c0 = tl.cumsum(d0, 0)
    c1 = tl.cumsum(d1, 0) + tl.sum(d0, 0)
    c2 = tl.cumsum(d2, 0) + tl.sum(d0 + d1, 0)
    c3 = tl.cumsum(d3, 0) + tl.sum(d0 + d1 + d2, 0)
    lower = tl.arange(0, 16)[:, None] >= tl.arange(0, 16)[None, :]
    least = tl.where(lower, 0.0, -float("inf"))
    e10, e20, e30 = c1[:, None] - c0[None, :], c2[:, None] - c0[None, :], c3[:, None] - c0[None, :]
    e21, e31, e32 = c2[:, None] - c1[None, :], c3[:, None] - c1[None, :], c3[:, None] - c2[None, :]
    # Of the queries with the keys.
    s = _product(q, k, f0, f0, end, mixed_stride, l2_eps, K, K_UP, PREC) * scale
    _put(out, s * tl.exp(tl.where(lower, c0[:, None] - c0[None, :], least)), f0, 0, 0, end, HEADS)
    s = _product(q, k, f1, f1, end, mixed_stride, l2_eps, K, K_UP, PREC) * scale
    _put(out, s * tl.exp(tl.where(lower, c1[:, None] - c1[None, :], least)), f0, 1, 1, end, HEADS)
    s = _product(q, k, f2, f2, end, mixed_stride, l2_eps, K, K_UP, PREC) * scale
    _put(out, s * tl.exp(tl.where(lower, c2[:, None] - c2[None, :], least)), f0, 2, 2, end, HEADS)
    s = _product(q, k, f3, f3, end, mixed_stride, l2_eps, K, K_UP, PREC) * scale
    _put(out, s * tl.exp(tl.where(lower, c3[:, None] - c3[None, :], least)), f0, 3, 3, end, HEADS)
    s = _product(q, k, f1, f0, end, mixed_stride, l2_eps, K, K_UP, PREC) * scale
    _put(out, s * tl.exp(e10), f0, 1, 0, end, HEADS)
    s = _product(q, k, f2, f0, end, mixed_stride, l2_eps, K, K_UP, PREC) * scale
    _put(out, s * tl.exp(e20), f0, 2, 0, end, HEADS)
    s = _product(q, k, f3, f0, end, mixed_stride, l2_eps, K, K_UP, PREC) * scale
    _put(out, s * tl.exp(e30), f0, 3, 0, end, HEADS)
    s = _product(q, k, f2, f1, end, mixed_stride, l2_eps, K, K_UP, PREC) * scale
    _put(out, s * tl.exp(e21), f0, 2, 1, end, HEADS)
    s = _product(q, k, f3, f1, end, mixed_stride, l2_eps, K, K_UP, PREC) * scale
    _put(out, s * tl.exp(e31), f0, 3, 1, end, HEADS)
    s = _product(q, k, f3, f2, end, mixed_stride, l2_eps, K, K_UP, PREC) * scale
    _put(out, s * tl.exp(e32), f0, 3, 2, end, HEADS)
    # Blocks on the diagonal of the inverse, then those below it.
    t0 = _inverse(_product(k, k, f0, f0, end, mixed_stride, l2_eps, K, K_UP, PREC), c0, b0)
    t1 = _inverse(_product(k, k, f1, f1, end, mixed_stride, l2_eps, K, K_UP, PREC), c1, b1)
    t2 = _inverse(_product(k, k, f2, f2, end, mixed_stride, l2_eps, K, K_UP, PREC), c2, b2)
    t3 = _inverse(_product(k, k, f3, f3, end, mixed_stride, l2_eps, K, K_UP, PREC), c3, b3)
    x = _product(k, k, f1, f0, end, mixed_stride, l2_eps, K, K_UP, PREC) * b1[:, None]
    a10 = x * tl.exp(e10)
    x = _product(k, k, f2, f0, end, mixed_stride, l2_eps, K, K_UP, PREC) * b2[:, None]
    a20 = x * tl.exp(e20)
    x = _product(k, k, f3, f0, end, mixed_stride, l2_eps, K, K_UP, PREC) * b3[:, None]
    a30 = x * tl.exp(e30)
    x = _product(k, k, f2, f1, end, mixed_stride, l2_eps, K, K_UP, PREC) * b2[:, None]
    a21 = x * tl.exp(e21)
    x = _product(k, k, f3, f1, end, mixed_stride, l2_eps, K, K_UP, PREC) * b3[:, None]
    a31 = x * tl.exp(e31)
    x = _product(k, k, f3, f2, end, mixed_stride, l2_eps, K, K_UP, PREC) * b3[:, None]
    a32 = x * tl.exp(e32)
    t10 = -tl.dot(t1, tl.dot(a10, t0, input_precision=PREC), input_precision=PREC)
    t21 = -tl.dot(t2, tl.dot(a21, t1, input_precision=PREC), input_precision=PREC)
    t32 = -tl.dot(t3, tl.dot(a32, t2, input_precision=PREC), input_precision=PREC)
    x = tl.dot(a20, t0, input_precision=PREC)
    t20 = -tl.dot(t2, tl.dot(a21, t10, x, input_precision=PREC), input_precision=PREC)
    x = tl.dot(a31, t1, input_precision=PREC)
    t31 = -tl.dot(t3, tl.dot(a32, t21, x, input_precision=PREC), input_precision=PREC)
    x = tl.dot(a31, t10, tl.dot(a30, t0, input_precision=PREC), input_precision=PREC)
    t30 = -tl.dot(t3, tl.dot(a32, t20, x, input_precision=PREC), input_precision=PREC)
    _put(low, t0, f0, 0, 0, end, HEADS)
    _put(low, t10, f0, 1, 0, end, HEADS)
    _put(low, t1, f0, 1, 1, end, HEADS)
    _put(low, t20, f0, 2, 0, end, HEADS)
    _put(low, t21, f0, 2, 1, end, HEADS)
    _put(low, t2, f0, 2, 2, end, HEADS)
    _put(low, t30, f0, 3, 0, end, HEADS)
    _put(low, t31, f0, 3, 1, end, HEADS)
    _put(low, t32, f0, 3, 2, end, HEADS)
    _put(low, t3, f0, 3, 3, end, HEADS)


@triton.jit
def _scan(
    mixed,
    gates,
    rates,
    biases,
    inverses,
    scores,
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
    PREC: tl.constexpr,
):
    low, high = tl.load(starts + tl.program_id(0)), tl.load(starts + tl.program_id(0) + 1)
    head = tl.program_id(1)
    v = tl.program_id(2) * VALUES + tl.arange(0, VALUES)
    k, n = tl.arange(0, K_UP), tl.arange(0, 64)
    begin = tl.load(pieces + low * 4 + 2)
    position, slot = tl.load(positions + begin), tl.load(slots + begin)
    page = page_of(tables, slot, table_stride, position - 1, PAGE)
    at = head * (K * V) + k[:, None] * V + v[None, :]
    inside = (k < K)[:, None] & (v < V)[None, :]
    state = tl.trans(tl.load(states + page * page_stride + at, mask=inside & (position > 0), other=0.0))
    queries = mixed + head // (HEADS // KEY_HEADS) * K
    keys, values = queries + KEY_HEADS * K, mixed + 2 * KEY_HEADS * K + head * V
    rate, bias = tl.load(rates + head), tl.load(biases + head)
    lower = n[:, None] >= n[None, :]
    for piece in range(low, high):
        first, count = tl.load(pieces + piece * 4), tl.load(pieces + piece * 4 + 1)
        end = first + count
        token = first + n
        there, where = (token < end)[:, None], token.to(tl.int64)[:, None]
        decay, beta = _gates(gates + head, first, 64, end, gates_stride, rate, bias, HEADS)
        passed, total = tl.cumsum(decay, 0), tl.sum(decay, 0)
        of_keys = where * mixed_stride + k[None, :]
        key = _unit(keys, of_keys, there & (k < K)[None, :], l2_eps)
        value = tl.load(values + where * mixed_stride + v[None, :], mask=there & (v < V)[None, :], other=0.0)
        square = (where * HEADS + head) * 64 + n[None, :]
        known = there & lower & (n < count)[None, :]
        inverse = tl.load(inverses + square, mask=known, other=0.0)
        since = tl.exp(passed)[None, :]
        change = tl.trans(value.to(tl.float32))
        change -= tl.dot(state, tl.trans(key), input_precision=PREC) * since
        change = tl.dot(change * beta[None, :], tl.trans(inverse), input_precision=PREC)
        query = _unit(queries, of_keys, there & (k < K)[None, :], l2_eps) * scale
        score = tl.load(scores + square, mask=known, other=0.0)
        result = tl.dot(state, tl.trans(query), input_precision=PREC) * since
        result = tl.dot(change, tl.trans(score), result, input_precision=PREC)
        to = out + (where * HEADS + head) * V + v[None, :]
        tl.store(to, tl.trans(result), mask=there & (v < V)[None, :])
        left = change * tl.exp(total - passed)[None, :]
        state = tl.dot(left, key, state * tl.exp(total), input_precision=PREC)
        if tl.load(pieces + piece * 4 + 3) != 0:
            page = page_of(tables, slot, table_stride, position + end - begin - 1, PAGE)
            tl.store(states + page * page_stride + at, tl.trans(state), mask=inside)


_Where = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]
"""States, tables, slots, positions, pieces and starts: see `StateLocations` and `StateRows`."""


def longer_rows(
    mixed: torch.Tensor,
    gates: torch.Tensor,
    rates: torch.Tensor,
    biases: torch.Tensor,
    out: torch.Tensor,
    where: _Where,
    scale: float,
    l2_eps: float,
    sizes: dict[str, int],
    page_size: int,
) -> None:
    """Longer rows by pieces into `out`, neither normed nor gated."""
    states, tables, slots, positions, pieces, starts = where
    heads, _, value_dim = states.shape[1:]
    precision = "tf32x3" if mixed.dtype == torch.float32 else "tf32"
    inverses, scores = (
        torch.empty(len(mixed), heads, PIECE, dtype=torch.float32, device=mixed.device) for _ in range(2)
    )
    inputs = mixed, gates, rates, biases, inverses, scores
    _solve[(len(pieces), heads)](
        *inputs,
        pieces,
        mixed.stride(0),
        gates.stride(0),
        scale,
        l2_eps,
        PREC=precision,
        num_warps=1,
        **sizes,
    )
    _scan[(len(starts) - 1, heads, triton.cdiv(value_dim, _VALUES))](
        *inputs,
        out,
        states,
        tables,
        slots,
        positions,
        pieces,
        starts,
        mixed.stride(0),
        gates.stride(0),
        states.stride(0),
        tables.stride(0),
        scale,
        l2_eps,
        V=value_dim,
        PAGE=page_size,
        VALUES=_VALUES,
        PREC=precision,
        num_warps=4,
        num_stages=1,
        **sizes,
    )
