"""Triton: the experts of one to a few tokens, each chosen expert's weights streamed past its token.

The style of `gemv`. Needs a GPU: import it where one is in use.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from baton.layers.experts import Experts, Router
from baton.layers.kernels.routing import constants, ranked_experts

Block = tuple[int, int, int, int]
"""Rows and columns of a tile of weights, warps, stages."""


@triton.jit
def _gate_up(
    x,
    norm,
    logits,
    bias,
    correction,
    experts,
    weights,
    weight,
    out,
    scale,
    eps,
    K: tl.constexpr,
    INNER: tl.constexpr,
    NORM: tl.constexpr,
    CHOOSE: tl.constexpr,
    PARTS: tl.constexpr,
    EXPERTS: tl.constexpr,
    BLOCK: tl.constexpr,
    TOP_K: tl.constexpr,
    SIGMOID: tl.constexpr,
    RENORMALIZE: tl.constexpr,
    BIAS: tl.constexpr,
    CORRECTION: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    STAGES: tl.constexpr,
    PDL: tl.constexpr,
):
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    pair = tl.program_id(1)
    if CHOOSE:
        rank, score = ranked_experts(
            logits,
            bias,
            correction,
            EXPERTS,
            PARTS,
            EXPERTS,
            BLOCK,
            TOP_K,
            SIGMOID,
            RENORMALIZE,
            BIAS,
            CORRECTION,
        )
        expert = tl.minimum(tl.sum(tl.where(rank == pair, tl.arange(0, BLOCK), 0), 0), EXPERTS - 1)
        if tl.program_id(0) == 0:
            tl.store(experts + pair, expert)
            tl.store(weights + pair, tl.sum(tl.where(rank == pair, score, 0.0), 0) * scale)
    else:
        expert = tl.load(experts + pair)
    n = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    columns = tl.arange(0, COLUMNS)
    gate_at = weight + (expert.to(tl.int64) * (2 * INNER) + n)[:, None] * K + columns[None, :]
    token = x + (pair // TOP_K).to(tl.int64) * K + columns
    inside = (n < INNER)[:, None]
    gate = tl.zeros((ROWS, COLUMNS), tl.float32)
    up = tl.zeros((ROWS, COLUMNS), tl.float32)
    squares = tl.zeros((COLUMNS,), tl.float32)
    for start in tl.range(0, K, COLUMNS, num_stages=STAGES):
        there = start + columns < K
        mask = inside & there[None, :]
        g = tl.load(gate_at + start, mask=mask, other=0.0, eviction_policy="evict_first")
        u = tl.load(gate_at + INNER * K + start, mask=mask, other=0.0, eviction_policy="evict_first")
        value = tl.load(token + start, mask=there, other=0.0).to(tl.float32)
        if NORM:
            squares += value * value
            value = value * tl.load(norm + start + columns, mask=there, other=0.0).to(tl.float32)
        gate += g.to(tl.float32) * value[None, :]
        up += u.to(tl.float32) * value[None, :]
    y = tl.sum(gate, 1)
    z = tl.sum(up, 1)
    if NORM:
        factor = tl.rsqrt(tl.sum(squares, 0) / K + eps)
        y = y * factor
        z = z * factor
    y = y / (1 + tl.exp(-y)) * z
    tl.store(out + pair.to(tl.int64) * INNER + n, y, mask=n < INNER)


@triton.jit
def _down(
    x,
    experts,
    weights,
    weight,
    out,
    HIDDEN: tl.constexpr,
    INNER: tl.constexpr,
    TOP_K: tl.constexpr,
    ADD: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    STAGES: tl.constexpr,
    PDL: tl.constexpr,
):
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    token = tl.program_id(1)
    n = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    columns = tl.arange(0, COLUMNS)
    inside = (n < HIDDEN)[:, None]
    steps: tl.constexpr = (INNER + COLUMNS - 1) // COLUMNS
    total = tl.zeros((ROWS, COLUMNS), tl.float32)
    for step in tl.range(0, TOP_K * steps, num_stages=STAGES):
        pair = token * TOP_K + step // steps
        k = step % steps * COLUMNS + columns
        there = k < INNER
        expert = tl.load(experts + pair).to(tl.int64)
        at = weight + (expert * HIDDEN + n)[:, None] * INNER + k[None, :]
        w = tl.load(at, mask=inside & there[None, :], other=0.0, eviction_policy="evict_first")
        value = tl.load(x + pair * INNER + k, mask=there, other=0.0).to(tl.float32)
        value = value * tl.load(weights + pair)
        total += w.to(tl.float32) * value[None, :]
    y = tl.sum(total, 1)
    target = out + token.to(tl.int64) * HIDDEN + n
    if ADD:
        y += tl.load(target, mask=n < HIDDEN, other=0.0).to(tl.float32)
    tl.store(target, y, mask=n < HIDDEN)


def gate_up_one(
    x: torch.Tensor,
    norm: torch.Tensor,
    eps: float,
    logits: torch.Tensor,
    router: Router,
    experts: Experts,
    *,
    block: Block | None = None,
    pdl: bool = True,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Chooses the experts of one token x [1, hidden] by its scores `logits` [1, experts]; silu(gate) * up of
    each, of x normalized with `norm` [hidden]. -> inner [top_k, inner], weights float32 and experts int32
    [1, top_k]. The router has no groups."""
    top_k = router.routing.top_k
    weights = torch.empty(1, top_k, dtype=torch.float32, device=x.device)
    chosen = torch.empty(1, top_k, dtype=torch.int32, device=x.device)
    out = torch.empty(top_k, experts.inner, dtype=x.dtype, device=x.device)
    _launch_gate_up(x, norm, eps, logits, router, experts, chosen, weights, out, block or ONE_GATE_UP, pdl)
    return out, weights, chosen


