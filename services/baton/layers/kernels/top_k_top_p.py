"""Triton: the tokens that top-k and top-p keep, as a limit on how far a logit may lie below the largest.

Nothing is sorted. Wanted is the least limit at which a weight, a count for top-k and a mass for top-p,
reaches a target. That is found by bracketing, as in FlashInfer's sorting-free sampling (Ye et al.,
arXiv:2501.01005, https://flashinfer.ai/2025/03/10/sampling.html), but exactly and without drawing anything: a
pass over the row weighs what lies within each of four limits; once few tokens are left between the two that
enclose the target these are gathered and halved by the bits of their values. One program a row, so that no
other row has a say in how anything is added up. Needs a GPU: import it where one is in use.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

_BLOCK = 1024
_HELD = 2048
"""Most tokens that a program gathers."""

# A distance is never negative, so its bits as an integer have the same order.
_INFINITE = tl.constexpr(0x7F800000)
_HALF = tl.constexpr(0x3F000000)
_OCTAVES = tl.constexpr(2 << 23)


@triton.jit
def _distances(logits, peak, temperature, columns, vocab):
    """(peak - logit) / temperature, infinite behind the row's end."""
    x = tl.load(logits + columns, mask=columns < vocab, other=-float("inf")).to(tl.float32)
    return (peak - x) / temperature


@triton.jit
def _weigh(logits, peak, temperature, vocab, a, b, c, d, BLOCK: tl.constexpr):
    """Number and mass of tokens within each of four limits, and the mass of all tokens."""
    count_a = tl.zeros((BLOCK,), tl.int32)
    count_b = tl.zeros((BLOCK,), tl.int32)
    count_c = tl.zeros((BLOCK,), tl.int32)
    count_d = tl.zeros((BLOCK,), tl.int32)
    mass_a = tl.zeros((BLOCK,), tl.float32)
    mass_b = tl.zeros((BLOCK,), tl.float32)
    mass_c = tl.zeros((BLOCK,), tl.float32)
    mass_d = tl.zeros((BLOCK,), tl.float32)
    mass = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, vocab, BLOCK):
        distance = _distances(logits, peak, temperature, start + tl.arange(0, BLOCK), vocab)
        key = distance.to(tl.int32, bitcast=True)
        weight = tl.exp(-distance)
        count_a += (key <= a).to(tl.int32)
        count_b += (key <= b).to(tl.int32)
        count_c += (key <= c).to(tl.int32)
        count_d += (key <= d).to(tl.int32)
        mass_a += tl.where(key <= a, weight, 0.0)
        mass_b += tl.where(key <= b, weight, 0.0)
        mass_c += tl.where(key <= c, weight, 0.0)
        mass_d += tl.where(key <= d, weight, 0.0)
        mass += weight
    return (
        tl.sum(count_a, 0),
        tl.sum(count_b, 0),
        tl.sum(count_c, 0),
        tl.sum(count_d, 0),
        tl.sum(mass_a, 0),
        tl.sum(mass_b, 0),
        tl.sum(mass_c, 0),
        tl.sum(mass_d, 0),
        tl.sum(mass, 0),
    )


@triton.jit
def _gather(logits, peak, temperature, vocab, low, high, held, BLOCK: tl.constexpr):
    """Gathers keys in (low, high] into `held`; returns their number."""
    found = tl.full((), 0, tl.int32)
    for start in range(0, vocab, BLOCK):
        columns = start + tl.arange(0, BLOCK)
        key = _distances(logits, peak, temperature, columns, vocab).to(tl.int32, bitcast=True)
        inside = ((key > low) & (key <= high) & (columns < vocab)).to(tl.int32)
        tl.store(held + found + tl.cumsum(inside, 0) - 1, key, mask=inside > 0)
        found += tl.sum(inside, 0)
    # After this the whole program sees its own stores.
    tl.debug_barrier()
    return found


