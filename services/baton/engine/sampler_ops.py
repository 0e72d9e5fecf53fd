"""The arithmetic of sampling in torch: counter-based randomness, penalties, thresholds, the draw.

Randomness is a pure function of (seed, position, id of a token or group). The generator is SplitMix64
(Steele, Lea and Flood, Fast Splittable Pseudorandom Number Generators, OOPSLA 2014) with Stafford's mix 13. A
row's state is the seed mixed with the position; token t takes the stream's output t. Nothing else enters, so
that neither batch, slot, process nor device can change what is drawn.
"""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt
import torch

_GAMMA = 0x9E3779B97F4A7C15
_MIX1 = 0xBF58476D1CE4E5B9
_MIX2 = 0x94D049BB133111EB

FIRST_GROUP = 2**32
"""A row's stream gives noise to token ids first, and from here on to groups of them."""


def _signed(value: int) -> int:
    return value - 2**64 if value >= 2**63 else value


def row_keys(seeds: npt.NDArray[np.uint64], positions: npt.NDArray[np.uint64]) -> npt.NDArray[np.int64]:
    """One generator state per row, from its seed and the position that it samples."""
    mixed = seed_keys(seeds).view(np.uint64)
    return _mix_numpy(mixed + (positions + np.uint64(1)) * np.uint64(_GAMMA)).view(np.int64)


def seed_keys(seeds: npt.NDArray[np.uint64]) -> npt.NDArray[np.int64]:
    """What `position_keys` makes generator states of."""
    return _mix_numpy(seeds + np.uint64(_GAMMA)).view(np.int64)


