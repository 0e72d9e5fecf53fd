"""Triton: causal attention of prompt chunks over the paged pool, including earlier cached tokens.

FlashAttention-2 (Dao, arXiv:2307.08691): a program holds a tile of queries, all heads that share a KV head
together, and passes over the keys once. Needs a GPU: import it where one is in use.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from baton.layers.attention import NONE, AttentionOptions
from baton.layers.kernels.decode_attention import LOG2E, capped, wide

_LOG2E = 1.4426950408889634
_ROWS = 256
"""Up to this many rows one compiled kernel serves all."""


@triton.jit
def _pass(
    query,
    peak,
    total,
    result,
    keys,
    values,
    pages,
    limit,
    scale,
    page_stride,
    first,
    last,
    WINDOW: tl.constexpr,
    CAP: tl.constexpr,
    DIM: tl.constexpr,
    PAGE: tl.constexpr,
    BLOCK: tl.constexpr,
    STAGES: tl.constexpr,
    MASKED: tl.constexpr,
):
    """Takes in the keys first .. last - 1; MASKED: each query those up to its limit, in its window."""
    columns = tl.arange(0, DIM)
    for start in tl.range(first, last, BLOCK, num_stages=STAGES):
        at = start + tl.arange(0, BLOCK)
        if MASKED:
            inside = at < last
            page = tl.load(pages + at // PAGE, mask=inside, other=0).to(tl.int64)
            entry = (page * page_stride + (at % PAGE) * DIM)[:, None] + columns[None, :]
            k = tl.load(keys + entry, mask=inside[:, None], other=0.0)
            v = tl.load(values + entry, mask=inside[:, None], other=0.0)
        else:
            page = tl.load(pages + at // PAGE).to(tl.int64)
            entry = (page * page_stride + (at % PAGE) * DIM)[:, None] + columns[None, :]
            k = tl.load(keys + entry)
            v = tl.load(values + entry)
        scores = capped(tl.dot(query, tl.trans(k.to(query.dtype)), input_precision="tf32x3") * scale, CAP)
        if MASKED:
            scores = tl.where(at[None, :] <= limit[:, None], scores, -float("inf"))
            if WINDOW:
                scores = tl.where(at[None, :] > limit[:, None] - WINDOW, scores, -float("inf"))
        highest = tl.maximum(peak, tl.max(scores, 1))
        if WINDOW:  # a query may not see any of these keys
            highest = tl.maximum(highest, -1e30)
        weights = tl.exp2(scores - highest[:, None])
        fade = tl.exp2(peak - highest)
        total = total * fade + tl.sum(weights, 1)
        result = tl.dot(
            weights.to(query.dtype), v.to(query.dtype), result * fade[:, None], input_precision="tf32x3"
        )
        peak = highest
    return peak, total, result


@triton.jit(do_not_specialize=["table", "lengths", "starts", "rows", "table_stride"])
def _chunk(
    q,
    keys,
    values,
    sinks,
    kv_scales,
    table,
    lengths,
    starts,
    out,
    rows,
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
    ROWS_UP: tl.constexpr,
    TOKENS: tl.constexpr,
    BLOCK: tl.constexpr,
    STAGES: tl.constexpr,
):
    head, block = tl.program_id(0), tl.program_id(1)
    # Row r has the tiles from starts[r] // TOKENS + r on; these never overlap.
    r = tl.arange(0, ROWS_UP)
    tiles = tl.load(starts + r, mask=r < rows, other=2**30) // TOKENS + r
    row = tl.sum((tiles <= block).to(tl.int32), 0) - 1
    start = tl.load(starts + row)
    count = tl.load(starts + row + 1) - start
    offset = (block - start // TOKENS - row) * TOKENS
    if offset >= count:
        return
    length = tl.load(lengths + row)
    columns = tl.arange(0, DIM)
    m = tl.arange(0, TOKENS * GROUP_UP)
    token, member = offset + m // GROUP_UP, m % GROUP_UP
    valid = ((token < count) & (member < GROUP))[:, None]
    where = (start + token).to(tl.int64)[:, None]
    of_head = (head * GROUP + member)[:, None] * DIM + columns[None, :]
    query = tl.load(q + where * q_stride + of_head, mask=valid, other=0.0)
    if FP8:
        query = query.to(WIDE)
        scale = scale * tl.load(kv_scales + head)
    limit = length - count + token
    pages = table + row.to(tl.int64) * table_stride
    keys += head * head_stride
    values += head * head_stride

    peak = tl.full((TOKENS * GROUP_UP,), -float("inf"), tl.float32)
    total = tl.zeros((TOKENS * GROUP_UP,), tl.float32)
    result = tl.zeros((TOKENS * GROUP_UP, DIM), tl.float32)
    # All queries of the tile see the keys from `clear` up to `whole`; none sees those from `end` on.
    whole = (length - count + offset + 1) // BLOCK * BLOCK
    end = tl.minimum(length - count + offset + TOKENS, length)
    clear = 0
    if WINDOW:
        begin = tl.maximum(length - count + offset + 1 - WINDOW, 0) // BLOCK * BLOCK
        clear = tl.minimum(tl.cdiv(tl.maximum(end - WINDOW, 0), BLOCK) * BLOCK, whole)
        peak, total, result = _pass(
            query,
            peak,
            total,
            result,
            keys,
            values,
            pages,
            limit,
            scale,
            page_stride,
            begin,
            clear,
            WINDOW,
            CAP,
            DIM,
            PAGE,
            BLOCK,
            1,
            True,
        )
    peak, total, result = _pass(
        query,
        peak,
        total,
        result,
        keys,
        values,
        pages,
        limit,
        scale,
        page_stride,
        clear,
        whole,
        WINDOW,
        CAP,
        DIM,
        PAGE,
        BLOCK,
        STAGES,
        False,
    )
    peak, total, result = _pass(
        query,
        peak,
        total,
        result,
        keys,
        values,
        pages,
        limit,
        scale,
        page_stride,
        whole,
        end,
        WINDOW,
        CAP,
        DIM,
        PAGE,
        BLOCK,
        1,
        True,
    )
    if SINKS:
        sink = tl.load(sinks + head * GROUP + member, mask=member < GROUP, other=0.0).to(tl.float32) * LOG2E
        highest = tl.maximum(peak, sink)
        fade = tl.exp2(peak - highest)
        total = total * fade + tl.exp2(sink - highest)
        result = result * fade[:, None]
    result = result / total[:, None]
    if FP8:
        result = result * tl.load(kv_scales + KV_HEADS + head)
    tl.store(out + where * (KV_HEADS * GROUP * DIM) + of_head, result, mask=valid)


def chunk_attention(
    q: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    table: torch.Tensor,
    lengths: torch.Tensor,
    starts: torch.Tensor,
    out: torch.Tensor,
    options: AttentionOptions = NONE,
    tile: tuple[int, int, int, int] | None = None,
    invariant: bool = False,
) -> None:
    """Consecutive tokens of each row, q [tokens, heads, head_dim], over the row's keys and values up to their
    own into `out`, contiguous, of q's shape.

    keys, values: a layer's [pages, page_size, kv heads, head_dim], a head's tokens contiguous; table: int32
    [rows, pages]; lengths: int32 [rows], the chunk included; starts: int32 [rows + 1], where each row's
    tokens start in q. head_dim is a power of two. `options`: all but `latent`. Reads nothing behind a
    row's end. `tile`: queries (tokens times heads of a group), keys, warps, stages. `invariant`: a token's
    result does not depend on where its tile begins. (The passes with a mask and without are compiled apart;
    in one alone a product and a difference would become one operation, rounded once.)
    """
    tokens, heads, dim = q.shape
    rows = lengths.shape[0]
    _, page_size, kv_heads, _ = keys.shape
    group = heads // kv_heads
    up = triton.next_power_of_2(group)
    queries, block, warps, stages = tile or _tile(q.dtype, dim, q.device)
    per_tile = max(queries // up, 1)
    _chunk[(kv_heads, tokens // per_tile + rows)](
        q,
        keys,
        values,
        q if options.sinks is None else options.sinks,
        q if options.kv_scales is None else options.kv_scales,
        table,
        lengths,
        starts,
        out,
        rows,
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
        GROUP_UP=up,
        DIM=dim,
        PAGE=page_size,
        ROWS_UP=max(_ROWS, triton.next_power_of_2(rows)),
        TOKENS=per_tile,
        BLOCK=block,
        STAGES=stages,
        num_warps=warps,
        enable_fp_fusion=not invariant,
    )


def _tile(dtype: torch.dtype, dim: int, device: torch.device) -> tuple[int, int, int, int]:
    """Queries, keys, warps and stages: on Hopper the best of those tried; elsewhere such as need less shared
    memory and registers, never tried."""
    hopper = torch.cuda.get_device_capability(device) >= (9, 0)
    if dim > 128:
        return (64, 32, 8, 2) if dtype != torch.float32 else (32, 16, 4, 1)
    if dtype == torch.float32:
        return 64, 32, 4, 2 if hopper else 1
    return (64, 64, 4, 3) if hopper else (64, 32, 4, 3)
