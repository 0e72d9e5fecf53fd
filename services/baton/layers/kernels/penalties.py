"""Triton: penalties for tokens that occurred before, and masks of tokens, row by row of a batch.

Penalties are the same function as `engine.sampler_ops.penalize`, rounding included. Needs a GPU: import it
where one is in use.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

_BLOCK = 4096


@triton.jit
def allowed(words, mask, columns, width, inside):
    """Whether bits `columns` of row `mask` of words, int32 [masks, width], are set."""
    word = tl.load(words + mask * width + columns // 32, mask=inside, other=0)
    return (word >> (columns % 32)) & 1 != 0


@triton.jit
def _penalize(
    logits,
    rows,
    counted,
    counts,
    prompt,
    repetition,
    presence,
    frequency,
    words,
    masked,
    changed,
    vocab,
    stride,
    width,
    COUNTED: tl.constexpr,
    MASKED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    index = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < vocab
    row = tl.load(rows + index)
    x = tl.load(logits + row * stride + columns, mask=inside, other=0.0).to(tl.float32)
    if COUNTED:
        counts_row = tl.load(counted + row).to(tl.int64)
        if counts_row >= 0:
            count = tl.load(counts + counts_row * vocab + columns, mask=inside, other=0.0)
            occurred = count > 0
            before = occurred | (tl.load(prompt + counts_row * vocab + columns, mask=inside, other=0) > 0)
            factor = tl.load(repetition + index)
            x = tl.where(before, tl.where(x > 0, tl.div_rn(x, factor), x * factor), x)
            x = x - tl.load(frequency + index) * count
            x = x - tl.load(presence + index) * occurred.to(tl.float32)
    if MASKED:
        mask = tl.load(masked + row).to(tl.int64)
        if mask >= 0:
            x = tl.where(allowed(words, mask, columns, width, inside), x, -float("inf"))
    tl.store(changed + index * vocab + columns, x, mask=inside)


def penalize(
    logits: torch.Tensor,
    rows: torch.Tensor,
    counted: torch.Tensor,
    counts: torch.Tensor | None,
    prompt: torch.Tensor | None,
    repetition: torch.Tensor,
    presence: torch.Tensor,
    frequency: torch.Tensor,
    words: torch.Tensor | None = None,
    masked: torch.Tensor | None = None,
) -> torch.Tensor:
    """Penalizes the rows named by `rows` (int64 [n]) of logits [rows, vocab]; returns a changed copy,
    float32 [n, vocab].

    counted: int32 [rows], whose `counts` (float32 [slots, vocab]) and `prompt` (bool) a row has, or -1: it is
    not penalized; penalties: float32 [n]. words: int32 [masks, width], where bit t % 32 of word t // 32 is
    set if token t may be sampled; the others become -inf; masked: int32 [rows], a row's mask, or -1.
    """
    count, vocab = len(rows), logits.shape[1]
    changed = torch.empty(count, vocab, dtype=torch.float32, device=logits.device)
    _penalize[(count, triton.cdiv(vocab, _BLOCK))](
        logits,
        rows,
        counted,
        logits if counts is None else counts,
        logits if prompt is None else prompt.view(torch.uint8),
        repetition,
        presence,
        frequency,
        rows if words is None else words,
        rows if masked is None else masked,
        changed,
        vocab,
        logits.stride(0),
        0 if words is None else words.shape[1],
        COUNTED=counts is not None,
        MASKED=words is not None,
        BLOCK=_BLOCK,
        num_warps=8,
        # Rounds a product before it is subtracted, as on a CPU.
        enable_fp_fusion=False,
    )
    return changed