def position_keys(seeds: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """`row_keys` where only the device knows the positions; seeds: `seed_keys`; int64 [rows]."""
    if seeds.is_cuda:
        from baton.layers.kernels import draft_steps

        return draft_steps.position_keys(seeds, positions)
    return _mix(seeds + (positions.long() + 1) * _signed(_GAMMA))


def gumbel(keys: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """Standard Gumbel noise, float32 in (-2.9, 37.5), for int64 row keys and ids of broadcastable shapes."""
    z = _mix(keys + (ids + 1) * _signed(_GAMMA))
    # 53 bits as float32: values near 0, which make the large noise that decides, keep their precision.
    uniform = _shift(z, 11).to(torch.float32).add_(0.5).mul_(2.0**-53).clamp_(max=1 - 2.0**-24)
    return uniform.neg_().log1p_().neg_().log_().neg_()


def _mix(z: torch.Tensor) -> torch.Tensor:
    z = (z ^ _shift(z, 30)) * _signed(_MIX1)
    z = (z ^ _shift(z, 27)) * _signed(_MIX2)
    return z ^ _shift(z, 31)


def _shift(z: torch.Tensor, bits: int) -> torch.Tensor:
    """Logical shift right of int64."""
    return (z >> bits) & ((1 << (64 - bits)) - 1)


def _mix_numpy(z: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    z = (z ^ (z >> np.uint64(30))) * np.uint64(_MIX1)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(_MIX2)
    return z ^ (z >> np.uint64(31))


_CANDIDATES = 1024
_GROUP = 256


def penalize(
    logits: torch.Tensor,
    counts: torch.Tensor,
    prompt: torch.Tensor,
    repetition: torch.Tensor,
    presence: torch.Tensor,
    frequency: torch.Tensor,
) -> None:
    """In place. `counts` [rows, vocab]: how often each token was output; `prompt` bool [rows, vocab]: whether
    it is in the prompt; penalties [rows].

    Repetition (Keskar et al., CTRL, arXiv:1909.05858): logits of tokens in prompt or output are divided by it
    where positive, multiplied where negative. Presence and frequency (the OpenAI API): subtracted from the
    logits of tokens in the output, once and once per occurrence.
    """
    occurred = counts > 0
    factor = torch.where(occurred | prompt, repetition[:, None], 1.0)
    logits.copy_(torch.where(logits > 0, logits / factor, logits * factor))
    logits.sub_(frequency[:, None] * counts).sub_(presence[:, None] * occurred)


def thresholds(
    logits: torch.Tensor, top_k: torch.Tensor, top_p: torch.Tensor, largest_k: int
) -> torch.Tensor:
    """[rows]: the smallest logit that top-k and then top-p keep, -inf where they keep all.

    top-k int64 [rows] (0: all) keeps the k largest; top-p float32 [rows] then the smallest set of the largest
    whose renormalized probability reaches p. Tokens that tie with the last kept are kept as well, which makes
    the outcome independent of any order of sorting. `largest_k`: no row's top-k is larger; 0: some row with
    top-p has no top-k.
    """
    vocab = logits.shape[1]
    width = min(vocab, max(largest_k + 1, 2) if largest_k else _CANDIDATES)
    if logits.device.type != "cpu":
        width = vocab
    result, covered = _thresholds(logits, top_k, top_p, width)
    if width < vocab and logits.device.type == "cpu" and not bool(covered.all()):
        rest = (~covered).nonzero().squeeze(1)
        result[rest] = _thresholds(logits[rest], top_k[rest], top_p[rest], vocab)[0]
    return result


def _thresholds(
    logits: torch.Tensor, top_k: torch.Tensor, top_p: torch.Tensor, width: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """The threshold from the `width` largest logits only, and whether they were enough."""
    vocab = logits.shape[1]
    largest = logits.topk(width, dim=-1).values if width < vocab else logits.sort(-1, descending=True).values
    limit = torch.where((top_k > 0) & (top_k < vocab), top_k, vocab)
    by_k = largest.gather(1, (limit - 1).clamp(max=width - 1)[:, None])
    inside = largest >= torch.where(limit[:, None] < vocab, by_k, -torch.inf)
    total = torch.where(
        limit < vocab, largest.masked_fill(~inside, -torch.inf).logsumexp(-1), logits.logsumexp(-1)
    )
    probabilities = (largest - total[:, None]).exp().masked_fill_(~inside, 0.0)
    before = probabilities.cumsum(-1) - probabilities
    kept = inside & ((before < top_p[:, None]) | (top_p[:, None] >= 1.0))
    kept[:, 0] = True
    result = largest.masked_fill(~kept, torch.inf).amin(-1)
    unrestricted = (limit >= vocab) & (top_p >= 1.0)
    # Enough: the logits include all that top-k keeps, with ties, and one below the threshold.
    whole = (limit <= width) | (limit >= vocab)
    seen = whole & (largest[:, -1] < torch.where(limit < vocab, by_k.squeeze(1), result))
    seen |= largest[:, -1] == -torch.inf  # what a grammar forbids: every other logit is among the largest
    covered = unrestricted | seen if width < vocab else torch.ones_like(unrestricted)
    return result.masked_fill(unrestricted, -torch.inf), covered


def draw(logits: torch.Tensor, floor: torch.Tensor | None, keys: torch.Tensor) -> torch.Tensor:
    """Samples one token id, int64 [rows], from the softmax of the logits, or of those >= floor [rows].

    The largest logit of a row is about 0, so that what `exp` rounds to 0 could not be drawn either. The
    Gumbel-max trick (Maddison, Tarlow and Minka, arXiv:1411.0030), twice: the largest log mass plus noise
    chooses one of the groups of 256 ids, the largest logit plus noise the token in it. Noise is of int64
    `keys` [rows] and group or id. That is far less noise than one for each token; and unlike with a search in
    the cumulative sum, logits that differ by rounding seldom yield another token.
    """
    rows, vocab = logits.shape
    groups = -(-vocab // _GROUP)
    weights = logits.new_zeros(rows, groups * _GROUP)
    # exp is three times as slow, and again twice as slow where a logit is -inf.
    torch.mul(logits, math.log2(math.e), out=weights[:, :vocab]).exp2_()
    if floor is not None:
        weights[:, :vocab].mul_(logits >= floor[:, None])
    masses = weights.view(rows, groups, _GROUP).sum(-1)
    numbers = FIRST_GROUP + torch.arange(groups, device=logits.device)
    group = (masses.log() + gumbel(keys[:, None], numbers)).argmax(-1, keepdim=True)
    tokens = group * _GROUP + torch.arange(_GROUP, device=logits.device)
    inside = logits.gather(1, tokens.clamp(max=vocab - 1))
    possible = tokens < vocab if floor is None else (tokens < vocab) & (inside >= floor[:, None])
    scores = (inside + gumbel(keys[:, None], tokens)).masked_fill_(~possible, -torch.inf)
    return tokens.gather(1, scores.argmax(-1, keepdim=True)).squeeze(1)
