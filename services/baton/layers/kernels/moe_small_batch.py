"""Triton: the experts of one to a few tokens, each chosen expert's weights streamed past its token.

The style of `gemv`. Needs a GPU: import it where one is in use.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from baton.layers.kernels import moe_small_batch_int4
from baton.layers.kernels.activation import gated, gating
from baton.layers.kernels.moe_align import chosen_expert, constants, on_this_rank
from baton.layers.kernels.moe_small_batch_int4 import BlockSizes
from baton.layers.mlp import GatedMlp
from baton.layers.moe import Experts
from baton.layers.moe_routing import MoeGate

DownBlock = tuple[int, int, int, int, int]
"""Choices taken together, rows and columns of each, warps, and steps that are unrolled."""


@triton.jit
def _gate_up(
    x,
    norm,
    logits,
    correction,
    experts,
    weights,
    weight,
    unit,
    shared,
    share,
    expert_bias,
    out,
    scale,
    eps,
    K: tl.constexpr,
    HELD: tl.constexpr,
    INNER: tl.constexpr,
    SHARED: tl.constexpr,
    SHARE: tl.constexpr,
    SCALED: tl.constexpr,
    NORM: tl.constexpr,
    CHOOSE: tl.constexpr,
    EXPERTS: tl.constexpr,
    BLOCK: tl.constexpr,
    TOP_K: tl.constexpr,
    SIGMOID: tl.constexpr,
    RENORMALIZE: tl.constexpr,
    CORRECTION: tl.constexpr,
    EXPERT_BIAS: tl.constexpr,
    CLAMPED: tl.constexpr,
    ALPHA: tl.constexpr,
    LIMIT: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    STAGES: tl.constexpr,
    PDL: tl.constexpr,
):
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    token, pair = tl.program_id(1) // (TOP_K + SHARED), tl.program_id(1) % (TOP_K + SHARED)
    if CHOOSE:
        expert = chosen_expert(
            logits,
            correction,
            weights,
            experts,
            pair,
            scale,
            (tl.program_id(0) == 0) & (pair < TOP_K),
            EXPERTS,
            BLOCK,
            TOP_K,
            SIGMOID,
            RENORMALIZE,
            CORRECTION,
        )
    else:
        expert = tl.load(experts + token * TOP_K + pair, mask=pair < TOP_K, other=0)
    mine, expert = on_this_rank(expert, HELD)
    n = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    columns = tl.arange(0, COLUMNS)
    gate_at = weight + (expert.to(tl.int64) * (2 * INNER) + n)[:, None] * K + columns[None, :]
    gap = tl.full((), INNER * K, tl.int32)
    if SHARED:
        # All shared experts are one gated layer, whose rows of up follow all those of gate.
        common = pair >= TOP_K
        shared_at = shared + ((pair - TOP_K) * INNER + n).to(tl.int64)[:, None] * K + columns[None, :]
        gate_at = tl.where(common, shared_at, gate_at)
        gap = tl.where(common, SHARED * INNER * K, gap)
    source = x + token.to(tl.int64) * K + columns
    inside = (n < tl.where(mine, INNER, 0))[:, None]
    unit_row = expert.to(tl.int64) * (2 * INNER) + tl.program_id(0) * ROWS
    blocks: tl.constexpr = K // 128
    gate = tl.zeros((ROWS, COLUMNS), tl.float32)
    up = tl.zeros((ROWS, COLUMNS), tl.float32)
    squares = tl.zeros((COLUMNS,), tl.float32)
    shares = tl.zeros((COLUMNS,), tl.float32)
    for start in tl.range(0, K, COLUMNS, num_stages=STAGES):
        there = start + columns < K
        mask = inside & there[None, :]
        g = tl.load(gate_at + start, mask=mask, other=0.0, eviction_policy="evict_first")
        u = tl.load(gate_at + gap + start, mask=mask, other=0.0, eviction_policy="evict_first")
        value = tl.load(source + start, mask=there, other=0.0).to(tl.float32)
        if NORM:
            squares += value * value
            value = value * tl.load(norm + start + columns, mask=there, other=0.0).to(tl.float32)
        if SHARE:
            shares += value * tl.load(share + start + columns, mask=there & common, other=0.0).to(tl.float32)
        second = value
        if SCALED == "blocks":
            # A tile's rows are of one block, so that scales multiply the token.
            at = unit + unit_row // 128 * blocks + (start + columns) // 128
            second = value * tl.load(at + INNER // 128 * blocks, mask=there, other=0.0)
            value = value * tl.load(at, mask=there, other=0.0)
        gate += g.to(tl.float32) * value[None, :]
        up += u.to(tl.float32) * second[None, :]
    y = tl.sum(gate, 1)
    z = tl.sum(up, 1)
    if SCALED == "rows":
        at = unit + expert.to(tl.int64) * (2 * INNER) + n
        y = y * tl.load(at, mask=n < INNER, other=0.0)
        z = z * tl.load(at + INNER, mask=n < INNER, other=0.0)
    open_by = tl.sum(shares, 0)
    if NORM:
        factor = tl.rsqrt(tl.sum(squares, 0) / K + eps)
        y = y * factor
        z = z * factor
        open_by = open_by * factor
    if EXPERT_BIAS:
        expert_at = expert_bias + expert.to(tl.int64) * (2 * INNER) + n
        y += tl.load(expert_at, mask=n < INNER, other=0.0).to(tl.float32)
        z += tl.load(expert_at + INNER, mask=n < INNER, other=0.0).to(tl.float32)
    y = gated(y, z, CLAMPED, ALPHA, LIMIT)
    if SHARE:
        y = tl.where(common, y / (1 + tl.exp(-open_by)), y)
    tl.store(out + tl.program_id(1).to(tl.int64) * INNER + n, y, mask=n < INNER)


@triton.jit
def _down(
    x,
    experts,
    weights,
    weight,
    unit,
    shared,
    expert_bias,
    out,
    HIDDEN: tl.constexpr,
    HELD: tl.constexpr,
    INNER: tl.constexpr,
    SHARED: tl.constexpr,
    SCALED: tl.constexpr,
    TOP_K: tl.constexpr,
    ADD: tl.constexpr,
    EXPERT_BIAS: tl.constexpr,
    CHOICES: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    STEPS: tl.constexpr,
    PDL: tl.constexpr,
):
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    token = tl.program_id(1)
    n = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    pairs: tl.constexpr = TOP_K + SHARED
    activated = x + token.to(tl.int64) * (pairs * INNER)
    total = tl.zeros((CHOICES, ROWS, COLUMNS), tl.float32)
    for first in tl.static_range(0, pairs, CHOICES):
        choice = first + tl.arange(0, CHOICES)
        routed = choice < TOP_K
        expert = tl.load(experts + token * TOP_K + choice, mask=routed, other=0).to(tl.int64)
        share = tl.load(weights + token * TOP_K + choice, mask=routed, other=1.0)
        known, expert = on_this_rank(expert, HELD)
        known = known & (choice < pairs)
        row = expert[:, None] * HIDDEN + n[None, :]
        held = known[:, None] & (n < HIDDEN)[None, :]
        start = weight + row * INNER
        if SHARED:
            # Of weight 1. All shared experts are one layer, whose columns they divide among them.
            common = shared + n.to(tl.int64)[None, :] * (SHARED * INNER) + ((choice - TOP_K) * INNER)[:, None]
            start = tl.where(routed[:, None], start, common)
        if SCALED == "rows":
            units = tl.load(unit + row, mask=held, other=0.0)[:, :, None]
        if SCALED == "blocks":
            # A tile's rows are of one block, so that scales multiply what they are multiplied with.
            block = (expert * HIDDEN + tl.program_id(0) * ROWS) // 128 * (INNER // 128)
        # Unrolled, so that weights of the next steps are under way while one's are multiplied.
        for step in tl.range(0, INNER, COLUMNS, num_stages=1, loop_unroll_factor=STEPS):
            k = step + tl.arange(0, COLUMNS)
            mask = held[:, :, None] & (k < INNER)[None, None, :]
            at = start[:, :, None] + k[None, None, :]
            w = tl.load(at, mask=mask, other=0.0, eviction_policy="evict_first").to(tl.float32)
            there = known[:, None] & (k < INNER)[None, :]
            value = tl.load(activated + choice[:, None] * INNER + k[None, :], mask=there, other=0.0)
            value = value.to(tl.float32) * share[:, None]
            if SCALED == "rows":
                w *= units
            if SCALED == "blocks":
                value *= tl.load(unit + block[:, None] + (k // 128)[None, :], mask=there, other=0.0)
            total += w * value[:, None, :]
    y = tl.sum(tl.sum(total, 2), 0)
    if EXPERT_BIAS:
        for nth in range(TOP_K):
            mine, own_expert = on_this_rank(tl.load(experts + token * TOP_K + nth), HELD)
            row_of = expert_bias + own_expert.to(tl.int64) * HIDDEN
            bias = tl.load(row_of + n, mask=mine & (n < HIDDEN), other=0.0).to(tl.float32)
            y += bias * tl.load(weights + token * TOP_K + nth)
    target = out + token.to(tl.int64) * HIDDEN + n
    if ADD:
        y += tl.load(target, mask=n < HIDDEN, other=0.0).to(tl.float32)
    tl.store(target, y, mask=n < HIDDEN)


def gate_up_one(
    x: torch.Tensor,
    norm: torch.Tensor,
    eps: float,
    logits: torch.Tensor,
    router: MoeGate,
    experts: Experts,
    shared: GatedMlp | None = None,
    share: torch.Tensor | None = None,
    *,
    block: BlockSizes | None = None,
    pdl: bool = True,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Chooses the experts of one token x [1, hidden] by scores `logits` float32 [1, experts]; gate and up of
    each, activated and multiplied, of x normalized with `norm` [hidden]. -> inner [top_k + shared, inner],
    weights float32 and experts int32 [1, top_k]. The router has no groups. `shared`: see `joins`; `share`
    [1, hidden]: its product with what the experts see, through a sigmoid, weighs the shared layer."""
    top_k = router.routing.top_k
    weights = torch.empty(1, top_k, dtype=torch.float32, device=x.device)
    chosen = torch.empty(1, top_k, dtype=torch.int32, device=x.device)
    out = torch.empty(top_k + _count(shared, experts), experts.inner, dtype=x.dtype, device=x.device)
    usual = ONE_GATE_UP_8 if experts.matrices()[0].scaled else ONE_GATE_UP
    how = block, usual, pdl
    _launch_gate_up(x, norm, eps, logits, router, experts, shared, share, chosen, weights, out, *how)
    return out, weights, chosen


