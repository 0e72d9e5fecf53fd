"""Triton: which experts each token uses, and the tokens of each expert in tiles of rows.

Nothing waits for the host, and no shape depends on the data: so that a CUDA graph can hold it. Needs a GPU:
import it where one is in use.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait, num_threads

from baton.layers.moe_routing import MoeGate

_BLOCK = 4096
"""Choices that a program of `_sort` looks at together."""
COUNTED_PAIRS = 4096
"""With more choices it is faster where `choose` counts them."""


@triton.jit
def _keyed(
    logits,
    bias,
    correction,
    part_stride,
    PARTS: tl.constexpr,
    EXPERTS: tl.constexpr,
    BLOCK: tl.constexpr,
    SIGMOID: tl.constexpr,
    BIAS: tl.constexpr,
    CORRECTION: tl.constexpr,
):
    """For one token and each expert: its score, and the value by which it is chosen."""
    e = tl.arange(0, BLOCK)
    inside = e < EXPERTS
    score = tl.zeros((BLOCK,), tl.float32)
    for part in tl.static_range(PARTS):
        score += tl.load(logits + part * part_stride + e, mask=inside, other=0.0).to(tl.float32)
    if BIAS:
        score += tl.load(bias + e, mask=inside, other=0.0).to(tl.float32)
    if SIGMOID:
        score = 1 / (1 + tl.exp(-score))
    else:
        score = tl.exp(score - tl.max(tl.where(inside, score, -float("inf")), 0))
    key = score
    if CORRECTION:
        key += tl.load(correction + e, mask=inside, other=0.0)
    return tl.where(inside, score, 0.0), tl.where(inside, key, -float("inf"))


@triton.jit
def _ranked(
    score,
    key,
    BLOCK: tl.constexpr,
    TOP_K: tl.constexpr,
    SIGMOID: tl.constexpr,
    RENORMALIZE: tl.constexpr,
):
    """For each expert: how many are better, and its weight if it is among the best."""
    e = tl.arange(0, BLOCK)
    # Of equal ones the first is better.
    before = (key[:, None] > key[None, :]) | ((key[:, None] == key[None, :]) & (e[:, None] < e[None, :]))
    rank = tl.sum(before.to(tl.int32), 0)
    if RENORMALIZE:
        score = score / (tl.sum(tl.where(rank < TOP_K, score, 0.0), 0) + 1e-20)
    elif not SIGMOID:
        score = score / tl.sum(score, 0)
    return rank, score


def _best(values: int) -> str:
    """Assembly that finds, among keys that a warp's lanes hold, so many each ($1 and following), the
    number of the best one after as many others as the last operand says. Keys are numbered from lane
    to lane; of equal ones the first is better. A round is two instructions across the warp; `tl.max`
    would take ten and shared memory."""
    keys = [f"k{index}" for index in range(values)]
    lines = [f".reg .b32 {', '.join(keys)}, first, best, own, left;", ".reg .pred p;"]
    lines += [f"mov.b32 {key}, ${index + 1};" for index, key in enumerate(keys)]
    lines += [f"mov.b32 left, ${values + 1};", "mov.u32 first, %laneid;"]
    lines += [f"mul.lo.u32 first, first, {values};", "again_${:uid}:", "mov.b32 best, k0;"]
    lines += [f"max.s32 best, best, {key};" for key in keys[1:]]
    lines += ["redux.sync.max.s32 best, best, 0xffffffff;", "mov.b32 $0, 0x7fffffff;"]
    for index, key in reversed(list(enumerate(keys))):
        lines += [f"setp.eq.s32 p, {key}, best;", f"@p add.s32 $0, first, {index};"]
    lines += ["redux.sync.min.s32 $0, $0, 0xffffffff;", "sub.s32 own, $0, first;"]
    for index, key in enumerate(keys):
        lines += [f"setp.eq.s32 p, own, {index};", f"@p mov.b32 {key}, 0x80000000;"]
    lines += ["sub.s32 left, left, 1;", "setp.ge.s32 p, left, 0;", "@p bra again_${:uid};"]
    return "\n".join(["{", *lines, "}"])


_BEST = tl.constexpr({values: _best(values) for values in (1, 2, 4, 8, 16, 32)})


@triton.jit
def _key(logits, correction, e, EXPERTS: tl.constexpr, SIGMOID: tl.constexpr, CORRECTION: tl.constexpr):
    """By what an expert is chosen, as an integer in the same order. With softmax that is the logit, float32:
    it decides between equal scores, too."""
    key = tl.load(logits + e, mask=e < EXPERTS, other=0.0) + 0.0  # -0.0 is no other number than 0.0
    if SIGMOID:
        key = 1 / (1 + tl.exp(-key))
    if CORRECTION:
        key += tl.load(correction + e, mask=e < EXPERTS, other=0.0)
    bits = key.to(tl.int32, bitcast=True)
    return tl.where(e < EXPERTS, tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits), -(2**31))


@triton.jit
def _nth(keys, index, VALUES: tl.constexpr, EXPERTS: tl.constexpr):
    """`_best` of every warp: the expert after `index` better ones."""
    constraints: tl.constexpr = "=&r" + ",r" * (VALUES + 1)
    keys += (tl.zeros_like(keys[0]) + index,)
    found = tl.inline_asm_elementwise(_BEST[VALUES], constraints, keys, tl.int32, True, 1)
    return tl.minimum(tl.max(found, 0), EXPERTS - 1)


@triton.jit
def chosen_expert(
    logits,
    correction,
    weights,
    experts,
    pair,
    scale,
    store,
    EXPERTS: tl.constexpr,
    BLOCK: tl.constexpr,
    TOP_K: tl.constexpr,
    SIGMOID: tl.constexpr,
    RENORMALIZE: tl.constexpr,
    CORRECTION: tl.constexpr,
):
    """The expert of a token's choice `pair`, counted from the best one; `store`: it and its weight are
    written. `logits`: float32. Each warp finds it by itself."""
    tl.static_assert(SIGMOID or not CORRECTION)
    values: tl.constexpr = max(BLOCK // 32, 1)
    lane = tl.arange(0, num_threads()) % 32
    keys = ()
    for index in tl.static_range(values):
        keys += (_key(logits, correction, lane * values + index, EXPERTS, SIGMOID, CORRECTION),)  # type: ignore[assignment]
    expert = _nth(keys, tl.minimum(pair, TOP_K - 1), values, EXPERTS)
    if store:
        score, _ = _keyed(logits, logits, correction, EXPERTS, 1, EXPERTS, BLOCK, SIGMOID, False, False)
        e = tl.arange(0, BLOCK)
        weight = tl.sum(tl.where(e == expert, score, 0.0), 0) * scale
        if RENORMALIZE:
            last = _nth(keys, TOP_K - 1, values, EXPERTS)
            key = _key(logits, correction, e, EXPERTS, SIGMOID, CORRECTION)
            least = tl.max(tl.where(e == last, key, -(2**31)), 0)
            chosen = (key > least) | ((key == least) & (e <= last))
            weight /= tl.sum(tl.where(chosen, score, 0.0), 0) + 1e-20
        elif not SIGMOID:
            weight /= tl.sum(score, 0)
        tl.store(experts + pair, expert)
        tl.store(weights + pair, weight)
    return expert


@triton.jit
def on_this_rank(expert, EXPERTS: tl.constexpr):
    """Whether this rank has an expert, and a number of one that it has."""
    return (expert >= 0) & (expert < EXPERTS), tl.minimum(tl.maximum(expert, 0), EXPERTS - 1)


@triton.jit(do_not_specialize=["rows"])
def _choose(
    logits,
    bias,
    correction,
    weights,
    experts,
    counts,
    rows,
    scale,
    PARTS: tl.constexpr,
    EXPERTS: tl.constexpr,
    BLOCK: tl.constexpr,
    TOP_K: tl.constexpr,
    SIGMOID: tl.constexpr,
    RENORMALIZE: tl.constexpr,
    BIAS: tl.constexpr,
    CORRECTION: tl.constexpr,
    TOP_K_PADDED: tl.constexpr,
    COUNT: tl.constexpr,
    PDL: tl.constexpr,
):
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    row = tl.program_id(0).to(tl.int64)
    part_stride = rows * EXPERTS
    score, key = _keyed(
        logits + row * EXPERTS,
        bias,
        correction,
        part_stride,
        PARTS,
        EXPERTS,
        BLOCK,
        SIGMOID,
        BIAS,
        CORRECTION,
    )
    rank, score = _ranked(score, key, BLOCK, TOP_K, SIGMOID, RENORMALIZE)
    e = tl.arange(0, BLOCK)
    # Scores that are no numbers have no ranks: each choice gets an expert all the same.
    index = tl.arange(0, TOP_K_PADDED)
    chosen = rank[:, None] == index[None, :]
    expert = tl.minimum(tl.sum(tl.where(chosen, e[:, None], 0), 0), EXPERTS - 1)
    weight = tl.sum(tl.where(chosen, score[:, None], 0.0), 0) * scale
    at = row * TOP_K + index
    tl.store(experts + at, expert, mask=index < TOP_K)
    tl.store(weights + at, weight, mask=index < TOP_K)
    if COUNT:
        tl.atomic_add(counts + expert, 1, mask=index < TOP_K, sem="relaxed")


@triton.jit(do_not_specialize=["pairs"])
def _sort(
    experts,
    counts,
    order,
    tile_experts,
    num_tiles,
    pairs,
    EXPERTS: tl.constexpr,
    BINS: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    COUNTED: tl.constexpr,
    PDL: tl.constexpr,
):
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    this_expert = tl.program_id(0)
    bins = tl.arange(0, BINS)
    if COUNTED:
        count = tl.load(counts + bins, mask=bins < EXPERTS, other=0)
    else:
        count = tl.zeros((BINS,), tl.int32)
        for start in range(0, pairs, BLOCK):
            at = start + tl.arange(0, BLOCK)
            expert = tl.load(experts + at, mask=at < pairs, other=EXPERTS)
            count += tl.histogram(tl.where((expert >= 0) & (expert < EXPERTS), expert, EXPERTS), BINS)
        count = tl.where(bins < EXPERTS, count, 0)
    tiles = (count + ROWS - 1) // ROWS
    first = tl.sum(tl.where(bins < this_expert, tiles, 0), 0)
    own_count = tl.sum(tl.where(bins == this_expert, count, 0), 0)
    own_tiles = tl.sum(tl.where(bins == this_expert, tiles, 0), 0)
    if this_expert == EXPERTS - 1:
        tl.store(num_tiles, first + own_tiles)
    for start in range(0, own_tiles, 64):
        at = start + tl.arange(0, 64)
        tl.store(tile_experts + first + at, tl.zeros((64,), tl.int32) + this_expert, mask=at < own_tiles)
    padded = order + first * ROWS
    found = tl.full((), 0, tl.int32)
    if own_count > 0:
        for start in range(0, pairs, BLOCK):
            at = start + tl.arange(0, BLOCK)
            mine = (tl.load(experts + at, mask=at < pairs, other=EXPERTS) == this_expert).to(tl.int32)
            tl.store(padded + found + tl.cumsum(mine, 0) - 1, at, mask=mine > 0)
            found += tl.sum(mine, 0)
    padding = own_count + tl.arange(0, ROWS)
    tl.store(padded + padding, tl.zeros((ROWS,), tl.int32) + pairs, mask=padding < own_tiles * ROWS)


def choose(
    router: MoeGate, logits: torch.Tensor, *, counts: torch.Tensor | None = None, pdl: bool = True
) -> tuple[torch.Tensor, torch.Tensor]:
    """Scores, in parts to be added, [parts, tokens, experts], without the router's bias, -> weights float32
    and experts int32, [tokens, top_k] each. `counts` int32 [experts]: choices of each expert are added."""
    routing = router.routing
    parts, rows, _ = logits.shape
    if routing.groups > 1:
        whole = logits.float().sum(0)
        weights, chosen = routing.choose(
            whole if router.linear.bias is None else whole + router.linear.bias, router.correction
        )
        if counts is not None:
            counts.index_add_(0, chosen.flatten(), torch.ones_like(chosen.flatten(), dtype=counts.dtype))
        return weights, chosen.int()
    weights = torch.empty(rows, routing.top_k, dtype=torch.float32, device=logits.device)
    chosen = torch.empty(rows, routing.top_k, dtype=torch.int32, device=logits.device)
    _choose[(rows,)](
        logits,
        logits if router.linear.bias is None else router.linear.bias,
        logits if router.correction is None else router.correction,
        weights,
        chosen,
        chosen if counts is None else counts,
        rows,
        routing.scale,
        **constants(router),
        PARTS=parts,
        BIAS=router.linear.bias is not None,
        TOP_K_PADDED=triton.next_power_of_2(routing.top_k),
        COUNT=counts is not None,
        PDL=pdl,
        num_warps=4,
        launch_pdl=pdl,
    )
    return weights, chosen


@dataclass(slots=True)
class Tiles:
    """The choices of all tokens, numbered token by token, sorted by expert, in tiles of `rows`."""

    rows: int
    order: torch.Tensor
    """int32 [most tiles * rows]: numbers of choices; at the end of an expert's last tile, their count."""
    experts: torch.Tensor
    """int32 [most tiles]: the expert of each tile."""
    count: torch.Tensor
    """int32 [1]: the tiles there are."""


