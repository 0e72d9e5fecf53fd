"""Triton: activations, gates and what they multiply. Needs a GPU: import it where one is in use."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from baton.layers.moe import ClampedSwiglu, Experts


@triton.jit
def gated(gate, up, CLAMPED: tl.constexpr, ALPHA: tl.constexpr, LIMIT: tl.constexpr):
    """float32: silu(gate) * up, or gpt-oss' activation: `experts.ClampedSwiglu`."""
    if CLAMPED:
        # As torch's clamp does, they keep what is no number.
        gate = tl.minimum(gate, LIMIT, propagate_nan=tl.PropagateNan.ALL)
        up = tl.clamp(up, -LIMIT, LIMIT, propagate_nan=tl.PropagateNan.ALL) + 1
        return gate / (1 + tl.exp(-ALPHA * gate)) * up
    else:
        return gate / (1 + tl.exp(-gate)) * up


def gating(experts: Experts) -> dict[str, bool | float]:
    """Arguments of `gated`."""
    kind = experts.activation
    if isinstance(kind, ClampedSwiglu):
        return {"CLAMPED": True, "ALPHA": kind.alpha, "LIMIT": kind.limit}
    return {"CLAMPED": False, "ALPHA": 1.0, "LIMIT": 0.0}


@triton.jit
def _open_by(x, gates, gates_stride, SIZE: tl.constexpr, BLOCK: tl.constexpr):
    token, column = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < SIZE
    gate = tl.load(gates + token * gates_stride + column, mask=inside, other=0.0).to(tl.float32)
    value = tl.load(x + token * SIZE + column, mask=inside, other=0.0).to(tl.float32)
    tl.store(x + token * SIZE + column, value / (1 + tl.exp(-gate)), mask=inside)


def open_by(x: torch.Tensor, gates: torch.Tensor) -> None:
    """x [tokens, heads, dim], contiguous, times the sigmoid of `gates` of that shape, each token contiguous;
    in place, in float32, rounded once."""
    tokens, heads, dim = x.shape
    size = heads * dim
    _open_by[(tokens, triton.cdiv(size, 1024))](x, gates, gates.stride(0), SIZE=size, BLOCK=1024, num_warps=4)


@triton.jit
def _weighed(gate_up, x, weight, out, HIDDEN: tl.constexpr, INNER: tl.constexpr, BLOCK: tl.constexpr):
    token = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    total = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, HIDDEN, BLOCK):
        inside = start + column < HIDDEN
        value = tl.load(x + token * HIDDEN + start + column, mask=inside, other=0.0).to(tl.float32)
        total += value * tl.load(weight + start + column, mask=inside, other=0.0).to(tl.float32)
    share = 1 / (1 + tl.exp(-tl.sum(total, 0)))
    for start in range(0, INNER, BLOCK):
        inside = start + column < INNER
        gate_at = gate_up + token * (2 * INNER) + start + column
        gate = tl.load(gate_at, mask=inside, other=0.0).to(tl.float32)
        up = tl.load(gate_at + INNER, mask=inside, other=0.0).to(tl.float32)
        tl.store(out + token * INNER + start + column, gate / (1 + tl.exp(-gate)) * up * share, mask=inside)


def weighed(gate_up: torch.Tensor, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """silu(gate) * up of [tokens, 2 * inner], times the sigmoid of x [tokens, hidden] times `weight`
    [1, hidden] -> [tokens, inner]. All are contiguous. In float32, rounded once, a token like any other."""
    tokens, inner = len(x), gate_up.shape[1] // 2
    out = x.new_empty(tokens, inner)
    _weighed[(tokens,)](gate_up, x, weight, out, HIDDEN=x.shape[1], INNER=inner, BLOCK=1024, num_warps=4)
    return out
