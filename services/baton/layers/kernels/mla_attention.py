"""Triton: attention to latents over the paged pool, in the absorbed form: rows of one token, causal chunks.

A token's latent with its rotated key is the key of all heads, and the latent alone the value (DeepSeek-V2,
arXiv:2405.04434, section 2.1.2). So a program holds a tile of queries, all heads of a token together, and
reads each latent once for both products. A row's keys are split among programs (flash-decoding, Dao et al.
2023); `merge` adds up what the parts give. Needs a GPU: import it where one is in use.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

_LOG2E = 1.4426950408889634
_ROWS = 256
"""Up to this many rows one compiled kernel serves all."""

MlaTile = tuple[int, int, int, int]
"""Queries (tokens times heads), keys, warps, stages."""


@triton.jit(do_not_specialize=["table", "lengths", "starts", "tokens", "rows", "splits", "table_stride"])
def _attend(
    q,
    cache,
    table,
    lengths,
    starts,
    out,
    sums,
    tokens,
    rows,
    splits,
    scale,
    table_stride,
    page_stride,
    HEADS: tl.constexpr,
    RANK: tl.constexpr,
    ROTATED: tl.constexpr,
    PAGE: tl.constexpr,
    ROWS_UP: tl.constexpr,
    TOKENS: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK: tl.constexpr,
    STAGES: tl.constexpr,
    SINGLE: tl.constexpr,
    SPLIT: tl.constexpr,
    PDL: tl.constexpr,
):
    WIDTH: tl.constexpr = RANK + ROTATED
    QUERIES: tl.constexpr = TOKENS * GROUP
    if PDL:
        gdc_launch_dependents()
    tile, group, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    if SINGLE:
        row = tile
        start = tile
        count = 1
        offset = 0
    else:
        # Row r has the tiles from starts[r] // TOKENS + r on; these never overlap.
        r = tl.arange(0, ROWS_UP)
        tiles = tl.load(starts + r, mask=r < rows, other=2**30) // TOKENS + r
        row = tl.sum((tiles <= tile).to(tl.int32), 0) - 1
        start = tl.load(starts + row)
        count = tl.load(starts + row + 1) - start
        offset = (tile - start // TOKENS - row) * TOKENS
        if offset >= count:
            return
    length = tl.load(lengths + row)
    end = tl.minimum(length - count + offset + TOKENS, length)
    share = tl.maximum(tl.cdiv(tl.cdiv(end, splits), BLOCK), 1) * BLOCK
    first = split * share
    last = tl.minimum(first + share, end)

    m = tl.arange(0, QUERIES)
    token, head = offset + m // GROUP, group * GROUP + m % GROUP
    valid = (token < count) & (head < HEADS)
    flat = (start + token).to(tl.int64) * HEADS + head
    if SPLIT:
        flat += split.to(tl.int64) * tokens * HEADS
        if first >= end:
            tl.store(sums + flat, tl.full((QUERIES,), -float("inf"), tl.float32), mask=valid)
            return
    limit = length - count + token
    pages = table + row.to(tl.int64) * table_stride
    columns, turned = tl.arange(0, RANK), RANK + tl.arange(0, ROTATED)
    if PDL:
        gdc_wait()
    source = q + ((start + token).to(tl.int64) * HEADS + head)[:, None] * WIDTH
    query = tl.load(source + columns[None, :], mask=valid[:, None], other=0.0)
    rotated = tl.load(source + turned[None, :], mask=valid[:, None], other=0.0)

    peak = tl.full((QUERIES,), -float("inf"), tl.float32)
    total = tl.zeros((QUERIES,), tl.float32)
    result = tl.zeros((QUERIES, RANK), tl.float32)
    for at in tl.range(first, last, BLOCK, num_stages=STAGES):
        keys = at + tl.arange(0, BLOCK)
        inside = keys < last
        if PAGE % BLOCK == 0:
            page = tl.load(pages + at // PAGE).to(tl.int64)
            entry = page * page_stride + (at % PAGE + tl.arange(0, BLOCK)) * WIDTH
        else:
            page = tl.load(pages + keys // PAGE, mask=inside, other=0).to(tl.int64)
            entry = page * page_stride + (keys % PAGE) * WIDTH
        latents = tl.load(cache + entry[:, None] + columns[None, :], mask=inside[:, None], other=0.0)
        k = tl.load(cache + entry[:, None] + turned[None, :], mask=inside[:, None], other=0.0)
        scores = tl.dot(query, tl.trans(latents), input_precision="tf32x3")
        scores = tl.dot(rotated, tl.trans(k), scores, input_precision="tf32x3") * scale
        seen = inside[None, :] & (keys[None, :] <= limit[:, None])
        scores = tl.where(seen, scores, -float("inf"))
        highest = tl.maximum(peak, tl.max(scores, 1))
        base = tl.where(highest == -float("inf"), 0.0, highest)
        weights = tl.exp2(scores - base[:, None])
        fade = tl.exp2(peak - base)
        total = total * fade + tl.sum(weights, 1)
        result = tl.dot(weights.to(latents.dtype), latents, result * fade[:, None], input_precision="tf32x3")
        peak = highest
    if SPLIT:
        tl.store(sums + flat, peak + tl.log2(total), mask=valid)
        total = tl.where(total > 0, total, 1.0)
    target = out + flat[:, None] * RANK + columns[None, :]
    tl.store(target, result / total[:, None], mask=valid[:, None])


@triton.jit(do_not_specialize=["pairs", "splits"])
def _merge(partial, sums, out, pairs, splits, RANK: tl.constexpr, PDL: tl.constexpr):
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    pair = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, RANK)
    peak = tl.full((), -float("inf"), tl.float32)
    total = tl.zeros((), tl.float32)
    result = tl.zeros((RANK,), tl.float32)
    for split in range(0, splits):
        part = split * pairs + pair
        score = tl.load(sums + part)
        if score > -float("inf"):
            highest = tl.maximum(peak, score)
            fade, weight = tl.exp2(peak - highest), tl.exp2(score - highest)
            result = result * fade + tl.load(partial + part * RANK + columns) * weight
            total = total * fade + weight
            peak = highest
    tl.store(out + pair * RANK + columns, result / total)


def attend(
    q: torch.Tensor,
    cache: torch.Tensor,
    table: torch.Tensor,
    lengths: torch.Tensor,
    starts: torch.Tensor | None,
    out: torch.Tensor,
    scale: float,
    sums: torch.Tensor | None = None,
    *,
    tile: MlaTile | None = None,
    pdl: bool = True,
) -> None:
    """Absorbed queries q [tokens, heads, rank + rotated], contiguous, over the latents of their rows up to
    their own, into `out`.

    cache: a layer's [pages, page_size, rank + rotated], each page's contiguous; table: int32 [rows, pages];
    lengths: int32 [rows], the row's own tokens included; starts: int32 [rows + 1], where each row's tokens
    start in q; None: one token a row. rank and rotated are powers of two. Reads nothing behind a row's end.

    Without `sums`, `out` is [tokens, heads, rank] of q's dtype. With `sums`, float32 [splits, tokens, heads],
    a row's keys are divided into so many parts, and `out` is float32 [splits, tokens, heads, rank]: of each
    part the result by itself, whose weight is 2 ** sums; -inf: there is no such part, and `out` is not
    written. `pdl`: starts while the kernel before ends, and waits for it before it reads queries and latents;
    `table`, `lengths` and `starts` are read earlier.
    """
    tokens, heads, width = q.shape
    rank = out.shape[-1]
    rows = lengths.shape[0]
    single = starts is None
    queries, block, warps, stages = tile or _tile(q, single)
    group = min(queries, max(16, triton.next_power_of_2(heads)))
    per_tile = 1 if single else max(queries // group, 1)
    splits = 1 if sums is None else sums.shape[0]
    tiles = rows if single else tokens // per_tile + rows
    _attend[(tiles, triton.cdiv(heads, group), splits)](
        q,
        cache,
        table,
        lengths,
        lengths if starts is None else starts,
        out,
        out if sums is None else sums,
        tokens,
        rows,
        splits,
        scale * _LOG2E,
        table.stride(0),
        cache.stride(0),
        HEADS=heads,
        RANK=rank,
        ROTATED=width - rank,
        PAGE=cache.shape[1],
        ROWS_UP=1 if single else max(_ROWS, triton.next_power_of_2(rows)),
        TOKENS=per_tile,
        GROUP=group,
        BLOCK=block,
        STAGES=stages,
        SINGLE=single,
        SPLIT=sums is not None,
        PDL=pdl,
        num_warps=warps,
        launch_pdl=pdl,
    )


def merge(partial: torch.Tensor, sums: torch.Tensor, out: torch.Tensor, *, pdl: bool = True) -> None:
    """What `attend` gives with `sums` into `out` [tokens, heads, rank]."""
    splits, tokens, heads, rank = partial.shape
    _merge[(tokens * heads,)](
        partial, sums, out, tokens * heads, splits, RANK=rank, PDL=pdl, num_warps=4, launch_pdl=pdl
    )


def _tile(q: torch.Tensor, single: bool) -> MlaTile:
    """On Hopper the best of those tried; elsewhere such as need less shared memory, never tried."""
    if q.dtype == torch.float32:
        return 16, 16, 4, 1
    if torch.cuda.get_device_capability(q.device) >= (9, 0):
        return (16 if single and q.shape[1] <= 16 else 64), 64, 8, 2
    return 16, 32, 4, 2
