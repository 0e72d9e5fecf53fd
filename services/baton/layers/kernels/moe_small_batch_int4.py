"""Triton: experts of 4 bits for one to a few tokens, whose activations stay in 16 bits.

The style of `quantized_gemv`: a thread reads pieces of 8 bytes, which are 16 columns of a row.
`moe_small_batch` calls it. Needs a GPU: import it where one is in use.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from baton.layers.kernels.activation import gated, gating
from baton.layers.kernels.moe_align import chosen_expert, constants, on_this_rank
from baton.layers.kernels.quantized_gemv import quarters
from baton.layers.moe import Experts
from baton.layers.moe_routing import MoeGate

BlockSizes = tuple[int, int, int, int]
"""Rows and columns of a tile of weights, here pieces of 16 columns, warps, stages."""


def _word() -> str:
    """The products of a word's codes ($1), each + 128, with eight numbers ($2 to $9), those of the low halves
    of its bytes first, added up ($0). In bits 16 to 19 behind the exponent of 128 a code is 128 + code."""
    lines = [".reg .b32 t, s;"]
    for index, left in enumerate((16, 8, 0, -8, 12, 4, -4, -12)):
        if left:
            lines.append(f"{'shl' if left > 0 else 'shr'}.b32 t, $1, {abs(left)};")
        lines.append(f"lop3.b32 t, {'t' if left else '$1'}, 0xF0000, 0x43000000, 0xEA;")
        total = "s" if index < 7 else "$0"
        lines.append(f"fma.rn.f32 {total}, t, ${index + 2}, s;" if index else "mul.f32 s, t, $2;")
    return "\n".join(["{", *lines, "}"])


_WORD = tl.constexpr(_word())


@triton.jit
def _words(codes, low, high):
    """codes [pieces, rows, 2] times four tensors [pieces, 1, 2] of each half of the bytes, -> like `codes`.
    Written for the processor: the compiler would move each number from thread to thread."""
    return tl.inline_asm_elementwise(
        _WORD,
        "=f,r,f,f,f,f,f,f,f,f",
        [codes, low[0], low[1], low[2], low[3], high[0], high[1], high[2], high[3]],
        dtype=tl.float32,
        is_pure=True,
        pack=1,
    )


@triton.jit
def _product(codes, low, high, scale, zero):
    """codes [pieces, rows, 2] and columns 0 to 7 and 8 to 15 of each piece of the token, [pieces, 1, 8] each,
    -> [pieces, rows]"""
    total = tl.sum(_words(codes, quarters(low), quarters(high)), 2)
    return (total - (zero + 128) * tl.sum(low + high, 2)) * scale


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
    zero,
    out,
    scale,
    eps,
    K: tl.constexpr,
    HELD: tl.constexpr,
    INNER: tl.constexpr,
    GROUP: tl.constexpr,
    NORM: tl.constexpr,
    CHOOSE: tl.constexpr,
    EXPERTS: tl.constexpr,
    BLOCK: tl.constexpr,
    TOP_K: tl.constexpr,
    SIGMOID: tl.constexpr,
    RENORMALIZE: tl.constexpr,
    CORRECTION: tl.constexpr,
    CLAMPED: tl.constexpr,
    ALPHA: tl.constexpr,
    LIMIT: tl.constexpr,
    ROWS: tl.constexpr,
    PIECES: tl.constexpr,
    STAGES: tl.constexpr,
    PDL: tl.constexpr,
):
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    token, pair = tl.program_id(1) // TOP_K, tl.program_id(1) % TOP_K
    if CHOOSE:
        expert = chosen_expert(
            logits,
            correction,
            weights,
            experts,
            pair,
            scale,
            tl.program_id(0) == 0,
            EXPERTS,
            BLOCK,
            TOP_K,
            SIGMOID,
            RENORMALIZE,
            CORRECTION,
        )
    else:
        expert = tl.load(experts + tl.program_id(1))
    mine, expert = on_this_rank(expert, HELD)
    pieces: tl.constexpr = K // 16
    groups: tl.constexpr = K // GROUP
    n = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    row = (expert.to(tl.int64) * (2 * INNER) + n)[None, :]
    here = (n < tl.where(mine, INNER, 0))[None, :]
    source = x + token.to(tl.int64) * K
    within, words = tl.arange(0, 8)[None, None, :], tl.arange(0, 2)[None, None, :]
    gate = tl.zeros((PIECES, ROWS), tl.float32)
    up = tl.zeros((PIECES, ROWS), tl.float32)
    squares = tl.zeros((PIECES, 1, 8), tl.float32)
    for start in tl.range(0, pieces, PIECES, num_stages=STAGES):
        piece = start + tl.arange(0, PIECES)
        inside = here & (piece < pieces)[:, None]
        at = (row * pieces + piece[:, None])[:, :, None] * 2 + words
        w = tl.load(weight + at, mask=inside[:, :, None], other=0, eviction_policy="evict_first")
        at += INNER * pieces * 2
        u = tl.load(weight + at, mask=inside[:, :, None], other=0, eviction_policy="evict_first")
        at = row * groups + (piece * 16 // GROUP)[:, None]
        s = tl.load(unit + at, mask=inside, other=0.0)
        z = tl.load(zero + at, mask=inside, other=0.0)
        t = tl.load(unit + INNER * groups + at, mask=inside, other=0.0)
        v = tl.load(zero + INNER * groups + at, mask=inside, other=0.0)
        k = piece[:, None, None] * 16 + within
        there = k < K
        low = tl.load(source + k, mask=there, other=0.0).to(tl.float32)
        high = tl.load(source + k + 8, mask=there, other=0.0).to(tl.float32)
        if NORM:
            squares += low * low + high * high
            low = low * tl.load(norm + k, mask=there, other=0.0).to(tl.float32)
            high = high * tl.load(norm + k + 8, mask=there, other=0.0).to(tl.float32)
        gate += _product(w, low, high, s, z)
        up += _product(u, low, high, t, v)
    y = tl.sum(gate, 0)
    g = tl.sum(up, 0)
    if NORM:
        factor = tl.rsqrt(tl.sum(tl.sum(tl.sum(squares, 2), 1), 0) / K + eps)
        y = y * factor
        g = g * factor
    y = gated(y, g, CLAMPED, ALPHA, LIMIT)
    tl.store(out + tl.program_id(1).to(tl.int64) * INNER + n, y.to(out.dtype.element_ty), mask=n < INNER)


@triton.jit
def _down(
    x,
    experts,
    weights,
    weight,
    unit,
    zero,
    out,
    HIDDEN: tl.constexpr,
    HELD: tl.constexpr,
    INNER: tl.constexpr,
    GROUP: tl.constexpr,
    TOP_K: tl.constexpr,
    ADD: tl.constexpr,
    ROWS: tl.constexpr,
    PIECES: tl.constexpr,
    STAGES: tl.constexpr,
    PDL: tl.constexpr,
):
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    token = tl.program_id(1)
    pieces: tl.constexpr = INNER // 16
    n = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    words = tl.arange(0, 2)[None, None, :]
    source = x + token.to(tl.int64) * (TOP_K * INNER)
    total = tl.zeros((PIECES, ROWS), tl.float32)
    # All choices' columns are one row.
    for start in tl.range(0, TOP_K * pieces, PIECES, num_stages=STAGES):
        index = start + tl.arange(0, PIECES)
        choice, piece = index // pieces, index % pieces
        known = choice < TOP_K
        expert = tl.load(experts + token * TOP_K + choice, mask=known, other=0)
        share = tl.load(weights + token * TOP_K + choice, mask=known, other=0.0)
        mine, expert = on_this_rank(expert, HELD)
        known = known & mine
        inside = known[:, None] & (n < HIDDEN)[None, :]
        row = expert.to(tl.int64)[:, None] * HIDDEN + n[None, :]
        at = (row * pieces + piece[:, None])[:, :, None] * 2 + words
        w = tl.load(weight + at, mask=inside[:, :, None], other=0, eviction_policy="evict_first")
        at = row * (INNER // GROUP) + (piece * 16 // GROUP)[:, None]
        s = tl.load(unit + at, mask=inside, other=0.0) * share[:, None]
        z = tl.load(zero + at, mask=inside, other=0.0)
        k = index[:, None, None] * 16 + tl.arange(0, 8)[None, None, :]
        there = known[:, None, None]
        low = tl.load(source + k, mask=there, other=0.0).to(tl.float32)
        high = tl.load(source + k + 8, mask=there, other=0.0).to(tl.float32)
        total += _product(w, low, high, s, z)
    y = tl.sum(total, 0)
    target = out + token.to(tl.int64) * HIDDEN + n
    if ADD:
        y += tl.load(target, mask=n < HIDDEN, other=0.0).to(tl.float32)
    tl.store(target, y.to(out.dtype.element_ty), mask=n < HIDDEN)


def gate_up(
    x: torch.Tensor,
    norm: torch.Tensor | None,
    eps: float,
    logits: torch.Tensor | None,
    router: MoeGate,
    experts: Experts,
    chosen: torch.Tensor,
    weights: torch.Tensor | None,
    out: torch.Tensor,
    block: BlockSizes | None,
    pdl: bool,
) -> None:
    """Into `out` [tokens * top_k, inner]. With `logits` [1, experts] it writes `chosen` and `weights`."""
    rows, pieces, warps, stages = block or GATE_UP
    matrix, _ = experts.matrices()
    _gate_up[(triton.cdiv(experts.inner, rows), len(out))](
        x,
        x if norm is None else norm,
        x if logits is None else logits,
        x if router.correction is None else router.correction,
        chosen,
        x if weights is None else weights,
        matrix.values.view(torch.int32),
        matrix.scale,
        matrix.zero,
        out,
        router.routing.scale,
        eps,
        K=experts.hidden,
        HELD=experts.count,
        INNER=experts.inner,
        GROUP=matrix.group,
        NORM=norm is not None,
        CHOOSE=logits is not None,
        **constants(router),
        **gating(experts),
        ROWS=rows,
        PIECES=pieces,
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
    add: bool,
    *,
    block: BlockSizes | None = None,
    pdl: bool = True,
) -> None:
    """As `moe_small_batch.down`."""
    rows, pieces, warps, stages = block or DOWN
    _, matrix = experts.matrices()
    _down[(triton.cdiv(experts.hidden, rows), len(chosen))](
        x,
        chosen,
        weights,
        matrix.values.view(torch.int32),
        matrix.scale,
        matrix.zero,
        out,
        HIDDEN=experts.hidden,
        HELD=experts.count,
        INNER=experts.inner,
        GROUP=matrix.group,
        TOP_K=chosen.shape[1],
        ADD=add,
        ROWS=rows,
        PIECES=pieces,
        STAGES=stages,
        PDL=pdl,
        num_warps=warps,
        launch_pdl=pdl,
    )


GATE_UP: BlockSizes = (4, 128, 4, 1)
DOWN: BlockSizes = (4, 128, 4, 1)
