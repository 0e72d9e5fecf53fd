"""Triton: sampling of a whole batch, from logits to the slots' last tokens.

The same function of (logits, temperature, generator state) as `engine.sampler_ops.draw`; the logits are read
once, and noise is computed for groups of tokens and for the tokens of one group. Needs a GPU: import it where
one is in use.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from triton.language.extra import libdevice

from baton.layers.kernels.penalties import allowed
from baton.layers.kernels.top_k_top_p import restrict

_GROUP = 256
"""Tokens, as in baton.engine.sampler_ops."""
_GROUPS = 16
"""Groups per program."""

# As in baton.engine.sampler_ops; SplitMix64's constants as int64.
_GAMMA = tl.constexpr(0x9E3779B97F4A7C15 - 2**64)
_MIX1 = tl.constexpr(0xBF58476D1CE4E5B9 - 2**64)
_MIX2 = tl.constexpr(0x94D049BB133111EB - 2**64)
_FIRST_GROUP = tl.constexpr(2**32)


@triton.jit
def mixed(key, index):
    z = key + (index + 1) * _GAMMA
    z = (z ^ ((z >> 30) & ((1 << 34) - 1))) * _MIX1
    z = (z ^ ((z >> 27) & ((1 << 37) - 1))) * _MIX2
    return z ^ ((z >> 31) & ((1 << 33) - 1))


@triton.jit
def _gumbel(key, index):
    z = mixed(key, index)
    uniform = (((z >> 11) & ((1 << 53) - 1)).to(tl.float32) + 0.5) * (2.0**-53)
    return -libdevice.log(-libdevice.log1p(-tl.minimum(uniform, 1 - 2.0**-24)))


@triton.jit
def _load(logits, changed, row_index, row, columns, vocab, stride, SPECIAL: tl.constexpr):
    """float32; SPECIAL: of `changed` logits where the row is among these. -inf behind the row's end."""
    inside = columns < vocab
    changed_row = tl.full((), -1, tl.int64)
    x = tl.full(columns.shape, -float("inf"), tl.float32)
    if SPECIAL:
        changed_row = tl.load(row_index + row).to(tl.int64)
        if changed_row >= 0:
            x = tl.load(changed + changed_row * vocab + columns, mask=inside, other=-float("inf"))
    if changed_row < 0:
        x = tl.load(logits + row * stride + columns, mask=inside, other=-float("inf")).to(tl.float32)
    return x


@triton.jit
def _masked(x, words, masked, row, columns, width, vocab):
    """-inf where the row's mask, if it has one, has no bit."""
    mask = tl.load(masked + row).to(tl.int64)
    if mask >= 0:
        x = tl.where(allowed(words, mask, columns, width, columns < vocab), x, -float("inf"))
    return x


