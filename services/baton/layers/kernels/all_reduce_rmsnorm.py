"""Triton: rows added up over the ranks of a worker, added to the residual and normalized, in one kernel.

A program has a row. Each 32 bits travel in one word with the number of their round, so that no flag follows
them (as in the protocol LL of NCCL, arXiv:2507.04786). In one shot each rank sends its row to all others. In
two it sends it to one, which adds all up and sends the sum: to 1.5 others on average, not 3, of four ranks.

The words of a round are read before the kernel of the next one, and none ends a round that not all have
begun: who writes over the words of the round before last is in a round that follows one that all have begun.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait


@triton.jit
def now(THREADS: tl.constexpr):
    """Nanoseconds; the same number in all threads of the program, which therefore stay together."""
    times = tl.inline_asm_elementwise(
        "mov.u64 $0, %globaltimer; // $1", "=l,r", [tl.arange(0, THREADS)], tl.int64, is_pure=False, pack=1
    )
    return tl.max(times, 0)


@triton.jit
def _pair(words, dtype: tl.constexpr):
    """Both 16-bit numbers of each word, in float32."""
    low = (words & 0xFFFF).to(tl.int16).to(dtype, bitcast=True)
    high = ((words >> 16) & 0xFFFF).to(tl.int16).to(dtype, bitcast=True)
    return low.to(tl.float32), high.to(tl.float32)


@triton.jit
def _words(low, high, dtype: tl.constexpr):
    """The inverse; rounds."""
    first = low.to(dtype).to(tl.int16, bitcast=True).to(tl.int32) & 0xFFFF
    return first | (high.to(dtype).to(tl.int16, bitcast=True).to(tl.int32) << 16)


@triton.jit
def _added(
    own_buffer, entry, inside, round,
    RANK: tl.constexpr, COUNT: tl.constexpr, APART: tl.constexpr, DTYPE: tl.constexpr,
):  # fmt: skip
    """Sums of `COUNT` ranks' words, `own_buffer` for `RANK`, and whether some are not of this round."""
    low = tl.zeros(own_buffer.shape, tl.float32)
    high = tl.zeros(own_buffer.shape, tl.float32)
    missing = tl.zeros(own_buffer.shape, tl.int32)
    for rank in tl.static_range(COUNT):
        words = own_buffer
        if rank != RANK:
            sent = tl.load(entry + rank * APART, mask=inside, other=0, volatile=True)
            missing |= tl.where(inside & ((sent >> 32).to(tl.int32) != round.to(tl.int32)), 1, 0)
            words = sent.to(tl.int32)
        theirs = _pair(words, DTYPE)
        low += theirs[0]
        high += theirs[1]
    return low, high, tl.max(missing, 0)


@triton.jit
def _receive(
    own_buffer, entry, inside, round, failed, told, limit,
    RANK: tl.constexpr, COUNT: tl.constexpr, APART: tl.constexpr, DTYPE: tl.constexpr, THREADS: tl.constexpr,
):  # fmt: skip
    """Waits for all; the sums as words, rounded, and `limit`, or 0 once it has waited in vain."""
    low, high, missing = _added(own_buffer, entry, inside, round, RANK, COUNT, APART, DTYPE)
    if missing > 0:
        began = now(THREADS)
        late = 0
        while (missing > 0) & (late == 0):
            low, high, missing = _added(own_buffer, entry, inside, round, RANK, COUNT, APART, DTYPE)
            late = tl.where(now(THREADS) - began > limit, 1, 0)
        if missing > 0:
            limit = limit * 0
            tl.store(failed, 1)
            tl.store(told.to(tl.pointer_type(tl.int32)), 1)
    return _words(low, high, DTYPE), limit


