"""Triton: attention of a few rows of 2 to 8 tokens, a decode row's last one and its drafts, over the paged
pool, in one launch.

As `decode_attention`, whose tile of a KV head's queries is that of one token: here it is that of all tokens
of the row. All of them see the keys that were there before the step; those of the step are a tile of their
own, where each token sees those up to its own. Needs a GPU: import it where one is in use.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from baton.layers.attention import AttentionOptions
from baton.layers.kernels.decode_attention import _LOG2E, _entries

MOST_TOKENS = 8
MOST_SPLITS = 16
_MOST_MEMBERS = 64
"""Heads of a KV head times tokens of a row."""
_OWN = tl.constexpr(16)
"""Keys of a row's own tile: the least that the tensor cores take."""
_LEAST_BLOCKS = tl.constexpr(4)
"""Tiles of keys that are not worth splitting."""
_MERGED = 8192
"""Values that one program merges at a time; its registers hold no more."""


@triton.jit(do_not_specialize=["table", "lengths", "starts", "splits", "table_stride"])
def _attend(
    q,
    keys,
    values,
    table,
    lengths,
    starts,
    out,
    partial,
    sums,
    counters,
    splits,
    scale,
    q_stride,
    table_stride,
    page_stride,
    head_stride,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    MEMBERS: tl.constexpr,
    DIM: tl.constexpr,
    PAGE: tl.constexpr,
    BLOCK: tl.constexpr,
    SPLITS_UP: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    gdc_launch_dependents()
    split, head, row = tl.program_id(0), tl.program_id(1), tl.program_id(2).to(tl.int64)
    begin = tl.load(starts + row)
    count = tl.load(starts + row + 1) - begin
    before = tl.load(lengths + row) - count
    share = tl.maximum(tl.cdiv(tl.cdiv(before, splits), BLOCK), _LEAST_BLOCKS) * BLOCK
    parts = tl.maximum(tl.cdiv(before, share), 1)
    if (count == 0) | (split >= parts):
        return
    first = split * share
    last = tl.minimum(first + share, before)
    columns, offsets = tl.arange(0, DIM), tl.arange(0, BLOCK)
    pages = table + row * table_stride
    keys += head * head_stride
    values += head * head_stride

    # So the first keys are fetched while the previous kernel, which writes the step's keys and the queries,
    # ends. The pages of each tile are looked up one tile ahead.
    entry = _entries(pages, first + offsets, last, page_stride, DIM, PAGE)
    inside = (first + offsets < last)[:, None]
    k = tl.load(keys + entry[:, None] + columns[None, :], mask=inside, other=0.0)
    v = tl.load(values + entry[:, None] + columns[None, :], mask=inside, other=0.0)
    entry = _entries(pages, first + BLOCK + offsets, last, page_stride, DIM, PAGE)
    own = tl.arange(0, _OWN)
    own_entry = _entries(pages, before + own, before + count, page_stride, DIM, PAGE)
    gdc_wait()
    member = tl.arange(0, MEMBERS)
    token, of_group = member // GROUP, member % GROUP
    there = (token < count)[:, None]
    queries = q + (begin + token)[:, None] * q_stride + (head * GROUP + of_group)[:, None] * DIM
    query = tl.load(queries + columns[None, :], mask=there, other=0.0)

    peak = tl.full((MEMBERS,), -float("inf"), tl.float32)
    total = tl.zeros((MEMBERS,), tl.float32)
    result = tl.zeros((MEMBERS, DIM), tl.float32)
    if split == 0:
        at = own_entry[:, None] + columns[None, :]
        own_k = tl.load(keys + at, mask=(own < count)[:, None], other=0.0)
        own_v = tl.load(values + at, mask=(own < count)[:, None], other=0.0)
        # Rows of padding in the tile see the first, so that nothing is divided by zero.
        seen = (own[None, :] <= token[:, None]) & (own < count)[None, :]
        own_scores = tl.where(seen, tl.dot(query, tl.trans(own_k)) * scale, -float("inf"))
        peak = tl.max(own_scores, 1)
        own_weights = tl.exp2(own_scores - peak[:, None])
        total = tl.sum(own_weights, 1)
        result = tl.dot(own_weights.to(query.dtype), own_v)
    for start in range(first, last, BLOCK):
        inside = (start + BLOCK + offsets < last)[:, None]
        k_next = tl.load(keys + entry[:, None] + columns[None, :], mask=inside, other=0.0)
        v_next = tl.load(values + entry[:, None] + columns[None, :], mask=inside, other=0.0)
        entry = _entries(pages, start + 2 * BLOCK + offsets, last, page_stride, DIM, PAGE)
        scores = tl.dot(query, tl.trans(k)) * scale
        scores = tl.where((start + offsets < last)[None, :], scores, -float("inf"))
        highest = tl.maximum(peak, tl.max(scores, 1))
        weights = tl.exp2(scores - highest[:, None])
        fade = tl.exp2(peak - highest)
        total = total * fade + tl.sum(weights, 1)
        result = tl.dot(weights.to(query.dtype), v, result * fade[:, None])
        peak = highest
        k = k_next
        v = v_next
    result = result / total[:, None]

    outputs = out + ((begin + token).to(tl.int64) * KV_HEADS + head) * GROUP * DIM + of_group * DIM
    if parts == 1:
        tl.store(outputs[:, None] + columns[None, :], result, mask=there)
    else:
        slot = row * KV_HEADS + head
        offset = (slot * splits + split) * MEMBERS + member
        tl.store(partial + offset[:, None] * DIM + columns[None, :], result)
        tl.store(sums + offset, peak + tl.log2(total))
        # The barrier orders all threads' stores before the count, which releases them.
        tl.debug_barrier()
        if tl.atomic_add(counters + slot, 1, sem="acq_rel") == parts - 1:
            part = tl.arange(0, SPLITS_UP)[:, None]
            every = (slot * splits + part) * MEMBERS + member[None, :]
            weight = tl.load(sums + every, mask=part < parts, other=-float("inf"), cache_modifier=".cg")
            weight = tl.exp2(weight - tl.max(weight, 0)[None, :])
            weight = weight / tl.sum(weight, 0)[None, :]
            for left in tl.static_range(0, DIM, COLUMNS):
                some = left + tl.arange(0, COLUMNS)
                found = tl.load(
                    partial + every[:, :, None] * DIM + some[None, None, :],
                    mask=(part < parts)[:, :, None],
                    other=0.0,
                    cache_modifier=".cg",
                )
                merged = tl.sum(found * weight[:, :, None], 0)
                tl.store(outputs[:, None] + some[None, :], merged, mask=there)
            tl.store(counters + slot, 0)


def _members(group: int) -> int:
    """Rows of a tile, for `group` heads per KV head."""
    return max(16, 1 << (MOST_TOKENS * group - 1).bit_length())


def fits(group: int, dim: int, dtype: torch.dtype, options: AttentionOptions) -> bool:
    """Whether this computes such layers."""
    plain = options.window is None and options.chunk is None and not options.softcap
    plain = plain and options.sinks is None and options.kv_scales is None
    return plain and dtype.itemsize == 2 and dim in (64, 128) and _members(group) <= _MOST_MEMBERS


def scratch_size(rows: int, kv_heads: int, group: int, dim: int, splits: int) -> int:
    """Of `attend`."""
    return rows * kv_heads * splits * _members(group) * (dim + 1)


def attend(
    q: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    table: torch.Tensor,
    lengths: torch.Tensor,
    starts: torch.Tensor,
    out: torch.Tensor,
    scratch: torch.Tensor,
    counters: torch.Tensor,
    splits: int,
    scale: float | None = None,
) -> None:
    """q [tokens, heads, head_dim] of rows of at most MOST_TOKENS over their keys and values into `out`,
    contiguous, of q's shape.

    keys, values: a layer's [pages, page_size, kv heads, head_dim], a head's tokens contiguous; table: int32
    [rows, pages]; lengths: int32 [rows], the row's own tokens included; starts: int32 [rows + 1], where each
    row's tokens begin. Reads nothing behind a row's end. `splits`: parts at most that a row's keys are
    divided into, up to MOST_SPLITS; `scratch`: float32 [scratch_size]; `counters`: int32 [rows * kv heads] of
    zeros, which are zeros again when the kernel has ended. `table`, `lengths`, `starts` and all keys but the
    rows' own are read before the kernel before has ended, and must be there when it starts.
    """
    heads, dim = q.shape[1:]
    _, page_size, kv_heads, _ = keys.shape
    group, rows = heads // kv_heads, len(lengths)
    members, splits_up = _members(group), triton.next_power_of_2(splits)
    parts = rows * kv_heads * splits * members
    _attend[(splits, kv_heads, rows)](
        q,
        keys,
        values,
        table,
        lengths,
        starts,
        out,
        scratch[: parts * dim],
        scratch[parts * dim :],
        counters,
        splits,
        _LOG2E * (dim**-0.5 if scale is None else scale),
        q.stride(0),
        table.stride(0),
        keys.stride(0),
        keys.stride(2),
        KV_HEADS=kv_heads,
        GROUP=group,
        MEMBERS=members,
        DIM=dim,
        PAGE=page_size,
        BLOCK=64,
        SPLITS_UP=splits_up,
        COLUMNS=min(dim, max(16, _MERGED // (members * splits_up))),
        num_warps=8 if members > 32 else 4,
        launch_pdl=True,
    )
