"""Triton: greedy and temperature sampling of a whole batch, from logits to the slots' last tokens.

The same function of (logits, temperature, generator state) as `engine.sampler_ops.draw`, without a tensor of
noise: each pass reads the logits once. Needs a GPU: import it where one is in use.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton.language.extra import libdevice

_BLOCK = 4096

# SplitMix64's constants as int64, see baton.engine.random.
_GAMMA = tl.constexpr(0x9E3779B97F4A7C15 - 2**64)
_MIX1 = tl.constexpr(0xBF58476D1CE4E5B9 - 2**64)
_MIX2 = tl.constexpr(0x94D049BB133111EB - 2**64)


@triton.jit
def _peaks(logits, peaks, vocab, stride, BLOCKS: tl.constexpr, BLOCK: tl.constexpr):
    """The largest logit of a block; NaN if one is NaN."""
    row, block = tl.program_id(0).to(tl.int64), tl.program_id(1)
    columns = block * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(logits + row * stride + columns, mask=columns < vocab, other=-float("inf")).to(tl.float32)
    bad = tl.max((x != x).to(tl.int32), 0)
    tl.store(peaks + row * BLOCKS + block, tl.where(bad > 0, float("nan"), tl.max(x, 0)))


@triton.jit
def _scores(
    logits,
    peaks,
    temperatures,
    keys,
    scores,
    choices,
    vocab,
    stride,
    BLOCKS: tl.constexpr,
    BLOCKS_UP: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """The best score of a block, and whose it is: the logit, or for a temperature the logit over it plus
    Gumbel noise."""
    row, block = tl.program_id(0).to(tl.int64), tl.program_id(1)
    columns = block * BLOCK + tl.arange(0, BLOCK)
    inside = columns < vocab
    x = tl.load(logits + row * stride + columns, mask=inside, other=-float("inf")).to(tl.float32)
    temperature = tl.load(temperatures + row)
    if temperature > 0:
        others = tl.arange(0, BLOCKS_UP)
        peak = tl.max(tl.load(peaks + row * BLOCKS + others, mask=others < BLOCKS, other=-float("inf")), 0)
        z = tl.load(keys + row) + (columns + 1).to(tl.int64) * _GAMMA
        z = (z ^ ((z >> 30) & ((1 << 34) - 1))) * _MIX1
        z = (z ^ ((z >> 27) & ((1 << 37) - 1))) * _MIX2
        z = z ^ ((z >> 31) & ((1 << 33) - 1))
        uniform = (((z >> 11) & ((1 << 53) - 1)).to(tl.float32) + 0.5) * (2.0**-53)
        uniform = tl.minimum(uniform, 1 - 2.0**-24)
        noise = -libdevice.log(-libdevice.log1p(-uniform))
        x = tl.where(inside, (x - peak) / temperature + noise, -float("inf"))
    best = tl.max(x, 0)
    tl.store(scores + row * BLOCKS + block, best)
    tl.store(choices + row * BLOCKS + block, tl.min(tl.where(x == best, columns, vocab), 0))


@triton.jit
def _choose(
    peaks, scores, choices, slots, last_token, result, vocab, BLOCKS: tl.constexpr, BLOCKS_UP: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    blocks = tl.arange(0, BLOCKS_UP)
    inside = blocks < BLOCKS
    peak = tl.load(peaks + row * BLOCKS + blocks, mask=inside, other=-float("inf"))
    bad = tl.max((peak != peak).to(tl.int32), 0)
    largest = tl.where(bad > 0, float("nan"), tl.max(peak, 0))
    score = tl.load(scores + row * BLOCKS + blocks, mask=inside, other=-float("inf"))
    choice = tl.load(choices + row * BLOCKS + blocks, mask=inside, other=vocab)
    token = tl.min(tl.where(score == tl.max(score, 0), choice, vocab), 0)
    token = tl.where(token < vocab, token, 0)
    tl.store(last_token + tl.load(slots + row), token)
    tl.store(result + 2 * row, token)
    tl.store(result + 2 * row + 1, largest.to(tl.int32, bitcast=True))


def sample(
    logits: torch.Tensor,
    temperatures: torch.Tensor,
    keys: torch.Tensor,
    slots: torch.Tensor,
    last_token: torch.Tensor,
    result: torch.Tensor,
) -> None:
    """Samples a token for each row into `last_token` (int32) at its slot, and into `result`.

    logits: [rows, vocab], any float dtype; temperatures: float32 [rows], 0 is greedy; keys: int64 [rows];
    slots: int32 [rows]; result: int32 [rows, 2], contiguous: the token, and the bits of the largest logit in
    float32 (NaN if any is). Ties go to the smaller id.
    """
    rows, vocab = logits.shape
    blocks = triton.cdiv(vocab, _BLOCK)
    up = triton.next_power_of_2(blocks)
    peaks, scores = torch.empty(2, rows, blocks, dtype=torch.float32, device=logits.device)
    choices = torch.empty(rows, blocks, dtype=torch.int32, device=logits.device)
    grid, stride = (rows, blocks), logits.stride(0)
    _peaks[grid](logits, peaks, vocab, stride, BLOCKS=blocks, BLOCK=_BLOCK, num_warps=8)
    _scores[grid](
        logits,
        peaks,
        temperatures,
        keys,
        scores,
        choices,
        vocab,
        stride,
        BLOCKS=blocks,
        BLOCKS_UP=up,
        BLOCK=_BLOCK,
        num_warps=8,
    )
    _choose[(rows,)](
        peaks,
        scores,
        choices,
        slots,
        last_token,
        result,
        vocab,
        BLOCKS=blocks,
        BLOCKS_UP=up,
        num_warps=1,
    )