@triton.jit
def _weigh(
    logits,
    changed,
    row_index,
    temperatures,
    tops,
    limits,
    peaks,
    masses,
    vocab,
    stride,
    groups,
    words,
    masked,
    width,
    GROUP: tl.constexpr,
    GROUPS: tl.constexpr,
    SPECIAL: tl.constexpr,
    MASKED: tl.constexpr,
):
    """Finds for each group of tokens the largest logit, NaN if one is NaN (MASKED: or infinite, and of
    what a row's mask lets pass); and for a temperature its mass, as a multiple of that logit's own
    weight. SPECIAL: of what lies within the row's limit below its `tops`."""
    row = tl.program_id(0).to(tl.int64)
    group = tl.program_id(1) * GROUPS + tl.arange(0, GROUPS)
    columns = group[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
    x = _load(logits, changed, row_index, row, columns, vocab, stride, SPECIAL)
    bad = tl.max((x != x).to(tl.int32), 1)
    if MASKED:
        bad = tl.maximum(bad, tl.max((x == float("inf")).to(tl.int32), 1))
        x = _masked(x, words, masked, row, columns, width, vocab)
    peak = tl.max(x, 1)
    tl.store(peaks + row * groups + group, tl.where(bad > 0, float("nan"), peak), mask=group < groups)
    temperature = tl.load(temperatures + row)
    if temperature > 0:
        # A group without possible tokens has no difference to compute.
        below = x - tl.where(peak == -float("inf"), 0.0, peak)[:, None]
        weight = tl.exp(below * tl.minimum(1 / temperature, 3e38))
        if SPECIAL:
            weight = tl.where((tl.load(tops + row) - x) / temperature <= tl.load(limits + row), weight, 0.0)
        tl.store(masses + row * groups + group, tl.sum(weight, 1), mask=group < groups)


@triton.jit
def _choose(
    logits,
    changed,
    row_index,
    temperatures,
    keys,
    raw,
    limits,
    peaks,
    masses,
    slots,
    counted,
    counts,
    last_token,
    result,
    vocab,
    stride,
    groups,
    words,
    masked,
    width,
    GROUP: tl.constexpr,
    GROUPS_UP: tl.constexpr,
    SPECIAL: tl.constexpr,
    COUNTED: tl.constexpr,
    MASKED: tl.constexpr,
):
    """A row's group, by its mass, and the token in it; greedy: the first of the largest. COUNTED: added to
    the row's counts if it keeps some."""
    row = tl.program_id(0).to(tl.int64)
    temperature = tl.load(temperatures + row)
    key = tl.load(keys + row)
    every = tl.arange(0, GROUPS_UP)
    inside = every < groups
    peak = tl.load(peaks + row * groups + every, mask=inside, other=-float("inf"))
    top = tl.max(peak, 0)
    score = peak
    if temperature > 0:
        mass = tl.load(masses + row * groups + every, mask=inside, other=0.0)
        score = (
            libdevice.log(mass) - (top - peak) / temperature + _gumbel(key, every.to(tl.int64) + _FIRST_GROUP)
        )
        score = tl.where(inside & (mass > 0), score, -float("inf"))
    group = tl.min(tl.where(score == tl.max(score, 0), every, groups), 0)
    group = tl.where(group < groups, group, 0)
    columns = group * GROUP + tl.arange(0, GROUP)
    x = _load(logits, changed, row_index, row, columns, vocab, stride, SPECIAL)
    if MASKED:
        x = _masked(x, words, masked, row, columns, width, vocab)
    if temperature > 0:
        distance = (top - x) / temperature
        possible = columns < vocab
        if SPECIAL:
            possible = possible & (distance <= tl.load(limits + row))
        x = tl.where(possible, _gumbel(key, columns.to(tl.int64)) - distance, -float("inf"))
    token = tl.min(tl.where(x == tl.max(x, 0), columns, vocab), 0)
    token = tl.where(token < vocab, token, 0)
    if SPECIAL:
        largest = tl.load(raw + row)
    else:
        bad = tl.max((peak != peak).to(tl.int32), 0)
        largest = tl.where(bad > 0, float("nan"), top)
    tl.store(last_token + tl.load(slots + row), token)
    tl.store(result + 2 * row, token)
    tl.store(result + 2 * row + 1, largest.to(tl.int32, bitcast=True))
    if COUNTED:
        counts_row = tl.load(counted + row).to(tl.int64)
        if counts_row >= 0:
            count = counts + counts_row * vocab + token
            tl.store(count, tl.load(count) + 1)


@dataclass(slots=True)
class Special:
    """Inputs of sampling besides temperatures and generator states."""

    changed: torch.Tensor
    """float32 [n, vocab]: logits after penalties, bias and the like."""
    row_index: torch.Tensor
    """int32 [rows]: the row's index among these, or -1."""
    changed_rows: torch.Tensor
    """int64 [n]: their rows."""
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


def sample(
    logits: torch.Tensor,
    temperatures: torch.Tensor,
    keys: torch.Tensor,
    slots: torch.Tensor,
    last_token: torch.Tensor,
    result: torch.Tensor,
    special: Special | None = None,
    masks: tuple[torch.Tensor, torch.Tensor] | None = None,
) -> None:
    """Samples a token for each row into `last_token` (int32) at its slot, and into `result`.

    logits: [rows, vocab], any float dtype, unmodified; temperatures: float32 [rows], 0 is greedy; keys: int64
    [rows]; slots: int32 [rows]; result: int32 [rows, 2], contiguous: the token, and the bits of the largest
    logit in float32 (NaN if any is). Ties go to the smaller id. A row's outcome depends on no other row, nor
    on whether `special` or `masks` are given for others' sake. masks: without `special` alone, whose changed
    logits are masked: words and rows as of `penalties.penalize`; the largest logit is then of those allowed.
    """
    assert special is None or masks is None
    rows, vocab = logits.shape
    groups = triton.cdiv(vocab, _GROUP)
    # Each in separate memory: Triton compiles again for a pointer with another alignment.
    peaks, masses = (torch.empty(rows, groups, device=logits.device) for _ in range(2))
    raw = tops = temperatures
    words, masked = masks or (slots, slots)
    width = words.shape[1] if masks is not None else 0
    changed, row_index, limits, counts = logits, slots, temperatures, None
    if special is not None:
        changed, row_index, limits, counts = (
            special.changed,
            special.row_index,
            special.limits,
            special.counts,
        )
        raw = tops = logits.amax(-1).float()
        if len(changed):
            tops = raw.index_copy(0, special.changed_rows, changed.amax(-1))
        if special.restricted:
            restrict(
                logits,
                changed,
                row_index,
                tops[:, None],
                temperatures,
                special.top_k,
                special.top_p,
                limits,
            )
    _weigh[(rows, triton.cdiv(groups, _GROUPS))](
        logits,
        changed,
        row_index,
        temperatures,
        tops,
        limits,
        peaks,
        masses,
        vocab,
        logits.stride(0),
        groups,
        words,
        masked,
        width,
        GROUP=_GROUP,
        GROUPS=_GROUPS,
        SPECIAL=special is not None,
        MASKED=masks is not None,
        num_warps=8,
    )
    _choose[(rows,)](
        logits,
        changed,
        row_index,
        temperatures,
        keys,
        raw,
        limits,
        peaks,
        masses,
        slots,
        slots if special is None else special.counted,
        last_token if counts is None else counts,
        last_token,
        result,
        vocab,
        logits.stride(0),
        groups,
        words,
        masked,
        width,
        GROUP=_GROUP,
        GROUPS_UP=triton.next_power_of_2(groups),
        SPECIAL=special is not None,
        COUNTED=counts is not None,
        MASKED=masks is not None,
        num_warps=4,
    )
