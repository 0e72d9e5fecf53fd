"""Triton: sampling of a whole batch, from logits to the slots' last tokens.

The same function of (logits, temperature, generator state) as `engine.sampler_ops.draw`, without a tensor of
noise: each pass reads the logits once. Needs a GPU: import it where one is in use.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from triton.language.extra import libdevice

from baton.layers.kernels.limits import restrict

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
    changed,
    places,
    limits,
    scores,
    choices,
    vocab,
    stride,
    BLOCKS: tl.constexpr,
    BLOCKS_UP: tl.constexpr,
    BLOCK: tl.constexpr,
    SPECIAL: tl.constexpr,
):
    """The best score of a block, and whose it is: the logit, or for a temperature the logit over it plus
    Gumbel noise. SPECIAL: of `changed` logits where a row has a place there, and only within its limit."""
    row, block = tl.program_id(0).to(tl.int64), tl.program_id(1)
    columns = block * BLOCK + tl.arange(0, BLOCK)
    inside = columns < vocab
    x = tl.full((BLOCK,), -float("inf"), tl.float32)
    place = tl.full((), -1, tl.int64)
    if SPECIAL:
        place = tl.load(places + row).to(tl.int64)
        if place >= 0:
            x = tl.load(changed + place * vocab + columns, mask=inside, other=-float("inf"))
    if place < 0:
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
        distance = (peak - x) / temperature
        if SPECIAL:
            inside = inside & (distance <= tl.load(limits + row))
        x = tl.where(inside, noise - distance, -float("inf"))
    best = tl.max(x, 0)
    tl.store(scores + row * BLOCKS + block, best)
    tl.store(choices + row * BLOCKS + block, tl.min(tl.where(x == best, columns, vocab), 0))


@triton.jit
def _choose(
    peaks,
    scores,
    choices,
    slots,
    counted,
    counts,
    last_token,
    result,
    vocab,
    BLOCKS: tl.constexpr,
    BLOCKS_UP: tl.constexpr,
    COUNTED: tl.constexpr,
):
    """The best of all blocks; COUNTED: added to the row's counts if it keeps some."""
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
    if COUNTED:
        own = tl.load(counted + row).to(tl.int64)
        if own >= 0:
            count = counts + own * vocab + token
            tl.store(count, tl.load(count) + 1)


@dataclass(slots=True)
class Special:
    """What sampling takes beside temperatures and generator states."""

    changed: torch.Tensor
    """float32 [n, vocab]: logits after penalties, bias and the like."""
    places: torch.Tensor
    """int32 [rows]: the row's place among these, or -1."""
    changed_rows: torch.Tensor
    """int64 [n]: whose they are."""
    restricted: bool
    """Whether any row has a top-k or top-p."""
    top_k: torch.Tensor
    """int32 [rows]; 0: all tokens."""
    top_p: torch.Tensor
    """float32 [rows]"""
    limits: torch.Tensor
    """float32 [rows]: how far (peak - logit) / temperature may go; by min-p, or infinite. Is lowered to what
    top-k and top-p keep."""
    counted: torch.Tensor
    """int32 [rows]: the row of `counts` that the token is added to, or -1."""
    counts: torch.Tensor | None
    """float32 [slots, vocab]"""


def _largest(logits: torch.Tensor) -> torch.Tensor:
    """float32 [rows, blocks]"""
    rows, vocab = logits.shape
    blocks = triton.cdiv(vocab, _BLOCK)
    peaks = torch.empty(rows, blocks, dtype=torch.float32, device=logits.device)
    _peaks[(rows, blocks)](logits, peaks, vocab, logits.stride(0), BLOCKS=blocks, BLOCK=_BLOCK, num_warps=8)
    return peaks


def sample(
    logits: torch.Tensor,
    temperatures: torch.Tensor,
    keys: torch.Tensor,
    slots: torch.Tensor,
    last_token: torch.Tensor,
    result: torch.Tensor,
    special: Special | None = None,
) -> None:
    """Samples a token for each row into `last_token` (int32) at its slot, and into `result`.

    logits: [rows, vocab], any float dtype, unmodified; temperatures: float32 [rows], 0 is greedy; keys: int64
    [rows]; slots: int32 [rows]; result: int32 [rows, 2], contiguous: the token, and the bits of the largest
    logit in float32 (NaN if any is). Ties go to the smaller id. A row's outcome depends on no other row, nor
    on whether `special` is given for others' sake.
    """
    rows, vocab = logits.shape
    blocks = triton.cdiv(vocab, _BLOCK)
    up = triton.next_power_of_2(blocks)
    raw = peaks = _largest(logits)
    if special is not None:
        if len(special.changed):
            peaks = raw.index_copy(0, special.changed_rows, _largest(special.changed))
        if special.restricted:
            restrict(
                logits,
                special.changed,
                special.places,
                peaks,
                temperatures,
                special.top_k,
                special.top_p,
                special.limits,
            )
    scores = torch.empty(rows, blocks, dtype=torch.float32, device=logits.device)
    choices = torch.empty(rows, blocks, dtype=torch.int32, device=logits.device)
    _scores[(rows, blocks)](
        logits,
        peaks,
        temperatures,
        keys,
        logits if special is None else special.changed,
        slots if special is None else special.places,
        peaks if special is None else special.limits,
        scores,
        choices,
        vocab,
        logits.stride(0),
        BLOCKS=blocks,
        BLOCKS_UP=up,
        BLOCK=_BLOCK,
        SPECIAL=special is not None,
        num_warps=8,
    )
    counts = None if special is None else special.counts
    _choose[(rows,)](
        raw,
        scores,
        choices,
        slots,
        slots if special is None else special.counted,
        last_token if counts is None else counts,
        last_token,
        result,
        vocab,
        BLOCKS=blocks,
        BLOCKS_UP=up,
        COUNTED=counts is not None,
        num_warps=1,
    )