def sort(
    chosen: torch.Tensor, experts: int, rows: int, *, counts: torch.Tensor | None = None, pdl: bool = True
) -> Tiles:
    """`chosen` int32 [tokens, top_k] of so many experts, other numbers are those of other ranks; `counts`
    int32 [experts]: choices of each, if known."""
    pairs = chosen.numel()
    most = pairs // rows + min(experts, pairs)
    order = torch.empty(most * rows, dtype=torch.int32, device=chosen.device)
    tile_experts = torch.empty(most, dtype=torch.int32, device=chosen.device)
    count = torch.empty(1, dtype=torch.int32, device=chosen.device)
    _sort[(experts,)](
        chosen,
        chosen if counts is None else counts,
        order,
        tile_experts,
        count,
        pairs,
        EXPERTS=experts,
        BINS=triton.next_power_of_2(experts + 1),
        ROWS=rows,
        BLOCK=min(_BLOCK, max(128, triton.next_power_of_2(pairs))),
        COUNTED=counts is not None,
        PDL=pdl,
        num_warps=4 if pairs <= 1024 else 8,
        launch_pdl=pdl,
    )
    return Tiles(rows, order, tile_experts, count)


def constants(router: MoeGate) -> dict[str, int | bool]:
    """Constants of `_choose` and `chosen_expert`."""
    routing, experts = router.routing, router.experts
    return {
        "EXPERTS": experts,
        "BLOCK": triton.next_power_of_2(experts),
        "TOP_K": routing.top_k,
        "SIGMOID": routing.scoring == "sigmoid",
        "RENORMALIZE": routing.renormalize,
        "CORRECTION": router.correction is not None,
    }
