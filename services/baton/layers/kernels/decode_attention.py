"""Triton: attention of rows of one token over the paged pool, in one launch.

A row's keys are split among programs (flash-decoding, Dao et al. 2023). The last program to end merges the
results of all, instead of a second launch. Needs a GPU: import it where one is in use.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from baton.layers.attention import NONE, AttentionOptions

_MERGED = 128
"""Parts times heads of `_DIM` that one program merges; its registers hold no more."""
_DIM = 128
FEW_PARTS = tl.constexpr(8)
"""So many parts are merged faster one after another: 5.5 us of 6.9 for 256 keys (groups of 4, an H100)."""
FEW_VALUES = tl.constexpr(8 * _DIM)
"""Most values of a thread for heads that fit so; more would take too many registers."""
_LOG2E = 1.4426950408889634
LOG2E = tl.constexpr(_LOG2E)


@triton.jit
def capped(scores, CAP: tl.constexpr):
    """CAP * tanh(scores / CAP); scores and CAP in units of a power of two."""
    if CAP > 0:
        return CAP * (2 * tl.sigmoid(scores * (2 / CAP)) - 1)
    else:
        return scores


def wide(dtype: torch.dtype) -> tl.dtype:
    """In what FP8 keys and values are multiplied: they are exact in float16, and their conversion is one
    instruction there."""
    return tl.float32 if dtype == torch.float32 else tl.float16


@triton.jit
def _entries(pages, at, last, page_stride, DIM: tl.constexpr, PAGE: tl.constexpr):
    """Where the positions `at` below `last` lie in a head of a layer."""
    page = tl.load(pages + at // PAGE, mask=at < last, other=0).to(tl.int64)
    return page * page_stride + (at % PAGE) * DIM


@triton.jit
def _many_merged(
    partial,
    sums,
    at,
    parts,
    GROUP: tl.constexpr,
    MERGED: tl.constexpr,
    DIM: tl.constexpr,
    SPLITS_UP: tl.constexpr,
):
    """A KV head's results [MERGED, DIM] from those of its keys' parts, the first of which is at `at`."""
    part = tl.arange(0, SPLITS_UP)[:, None]
    member = tl.arange(0, MERGED)[None, :]
    columns = tl.arange(0, DIM)[None, None, :]
    offset = at + part * GROUP + member
    there = (part < parts) & (member < GROUP)
    found = tl.load(
        partial + offset[:, :, None] * DIM + columns, mask=there[:, :, None], other=0.0, cache_modifier=".cg"
    )
    weight = tl.load(sums + offset, mask=there, other=-1e30, cache_modifier=".cg")
    weight = tl.exp2(weight - tl.max(weight, 0)[None, :])
    weight = tl.where(there, weight, 0.0)
    return tl.sum(found * weight[:, :, None], 0) / tl.sum(weight, 0)[:, None]


@triton.jit
def _few_merged(partial, sums, at, parts, GROUP: tl.constexpr, MERGED: tl.constexpr, DIM: tl.constexpr):
    """Merges up to `FEW_PARTS` parts of a row: all loads are under way at once, and each thread loads all
    sums that it needs, so that little passes between threads."""
    member, columns = tl.arange(0, MERGED)[:, None], tl.arange(0, DIM)[None, :]
    at += member + tl.zeros((1, DIM), tl.int32)
    peak = tl.full((MERGED, DIM), -1e30, tl.float32)
    total = tl.zeros((MERGED, DIM), tl.float32)
    result = tl.zeros((MERGED, DIM), tl.float32)
    for part in tl.static_range(FEW_PARTS):
        there = (member < GROUP) & (part < parts)
        offset = at + part * GROUP
        found = tl.load(partial + offset * DIM + columns, mask=there, other=0.0, cache_modifier=".cg")
        score = tl.load(sums + offset, mask=there, other=-float("inf"), cache_modifier=".cg")
        highest = tl.maximum(peak, score)
        fade = tl.exp2(peak - highest)
        weight = tl.exp2(score - highest)
        total = total * fade + weight
        result = result * fade + found * weight
        peak = highest
    return result / total


@triton.jit
def _merged(
    partial,
    sums,
    at,
    parts,
    GROUP: tl.constexpr,
    MERGED: tl.constexpr,
    DIM: tl.constexpr,
    SPLITS_UP: tl.constexpr,
):
    """Merges the parts of a row, the faster way by their number."""
    if MERGED * DIM <= FEW_VALUES:
        if parts <= FEW_PARTS:
            result = _few_merged(partial, sums, at, parts, GROUP, MERGED, DIM)
        else:
            result = _many_merged(partial, sums, at, parts, GROUP, MERGED, DIM, SPLITS_UP)
    else:
        result = _many_merged(partial, sums, at, parts, GROUP, MERGED, DIM, SPLITS_UP)
    return result


@triton.jit(do_not_specialize=["table", "lengths", "splits", "table_stride"])
def _decode(
    q,
    keys,
    values,
    sinks,
    kv_scales,
    table,
    lengths,
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
    WINDOW: tl.constexpr,
    CAP: tl.constexpr,
    SINKS: tl.constexpr,
    FP8: tl.constexpr,
    WIDE: tl.constexpr,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    GROUP_UP: tl.constexpr,
    DIM: tl.constexpr,
    PAGE: tl.constexpr,
    BLOCK: tl.constexpr,
    SPLITS_UP: tl.constexpr,
    MERGED: tl.constexpr,
    PDL: tl.constexpr,
):
    if PDL:
        gdc_launch_dependents()
    split, head, row = tl.program_id(0), tl.program_id(1), tl.program_id(2).to(tl.int64)
    # All keys but the last were there before this step.
    before = tl.load(lengths + row) - 1
    low = tl.maximum(before + 1 - WINDOW, 0) if WINDOW else 0
    share = tl.maximum(tl.cdiv(tl.cdiv(before - low, splits), BLOCK), 1) * BLOCK
    parts = tl.maximum(tl.cdiv(before - low, share), 1)
    if split >= parts:
        return
    first = low + split * share
    last = tl.minimum(first + share, before)
    columns = tl.arange(0, DIM)
    pages = table + row * table_stride
    keys += head * head_stride
    values += head * head_stride

    # So the first keys are fetched while the previous kernel, which writes the last key and the query, ends.
    # The pages of each tile are looked up one tile ahead.
    offsets = tl.arange(0, BLOCK)
    entry = _entries(pages, first + offsets, last, page_stride, DIM, PAGE)
    inside = (first + offsets < last)[:, None]
    k = tl.load(keys + entry[:, None] + columns[None, :], mask=inside, other=0.0)
    v = tl.load(values + entry[:, None] + columns[None, :], mask=inside, other=0.0)
    entry = _entries(pages, first + BLOCK + offsets, last, page_stride, DIM, PAGE)
    last_row = tl.load(pages + before // PAGE).to(tl.int64) * page_stride + (before % PAGE) * DIM
    if PDL:
        gdc_wait()
    member = tl.arange(0, GROUP_UP)
    queries = q + row * q_stride + (head * GROUP + member[:, None]) * DIM + columns[None, :]
    query = tl.load(queries, mask=(member < GROUP)[:, None], other=0.0)
    if FP8:
        query = query.to(WIDE)
        scale = scale * tl.load(kv_scales + head)

    # The softmax begins with the row's own token, in the first part.
    mine = tl.load(keys + last_row + columns, mask=columns < (split == 0) * DIM, other=0.0)
    theirs = tl.load(values + last_row + columns, mask=columns < (split == 0) * DIM, other=0.0)
    score = capped(tl.sum(query.to(tl.float32) * mine.to(tl.float32)[None, :], 1) * scale, CAP)
    peak = tl.where(split == 0, score, -float("inf"))
    total = tl.zeros((GROUP_UP,), tl.float32) + tl.where(split == 0, 1.0, 0.0)
    result = tl.zeros((GROUP_UP, DIM), tl.float32) + theirs.to(tl.float32)[None, :]
    if SINKS:
        sink = tl.load(sinks + head * GROUP + member, mask=member < GROUP, other=0.0).to(tl.float32) * LOG2E
        peak = tl.where(split == 0, tl.maximum(score, sink), -float("inf"))
        own_weight = tl.where(split == 0, tl.exp2(score - peak), 0.0)
        total = own_weight + tl.where(split == 0, tl.exp2(sink - peak), 0.0)
        result = result * own_weight[:, None]
    for start in range(first, last, BLOCK):
        inside = (start + BLOCK + offsets < last)[:, None]
        k_next = tl.load(keys + entry[:, None] + columns[None, :], mask=inside, other=0.0)
        v_next = tl.load(values + entry[:, None] + columns[None, :], mask=inside, other=0.0)
        entry = _entries(pages, start + 2 * BLOCK + offsets, last, page_stride, DIM, PAGE)
        scores = capped(tl.dot(query, tl.trans(k.to(query.dtype)), input_precision="tf32x3") * scale, CAP)
        scores = tl.where((start + offsets < last)[None, :], scores, -float("inf"))
        highest = tl.maximum(peak, tl.max(scores, 1))
        weights = tl.exp2(scores - highest[:, None])
        fade = tl.exp2(peak - highest)
        total = total * fade + tl.sum(weights, 1)
        result = tl.dot(
            weights.to(query.dtype), v.to(query.dtype), result * fade[:, None], input_precision="tf32x3"
        )
        peak = highest
        k = k_next
        v = v_next
    result = result / total[:, None]
    if FP8:
        result = result * tl.load(kv_scales + KV_HEADS + head)

    slot = row * KV_HEADS + head
    outputs = out + slot * GROUP * DIM
    if parts == 1:
        tl.store(outputs + member[:, None] * DIM + columns[None, :], result, mask=(member < GROUP)[:, None])
    else:
        offset = (slot * splits + split) * GROUP + member
        tl.store(partial + offset[:, None] * DIM + columns[None, :], result, mask=(member < GROUP)[:, None])
        tl.store(sums + offset, peak + tl.log2(total), mask=member < GROUP)
        # The barrier orders all threads' stores before the count, which releases them.
        tl.debug_barrier()
        if tl.atomic_add(counters + slot, 1, sem="acq_rel") == parts - 1:
            merged = _merged(partial, sums, slot * splits * GROUP, parts, GROUP, MERGED, DIM, SPLITS_UP)
            of_group = tl.arange(0, MERGED)[:, None]
            tl.store(outputs + of_group * DIM + columns[None, :], merged, mask=of_group < GROUP)
            tl.store(counters + slot, 0)


@triton.jit
def _unpaired(pairs):
    """int16 that hold two codes of E4M3 each -> the first ones and the second ones, in float16."""
    both = tl.inline_asm_elementwise(
        "cvt.rn.f16x2.e4m3x2 $0, $1;", "=r,h", [pairs], dtype=tl.int32, is_pure=True, pack=1
    )
    first, second = (both & 0xFFFF).to(tl.int16), (both >> 16).to(tl.int16)
    return first.to(tl.float16, bitcast=True), second.to(tl.float16, bitcast=True)


@triton.jit(do_not_specialize=["table", "lengths", "table_stride"])
def _decode_whole(
    q,
    keys,
    values,
    kv_scales,
    table,
    lengths,
    out,
    scale,
    q_stride,
    table_stride,
    page_stride,
    head_stride,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    GROUP_UP: tl.constexpr,
    DIM: tl.constexpr,
    PAGE: tl.constexpr,
    BLOCK: tl.constexpr,
    STAGES: tl.constexpr,
    PDL: tl.constexpr,
):
    """FP8 pages of many rows, whose keys are not split. Tiles of codes are copied to shared memory ahead,
    which leaves registers for as many programs as there are pairs of 64 rows and 8 heads. Values lie across
    the tensor cores' operand, which shared memory gives in units of 16 bits: so they are read in pairs."""
    if PDL:
        gdc_launch_dependents()
    head, row = tl.program_id(0), tl.program_id(1).to(tl.int64)
    length = tl.load(lengths + row)
    columns, offsets, member = tl.arange(0, DIM), tl.arange(0, BLOCK), tl.arange(0, GROUP_UP)
    pair = tl.arange(0, DIM // 2)
    pages = table + row * table_stride
    keys += head * head_stride
    values += head * head_stride
    value_pairs = values.to(tl.pointer_type(tl.int16), bitcast=True)
    if PDL:
        gdc_wait()
    queries = q + row * q_stride + (head * GROUP + member[:, None]) * DIM + columns[None, :]
    query = tl.load(queries, mask=(member < GROUP)[:, None], other=0.0).to(tl.float16)
    scale = scale * tl.load(kv_scales + head)
    peak = tl.full((GROUP_UP,), -float("inf"), tl.float32)
    total = tl.zeros((GROUP_UP,), tl.float32)
    first = tl.zeros((GROUP_UP, DIM // 2), tl.float32)
    second = tl.zeros((GROUP_UP, DIM // 2), tl.float32)
    for start in tl.range(0, length, BLOCK, num_stages=STAGES):
        # A tile lies in one page.
        entry = tl.load(pages + start // PAGE).to(tl.int64) * page_stride + (start % PAGE + offsets) * DIM
        there = start + offsets < length
        k = tl.load(keys + entry[:, None] + columns[None, :], mask=there[:, None], other=0.0)
        v = tl.load(value_pairs + (entry[:, None] // 2 + pair[None, :]), mask=there[:, None], other=0)
        scores = tl.dot(query, tl.trans(k.to(tl.float16))) * scale
        scores = tl.where(there[None, :], scores, -float("inf"))
        highest = tl.maximum(peak, tl.max(scores, 1))
        weights = tl.exp2(scores - highest[:, None])
        fade = tl.exp2(peak - highest)
        total = total * fade + tl.sum(weights, 1)
        v_first, v_second = _unpaired(v)
        weights = weights.to(tl.float16)
        first = tl.dot(weights, v_first, first * fade[:, None])
        second = tl.dot(weights, v_second, second * fade[:, None])
        peak = highest
    factor = (tl.load(kv_scales + KV_HEADS + head) / total)[:, None]
    outputs = out + (row * KV_HEADS + head) * GROUP * DIM
    result = tl.interleave(first * factor, second * factor)
    tl.store(outputs + member[:, None] * DIM + columns[None, :], result, mask=(member < GROUP)[:, None])


def most_splits(group: int, dim: int = _DIM) -> int:
    """Most parts that a row's keys can be split into, for `group` heads of `dim` per KV head; a power of
    two."""
    return max(1, min(32, _MERGED * _DIM // max(dim, _DIM) // (1 << (group - 1).bit_length())))


WHOLE_BLOCK, WHOLE_STAGES = 64, 5


def whole(dim: int, page_size: int, options: AttentionOptions) -> bool:
    """Whether rows whose keys are not split have a kernel of their own, for queries of 16 bits."""
    plain = options.window is None and not options.softcap and options.sinks is None
    return options.kv_scales is not None and plain and page_size % WHOLE_BLOCK == 0 and dim <= _DIM


def decode_attention(
    q: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    table: torch.Tensor,
    lengths: torch.Tensor,
    out: torch.Tensor,
    scratch: torch.Tensor,
    counters: torch.Tensor,
    splits: int,
    pdl: bool,
    options: AttentionOptions = NONE,
    block: tuple[int, int] | None = None,
) -> None:
    """Rows' last tokens q [rows, heads, head_dim] over their keys and values into `out`, contiguous, of q's
    shape.

    keys, values: a layer's [pages, page_size, kv heads, head_dim], a head's tokens contiguous; table: int32
    [rows, pages]; lengths: int32 [rows], the row's own token included. head_dim is a power of two.
    `options`: all but `latent`. Reads nothing behind a row's end, nor before its window.

    `splits`: parts at most that a row's keys are divided into, up to `most_splits`. If more than one,
    `scratch`: float32 [rows * heads * splits * (head_dim + 1)], and `counters`: int32 [rows * kv heads] of
    zeros, which are zeros again when the kernel has ended. `pdl`: starts while the kernel before ends, and
    waits for it before it reads what a step writes; `table`, `lengths` and all keys but the last are read
    earlier, and must be there when that kernel starts. `block`: keys of a tile, and warps; the best of those
    tried on an H200.
    """
    rows, heads, dim = q.shape
    _, page_size, kv_heads, _ = keys.shape
    group = heads // kv_heads
    parts = rows * heads * splits if splits > 1 else 0
    if splits == 1 and block is None and q.element_size() == 2 and whole(dim, page_size, options):
        _decode_whole[(kv_heads, rows)](
            q,
            keys,
            values,
            options.kv_scales,
            table,
            lengths,
            out,
            _LOG2E * (dim**-0.5 if options.scale is None else options.scale),
            q.stride(0),
            table.stride(0),
            keys.stride(0),
            keys.stride(2),
            KV_HEADS=kv_heads,
            GROUP=group,
            GROUP_UP=max(16, triton.next_power_of_2(group)),
            DIM=dim,
            PAGE=page_size,
            BLOCK=WHOLE_BLOCK,
            STAGES=WHOLE_STAGES,
            PDL=pdl,
            num_warps=4,
            launch_pdl=pdl,
        )
        return
    partial, sums = scratch[: parts * dim], scratch[parts * dim :]
    keys_of_tile, warps = block or ((64, 4) if dim <= _DIM else (32 if q.element_size() == 2 else 16, 4))
    _decode[(splits, kv_heads, rows)](
        q,
        keys,
        values,
        q if options.sinks is None else options.sinks,
        q if options.kv_scales is None else options.kv_scales,
        table,
        lengths,
        out,
        partial,
        sums,
        counters,
        splits,
        _LOG2E * (dim**-0.5 if options.scale is None else options.scale),
        q.stride(0),
        table.stride(0),
        keys.stride(0),
        keys.stride(2),
        WINDOW=options.window or 0,
        CAP=_LOG2E * (options.softcap or 0.0),
        SINKS=options.sinks is not None,
        FP8=options.kv_scales is not None,
        WIDE=wide(q.dtype),
        KV_HEADS=kv_heads,
        GROUP=group,
        GROUP_UP=max(16, triton.next_power_of_2(group)),
        DIM=dim,
        PAGE=page_size,
        BLOCK=keys_of_tile,
        SPLITS_UP=most_splits(group, dim),
        MERGED=triton.next_power_of_2(group),
        PDL=pdl,
        num_warps=warps,
        launch_pdl=pdl,
    )