def gate_up(
    x: torch.Tensor,
    router: MoeGate,
    experts: Experts,
    chosen: torch.Tensor,
    shared: GatedMlp | None = None,
    share: torch.Tensor | None = None,
    *,
    block: BlockSizes | None = None,
    pdl: bool = True,
) -> torch.Tensor:
    """Activated gate * up of each token's experts: x [tokens, hidden], chosen int32 [tokens, top_k] ->
    [tokens * (top_k + shared), inner], of other ranks' experts anything. `shared`, `share`: as above."""
    pairs = len(x) * (chosen.shape[1] + _count(shared, experts))
    out = torch.empty(pairs, experts.inner, dtype=x.dtype, device=x.device)
    how = block, FEW_GATE_UP, pdl
    _launch_gate_up(x, None, 0.0, None, router, experts, shared, share, chosen, None, out, *how)
    return out


def joins(shared: GatedMlp, experts: Experts) -> bool:
    """Whether the shared layer can be computed as further experts of every token, of weight 1."""
    plain = shared.gate_up.bias is None and shared.down.bias is None and experts.quantized is None
    plain = plain and experts.gate_up_bias is None and experts.activation == "silu"
    weights = shared.gate_up.weight, shared.down.weight
    same = all(weight is not None and weight.dtype == experts.down.dtype for weight in weights)
    return plain and same and shared.inner % experts.inner == 0