def gate_up(
    x: torch.Tensor,
    router: Router,
    experts: Experts,
    chosen: torch.Tensor,
    *,
    block: Block | None = None,
    pdl: bool = True,
) -> torch.Tensor:
    """silu(gate) * up of each token's experts: x [tokens, hidden], chosen int32 [tokens, top_k] ->
    [tokens * top_k, inner]"""
    out = torch.empty(chosen.numel(), experts.inner, dtype=x.dtype, device=x.device)
    _launch_gate_up(x, None, 0.0, None, router, experts, chosen, None, out, block or FEW_GATE_UP, pdl)
    return out


def _launch_gate_up(
    x: torch.Tensor,
    norm: torch.Tensor | None,
    eps: float,
    logits: torch.Tensor | None,
    router: Router,
    experts: Experts,
    chosen: torch.Tensor,
    weights: torch.Tensor | None,
    out: torch.Tensor,
    block: Block,
    pdl: bool,
) -> None:
    rows, columns, warps, stages = block
    _gate_up[(triton.cdiv(experts.inner, rows), chosen.numel())](
        x,
        x if norm is None else norm,
        x if logits is None else logits,
        x,
        x if router.correction is None else router.correction,
        chosen,
        x if weights is None else weights,
        experts.gate_up,
        out,
        router.routing.scale,
        eps,
        K=x.shape[1],
        INNER=experts.inner,
        NORM=norm is not None,
        CHOOSE=logits is not None,
        **constants(router, 1) | {"BIAS": False},
        ROWS=rows,
        COLUMNS=columns,
        STAGES=stages,
        PDL=pdl,
        num_warps=warps,
        launch_pdl=pdl,
    )


def down(
    x: torch.Tensor,
    experts: Experts,
    weights: torch.Tensor,
    chosen: torch.Tensor,
    out: torch.Tensor,
    *,
    add: bool = False,
    block: Block | None = None,
    pdl: bool = True,
) -> None:
    """The weighted sum of each token's experts, from what `gate_up` returned, into `out` [tokens, hidden];
    `add`: added to what it holds. In float32, rounded once."""
    _, hidden, inner = experts.down.shape
    rows, columns, warps, stages = block or (ONE_DOWN if len(chosen) == 1 else FEW_DOWN)
    _down[(triton.cdiv(hidden, rows), len(chosen))](
        x,
        chosen,
        weights,
        experts.down,
        out,
        HIDDEN=hidden,
        INNER=inner,
        TOP_K=chosen.shape[1],
        ADD=add,
        ROWS=rows,
        COLUMNS=columns,
        STAGES=stages,
        PDL=pdl,
        num_warps=warps,
        launch_pdl=pdl,
    )


ONE_GATE_UP: Block = (8, 512, 4, 1)
FEW_GATE_UP: Block = (1, 1024, 8, 1)
ONE_DOWN: Block = (2, 1024, 4, 1)
FEW_DOWN: Block = (8, 256, 4, 1)
