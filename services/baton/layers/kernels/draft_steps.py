"""Triton: what a step with drafts does beside its forward pass, in one launch each rather than some dozens.

Needs a GPU: import it where one is in use.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from baton.layers.kernels.sampling import mixed

_BLOCK = 512


@triton.jit(do_not_specialize=["count", "rows", "drafted"])
def _settle(
    ids,
    positions,
    lengths,
    token_slots,
    row_slots,
    drafts,
    right,
    last_token,
    count,
    rows,
    drafted,
    BLOCK: tl.constexpr,
):
    for start in range(0, count, BLOCK):
        token = start + tl.arange(0, BLOCK)
        inside = token < count
        slot = tl.load(token_slots + token, mask=inside, other=0)
        position = tl.load(positions + token, mask=inside, other=0)
        known = tl.load(ids + token, mask=inside, other=0)
        follows = position < 0
        kept = tl.load(right + slot, mask=inside & follows, other=0)
        at = tl.minimum(tl.maximum(kept - 2 - known, 0), drafted - 1)
        draft = tl.load(drafts + at, mask=inside & (known < -1), other=0)
        last = tl.load(last_token + slot, mask=inside & (known == -1), other=0)
        tl.store(ids + token, tl.where(known < -1, draft, tl.where(known < 0, last, known)), mask=inside)
        tl.store(positions + token, kept - 1 - position, mask=inside & follows)
    for start in range(0, rows, BLOCK):
        row = start + tl.arange(0, BLOCK)
        inside = row < rows
        slot = tl.load(row_slots + row, mask=inside, other=0)
        length = tl.load(lengths + row, mask=inside, other=0)
        kept = tl.load(right + slot, mask=inside & (length < 0), other=0)
        tl.store(lengths + row, kept - length, mask=inside & (length < 0))
    tl.debug_barrier()  # all have read `right`
    for start in range(0, rows, BLOCK):
        row = start + tl.arange(0, BLOCK)
        slot = tl.load(row_slots + row, mask=row < rows, other=0)
        tl.store(right + slot, tl.zeros_like(slot), mask=row < rows)


def settle(
    ids: torch.Tensor,
    positions: torch.Tensor,
    lengths: torch.Tensor,
    token_slots: torch.Tensor,
    row_slots: torch.Tensor,
    drafts: torch.Tensor,
    right: torch.Tensor,
    last_token: torch.Tensor,
) -> None:
    """`DeviceSlots.settle`; all int32 and contiguous. `right`, `last_token`: of the slots. By one program:
    its own barrier keeps what it reads of `right` before what it writes."""
    sizes = len(ids), len(lengths), len(drafts)
    memory = ids, positions, lengths, token_slots, row_slots, drafts, right, last_token
    _settle[(1,)](*memory, *sizes, BLOCK=_BLOCK)


@triton.jit
def _verify(sampled, drafts, slots, firsts, depths, last_token, slots_right, right, DEEPEST: tl.constexpr):
    sample = tl.program_id(0)
    first, depth = tl.load(firsts + sample).to(tl.int64), tl.load(depths + sample)
    at = tl.arange(0, DEEPEST)
    follows = at + 1 < depth
    token = tl.load(sampled + 2 * (first + at), mask=follows, other=0)
    draft = tl.load(drafts + first + at + 1, mask=follows, other=0)
    count = tl.min(tl.where(follows & (token == draft), DEEPEST, at), 0)
    slot = tl.load(slots + sample).to(tl.int64)
    tl.store(last_token + slot, tl.load(sampled + 2 * (first + count)))
    tl.store(slots_right + slot, count)
    tl.store(right + sample, count)


def verify(
    sampled: torch.Tensor,
    drafts: torch.Tensor,
    slots: torch.Tensor,
    firsts: torch.Tensor,
    depths: torch.Tensor,
    deepest: int,
    last_token: torch.Tensor,
    slots_right: torch.Tensor,
    right: torch.Tensor,
) -> None:
    """How many drafts are right, into `right` [samples], and at their slots into `slots_right` and, the token
    behind the last of them, `last_token`.

    sampled: [wanted, 2], tokens first, as sampled behind `drafts` [wanted]; slots, firsts, depths [samples]:
    of each sample, where its tokens begin, and how many they are, at most `deepest`. Integers, contiguous.
    """
    _verify[(len(slots),)](
        sampled,
        drafts,
        slots,
        firsts,
        depths,
        last_token,
        slots_right,
        right,
        DEEPEST=triton.next_power_of_2(deepest),
        num_warps=1,
    )


@triton.jit(do_not_specialize=["count", "period"])
def _position_keys(seeds, positions, keys, count, period, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = at < count
    seed = tl.load(seeds + at % period, mask=inside, other=0)
    position = tl.load(positions + at, mask=inside, other=0).to(tl.int64)
    tl.store(keys + at, mixed(seed, position), mask=inside)


def position_keys(seeds: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """`sampler_ops.position_keys`: seeds int64 [rows], positions [..., rows], contiguous -> int64"""
    keys = torch.empty_like(positions, dtype=torch.int64)
    count = positions.numel()
    grid = (triton.cdiv(count, _BLOCK),)
    _position_keys[grid](seeds, positions, keys, count, len(seeds), BLOCK=_BLOCK)
    return keys