def _count(shared: GatedMlp | None, experts: Experts) -> int:
    return 0 if shared is None else shared.inner // experts.inner


def _launch_gate_up(
    x: torch.Tensor,
    norm: torch.Tensor | None,
    eps: float,
    logits: torch.Tensor | None,
    router: MoeGate,
    experts: Experts,
    shared: GatedMlp | None,
    share: torch.Tensor | None,
    chosen: torch.Tensor,
    weights: torch.Tensor | None,
    out: torch.Tensor,
    block: BlockSizes | None,
    usual: BlockSizes,
    pdl: bool,
) -> None:
    matrix, _ = experts.matrices()
    if matrix.scaled == "groups":
        moe_small_batch_int4.gate_up(x, norm, eps, logits, router, experts, chosen, weights, out, block, pdl)
        return
    rows, columns, warps, stages = block or usual
    _gate_up[(triton.cdiv(experts.inner, rows), len(out))](
        x,
        x if norm is None else norm,
        x if logits is None else logits,
        x if router.correction is None else router.correction,
        chosen,
        x if weights is None else weights,
        matrix.values,
        x if matrix.scale is None else matrix.scale,
        x if shared is None else shared.gate_up.weight,
        x if share is None else share,
        x if experts.gate_up_bias is None else experts.gate_up_bias,
        out,
        router.routing.scale,
        eps,
        K=x.shape[1],
        HELD=experts.count,
        INNER=experts.inner,
        SHARED=_count(shared, experts),
        SHARE=shared is not None and share is not None,
        SCALED=matrix.scaled,
        NORM=norm is not None,
        CHOOSE=logits is not None,
        **constants(router),
        **gating(experts),
        EXPERT_BIAS=experts.gate_up_bias is not None,
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
    shared: GatedMlp | None = None,
    *,
    add: bool = False,
    block: DownBlock | None = None,
    pdl: bool = True,
) -> None:
    """The weighted sum of each token's experts, from what `gate_up` returned for the same `shared`, into
    `out` [tokens, hidden]; `add`: added to what it holds. In float32, rounded once."""
    _, matrix = experts.matrices()
    hidden = experts.hidden
    if matrix.scaled == "groups":
        moe_small_batch_int4.down(x, experts, weights, chosen, out, add, pdl=pdl)
        return
    choices, rows, columns, warps, steps = block or (ONE_DOWN if len(chosen) == 1 else FEW_DOWN)
    pairs = chosen.shape[1] + _count(shared, experts)
    _down[(triton.cdiv(hidden, rows), len(chosen))](
        x,
        chosen,
        weights,
        matrix.values,
        weights if matrix.scale is None else matrix.scale,
        weights if shared is None else shared.down.weight,
        weights if experts.down_bias is None else experts.down_bias,
        out,
        HIDDEN=hidden,
        HELD=experts.count,
        INNER=experts.inner,
        SHARED=_count(shared, experts),
        SCALED=matrix.scaled,
        TOP_K=chosen.shape[1],
        ADD=add,
        EXPERT_BIAS=experts.down_bias is not None,
        CHOICES=min(choices, triton.next_power_of_2(pairs)),
        ROWS=rows,
        COLUMNS=columns,
        STEPS=steps,
        PDL=pdl,
        num_warps=warps,
        launch_pdl=pdl,
    )


ONE_GATE_UP: BlockSizes = (8, 512, 4, 1)
ONE_GATE_UP_8: BlockSizes = (8, 256, 1, 3)
FEW_GATE_UP: BlockSizes = (1, 1024, 8, 1)
ONE_DOWN: DownBlock = (4, 4, 256, 4, 3)
FEW_DOWN: DownBlock = (1, 8, 256, 4, 1)