@triton.jit
def _send(
    words, entry, buffers, inside, round, to, limit, RANK: tl.constexpr, RANKS: tl.constexpr
):  # fmt: skip
    """To rank `to`; `RANKS`: to all others."""
    sent = (round << 32) | (words.to(tl.int64) & 0xFFFFFFFF)
    for rank in tl.static_range(RANK + 1, RANK + RANKS):
        apart = tl.multiple_of((tl.load(buffers + rank % RANKS) - tl.load(buffers + RANK)) // 8, 64)
        # A rank that has given up sends no more: those that come later wait in vain, too.
        tl.store(entry + apart, sent, mask=inside & (limit > 0) & ((to == RANKS) | (to == rank % RANKS)))


@triton.jit(do_not_specialize=["rows"])
def sum_norm(
    residual,
    parts,
    weight,
    bias,
    out,
    region,
    buffers,
    counters,
    failed,
    told,
    eps,
    rows,
    limit,
    RANK: tl.constexpr,
    RANKS: tl.constexpr,
    ROWS: tl.constexpr,
    STRIDE: tl.constexpr,
    WORDS: tl.constexpr,
    BLOCK: tl.constexpr,
    TWO: tl.constexpr,
    PARTS: tl.constexpr,
    BIAS: tl.constexpr,
    DTYPE: tl.constexpr,
    THREADS: tl.constexpr,
):
    gdc_launch_dependents()
    gdc_wait()
    row = tl.program_id(0)
    at = tl.arange(0, BLOCK)
    inside = at < WORDS
    round = tl.load(counters + row) + 1
    limit = tl.where(tl.load(failed) == 0, limit, 0)
    low = tl.zeros((BLOCK,), tl.float32)
    high = tl.zeros((BLOCK,), tl.float32)
    for part in tl.static_range(PARTS):
        first = parts + (part * rows + row).to(tl.int64) * (2 * WORDS) + 2 * at
        low += tl.load(first, mask=inside, other=0.0).to(tl.float32)
        high += tl.load(first + 1, mask=inside, other=0.0).to(tl.float32)
    if BIAS:
        low += tl.load(bias + 2 * at, mask=inside, other=0.0).to(tl.float32)
        high += tl.load(bias + 2 * at + 1, mask=inside, other=0.0).to(tl.float32)
    own_buffer = _words(low, high, DTYPE)
    entry = region + tl.multiple_of(((round % 2) * RANKS * ROWS + row) * STRIDE, 64) + at
    to = row % RANKS if TWO else RANKS
    _send(own_buffer, entry + RANK * ROWS * STRIDE, buffers, inside, round, to, limit, RANK, RANKS)
    before = tl.load(residual + row.to(tl.int64) * WORDS + at, mask=inside, other=0)
    norms = tl.load(weight + at, mask=inside, other=0)
    if (to == RANKS) | (to == RANK):
        own_buffer, limit = _receive(
            own_buffer, entry, inside, round, failed, told, limit, RANK, RANKS, ROWS * STRIDE, DTYPE, THREADS
        )
        if TWO:
            _send(own_buffer, entry + RANK * ROWS * STRIDE, buffers, inside, round, RANKS, limit, RANK, RANKS)
    else:
        entry += to * ROWS * STRIDE
        own_buffer, limit = _receive(
            own_buffer, entry, inside, round, failed, told, limit, -1, 1, 0, DTYPE, THREADS
        )
    # Rounded as a sum of its own would be.
    low, high = _pair(own_buffer, DTYPE)
    old = _pair(before, DTYPE)
    low += old[0]
    high += old[1]
    tl.store(residual + row.to(tl.int64) * WORDS + at, _words(low, high, DTYPE), mask=inside)
    scale = tl.rsqrt(tl.sum(low * low + high * high, 0) / (2 * WORDS) + eps)
    of = _pair(norms, DTYPE)
    normed = _words(low * scale * of[0], high * scale * of[1], DTYPE)
    tl.store(out + row.to(tl.int64) * WORDS + at, normed, mask=inside)
    tl.store(counters + row, round)