@triton.jit
def _reach(
    logits,
    peak,
    temperature,
    vocab,
    low,
    high,
    count_low,
    count_high,
    mass_low,
    mass_high,
    target,
    held,
    held_count,
    whole,
    BY_MASS: tl.constexpr,
    BLOCK: tl.constexpr,
    HELD: tl.constexpr,
):
    """The least key at which the weight of what lies within reaches the target: it is in (low, high], weights
    at both ends are given. `held_count` keys are in `held`, all up to `whole` (-1: none).

    Yields the key, count and mass within it, `held_count` and `whole`.
    """
    while (high - low > 1) & (count_high > HELD) & (count_high - count_low > HELD):
        first = (low == -1) & (high > _HALF)
        step = tl.where(first, _OCTAVES, tl.maximum((high - low) // 5, 1))
        a = tl.where(first, _HALF, low + step)
        b = a + step
        c = b + step
        d = c + step
        ca, cb, cc, cd, ma, mb, mc, md, _all = _weigh(
            logits, peak, temperature, vocab, a, b, c, d, BLOCK=BLOCK
        )
        if BY_MASS:
            wa = ma
            wb = mb
            wc = mc
            wd = md
        else:
            wa = ca.to(tl.float32)
            wb = cb.to(tl.float32)
            wc = cc.to(tl.float32)
            wd = cd.to(tl.float32)
        # The largest limit that falls short of the target, and the smallest that does not.
        if wd < target:
            low = d
            count_low = cd
            mass_low = md
        elif wc < target:
            low = c
            count_low = cc
            mass_low = mc
        elif wb < target:
            low = b
            count_low = cb
            mass_low = mb
        elif wa < target:
            low = a
            count_low = ca
            mass_low = ma
        if wa >= target:
            high = tl.minimum(high, a)
            count_high = ca
            mass_high = ma
        elif wb >= target:
            high = tl.minimum(high, b)
            count_high = cb
            mass_high = mb
        elif wc >= target:
            high = tl.minimum(high, c)
            count_high = cc
            mass_high = mc
        elif wd >= target:
            high = tl.minimum(high, d)
            count_high = cd
            mass_high = md
    if high - low > 1:
        if high > whole:
            if count_high <= HELD:
                low = tl.full((), -1, tl.int32)
                count_low = tl.full((), 0, tl.int32)
                mass_low = tl.full((), 0.0, tl.float32)
                whole = high
            else:
                whole = tl.full((), -1, tl.int32)
            held_count = _gather(logits, peak, temperature, vocab, low, high, held, BLOCK=BLOCK)
        else:
            low = tl.full((), -1, tl.int32)
            count_low = tl.full((), 0, tl.int32)
            mass_low = tl.full((), 0.0, tl.float32)
        at = tl.arange(0, HELD)
        keys = tl.load(held + at, mask=at < held_count, other=-1, cache_modifier=".cg")
        there = keys >= 0
        masses = tl.where(there, tl.exp(-keys.to(tl.float32, bitcast=True)), 0.0)
        base = low
        while high - low > 1:
            middle = low + (high - low) // 2
            inside = there & (keys <= middle)
            if BY_MASS:
                weight = mass_low + tl.sum(tl.where(inside, masses, 0.0), 0)
            else:
                weight = (count_low + tl.sum(inside.to(tl.int32), 0)).to(tl.float32)
            if weight < target:
                low = middle
            else:
                high = middle
        inside = there & (keys <= high) & (keys > base)
        count_high = count_low + tl.sum(inside.to(tl.int32), 0)
        mass_high = mass_low + tl.sum(tl.where(inside, masses, 0.0), 0)
    return high, count_high, mass_high, held_count, whole


@triton.jit
def _limits(
    logits,
    changed,
    row_index,
    peaks,
    temperatures,
    top_k,
    top_p,
    limits,
    held,
    vocab,
    stride,
    BLOCKS: tl.constexpr,
    BLOCKS_UP: tl.constexpr,
    BLOCK: tl.constexpr,
    HELD: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    temperature = tl.load(temperatures + row)
    k = tl.load(top_k + row)
    p = tl.load(top_p + row)
    by_k = (k > 0) & (k < vocab)
    if (temperature > 0) & (by_k | (p < 1.0)):
        others = tl.arange(0, BLOCKS_UP)
        peak = tl.max(tl.load(peaks + row * BLOCKS + others, mask=others < BLOCKS, other=-float("inf")), 0)
        changed_row = tl.load(row_index + row).to(tl.int64)
        limit = tl.load(limits + row)
        if changed_row >= 0:
            found = _limit(
                changed + changed_row * vocab,
                peak,
                temperature,
                vocab,
                k,
                p,
                by_k,
                held + row * HELD,
                BLOCK,
                HELD,
            )
        else:
            found = _limit(
                logits + row * stride, peak, temperature, vocab, k, p, by_k, held + row * HELD, BLOCK, HELD
            )
        tl.store(limits + row, tl.minimum(limit, found))


@triton.jit
def _limit(logits, peak, temperature, vocab, k, p, by_k, held, BLOCK: tl.constexpr, HELD: tl.constexpr):
    none = tl.full((), -1, tl.int32)
    zero = tl.full((), 0, tl.int32)
    nothing = tl.full((), 0.0, tl.float32)
    high = tl.full((), _INFINITE, tl.int32)
    count = tl.full((), 0, tl.int32) + vocab
    held_count, whole, mass = zero, none, nothing
    if by_k:
        high, count, mass, held_count, whole = _reach(
            logits,
            peak,
            temperature,
            vocab,
            none,
            high,
            zero,
            count,
            nothing,
            mass,
            k.to(tl.float32),
            held,
            held_count,
            whole,
            BY_MASS=False,
            BLOCK=BLOCK,
            HELD=HELD,
        )
    if p < 1.0:
        if high == _INFINITE:
            _a, _b, _c, _d, _e, _f, _g, _h, mass = _weigh(
                logits, peak, temperature, vocab, none, none, none, none, BLOCK=BLOCK
            )
        high, count, mass, held_count, whole = _reach(
            logits,
            peak,
            temperature,
            vocab,
            none,
            high,
            zero,
            count,
            nothing,
            mass,
            p * mass,
            held,
            held_count,
            whole,
            BY_MASS=True,
            BLOCK=BLOCK,
            HELD=HELD,
        )
    return high.to(tl.float32, bitcast=True)


def restrict(
    logits: torch.Tensor,
    changed: torch.Tensor,
    row_index: torch.Tensor,
    peaks: torch.Tensor,
    temperatures: torch.Tensor,
    top_k: torch.Tensor,
    top_p: torch.Tensor,
    limits: torch.Tensor,
) -> None:
    """Lowers `limits` (float32 [rows]) to what top-k and then top-p keep: of a row with a temperature, tokens
    whose (peak - logit) / temperature is not larger.

    logits: [rows, vocab]; changed: float32 [n, vocab], which stands for a row whose entry in `row_index`
    (int32 [rows]) is not -1; peaks: float32 [rows, blocks], whose maximum is the row's largest logit;
    temperatures, top_p: float32 [rows]; top_k: int32 [rows], 0 keeps all. Tokens that tie with the last kept
    are kept.
    """
    rows, vocab = logits.shape
    blocks = peaks.shape[1]
    held = torch.empty(rows * _HELD, dtype=torch.int32, device=logits.device)
    _limits[(rows,)](
        logits,
        changed,
        row_index,
        peaks,
        temperatures,
        top_k,
        top_p,
        limits,
        held,
        vocab,
        logits.stride(0),
        BLOCKS=blocks,
        BLOCKS_UP=triton.next_power_of_2(blocks),
        BLOCK=_BLOCK,
        HELD=_HELD,
        num_warps=8,
    )
