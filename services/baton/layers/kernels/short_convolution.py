"""Triton: causal convolutions of a few taps, channel by channel, whose last inputs are kept in state pages.

For rows of one token one launch; for longer rows one that computes and one that keeps the windows. Needs a
GPU: import it where one is in use.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from baton.layers.batch import PIECE, StateLocations, StateRows

_CHANNELS = 256


@triton.jit
def page_of(tables, slot, table_stride, token, PAGE: tl.constexpr):
    """The page that holds the state behind a token, and before the one that follows it."""
    return tl.load(tables + slot.to(tl.int64) * table_stride + tl.maximum(token, 0) // PAGE).to(tl.int64)


@triton.jit
def _taken(x, at, mask, C: tl.constexpr, GATED: tl.constexpr):
    """Inputs, or, rounded as these are, their products with gates that lie 2 C entries before them."""
    value = tl.load(x + at, mask=mask, other=0.0)
    if GATED:
        gate = tl.load(x + at - 2 * C, mask=mask, other=0.0).to(tl.float32)
        value = (value.to(tl.float32) * gate).to(value.dtype)
    return value.to(tl.float32)


@triton.jit
def _give(out, to, total, x, at, mask, C: tl.constexpr, SILU: tl.constexpr, GATED: tl.constexpr):
    """Writes the sum of the taps, or, once it is rounded, its product with the gate C entries before `at`."""
    if SILU:
        total = total / (1 + tl.exp(-total))
    if GATED:
        gate = tl.load(x + at - C, mask=mask, other=0.0).to(tl.float32)
        total = total.to(out.dtype.element_ty).to(tl.float32) * gate
    tl.store(out + to, total, mask=mask)


@triton.jit
def _step(
    x,
    weight,
    bias,
    out,
    windows,
    tables,
    slots,
    positions,
    x_stride,
    page_stride,
    table_stride,
    C: tl.constexpr,
    W: tl.constexpr,
    PAGE: tl.constexpr,
    BIAS: tl.constexpr,
    SILU: tl.constexpr,
    GATED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0)
    c = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = c < C
    position, slot = tl.load(positions + row), tl.load(slots + row)
    read = windows + page_of(tables, slot, table_stride, position - 1, PAGE) * page_stride + c
    write = windows + page_of(tables, slot, table_stride, position, PAGE) * page_stride + c
    at = row.to(tl.int64) * x_stride + c
    newest = _taken(x, at, inside, C, GATED)
    total = newest * tl.load(weight + (W - 1) * C + c, mask=inside, other=0.0).to(tl.float32)
    if BIAS:
        total += tl.load(bias + c, mask=inside, other=0.0).to(tl.float32)
    # A channel's entries move down by one, in order: what is overwritten has been read.
    for tap in tl.static_range(W - 1):
        old = tl.load(read + tap * C, mask=inside & (position > 0), other=0.0)
        total += old * tl.load(weight + tap * C + c, mask=inside, other=0.0).to(tl.float32)
        if tap > 0:
            tl.store(write + (tap - 1) * C, old, mask=inside)
    tl.store(write + (W - 2) * C, newest, mask=inside)
    _give(out, row.to(tl.int64) * C + c, total, x, at, inside, C, SILU, GATED)


@triton.jit
def _pieces(
    x,
    weight,
    bias,
    out,
    windows,
    tables,
    slots,
    positions,
    pieces,
    x_stride,
    page_stride,
    table_stride,
    C: tl.constexpr,
    W: tl.constexpr,
    PAGE: tl.constexpr,
    BIAS: tl.constexpr,
    SILU: tl.constexpr,
    GATED: tl.constexpr,
    TOKENS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    piece = pieces + tl.program_id(0) * 4
    c = (tl.program_id(1) * BLOCK + tl.arange(0, BLOCK))[None, :]
    first, count, begin = tl.load(piece), tl.load(piece + 1), tl.load(piece + 2)
    position, slot = tl.load(positions + begin), tl.load(slots + begin)
    windows += page_of(tables, slot, table_stride, position - 1, PAGE) * page_stride
    token = (first + tl.arange(0, TOKENS))[:, None]
    inside = (c < C) & (token < first + count)
    total = tl.zeros((TOKENS, BLOCK), tl.float32)
    if BIAS:
        total += tl.load(bias + c, mask=c < C, other=0.0).to(tl.float32)
    for tap in tl.static_range(W):
        source = token - (W - 1) + tap
        in_chunk = source >= begin
        value = _taken(x, source.to(tl.int64) * x_stride + c, inside & in_chunk, C, GATED)
        if tap < W - 1:
            before = windows + (source - begin + W - 1) * C + c
            value += tl.load(before, mask=inside & (source < begin) & (position > 0), other=0.0)
        total += value * tl.load(weight + tap * C + c, mask=c < C, other=0.0).to(tl.float32)
    at = token.to(tl.int64) * x_stride + c
    _give(out, token.to(tl.int64) * C + c, total, x, at, inside, C, SILU, GATED)


@triton.jit
def _keep(
    x,
    windows,
    tables,
    slots,
    positions,
    pieces,
    rows,
    x_stride,
    page_stride,
    table_stride,
    C: tl.constexpr,
    W: tl.constexpr,
    PAGE: tl.constexpr,
    GATED: tl.constexpr,
    TAPS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    low, high = tl.load(rows + tl.program_id(0)), tl.load(rows + tl.program_id(0) + 1)
    tap = tl.arange(0, TAPS)[:, None]
    c = (tl.program_id(1) * BLOCK + tl.arange(0, BLOCK))[None, :]
    inside = (tap < W - 1) & (c < C)
    begin = tl.load(pieces + low * 4 + 2)
    position, slot = tl.load(positions + begin), tl.load(slots + begin)
    read = windows + page_of(tables, slot, table_stride, position - 1, PAGE) * page_stride
    # The last first: the first alone may overwrite the page that is read.
    for back in range(high - low):
        piece = pieces + (high - 1 - back) * 4
        if tl.load(piece + 3) != 0:
            end = tl.load(piece) + tl.load(piece + 1)
            source = end - (W - 1) + tap
            in_chunk = source >= begin
            value = _taken(x, source.to(tl.int64) * x_stride + c, inside & in_chunk, C, GATED)
            before = read + (source - begin + W - 1) * C + c
            value += tl.load(before, mask=inside & (source < begin) & (position > 0), other=0.0)
            tl.debug_barrier()
            page = page_of(tables, slot, table_stride, position + end - begin - 1, PAGE)
            tl.store(windows + page * page_stride + tap * C + c, value, mask=inside)


def convolve(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    windows: torch.Tensor,
    locations: StateLocations,
    rows: StateRows,
    *,
    silu: bool = False,
    gated: bool = False,
) -> torch.Tensor:
    """x [tokens, channels], each token contiguous; weight [window, channels], bias [channels]; windows:
    float32 [pages, window - 1, channels], of each page contiguous, become those behind the rows -> [tokens,
    channels], contiguous, through SiLU if `silu`. `gated`: x is [tokens, 3 * channels]: gates of the inputs,
    gates of the result, inputs. Computes in float32; inputs and the result are rounded to x's dtype."""
    window, channels = weight.shape
    out = x.new_empty(len(x), channels)
    inputs = x[:, 2 * channels :] if gated else x
    tables, slots, positions = locations.tables, locations.slots, locations.positions
    strides = x.stride(0), windows.stride(0), tables.stride(0)
    options = {"C": channels, "W": window, "PAGE": locations.page_size, "GATED": gated, "BLOCK": _CHANNELS}
    blocks, with_bias = triton.cdiv(channels, _CHANNELS), weight if bias is None else bias
    more = {"BIAS": bias is not None, "SILU": silu}
    if rows.singles:
        state_arguments = windows, tables, slots, positions
        _step[(rows.singles, blocks)](
            inputs, weight, with_bias, out, *state_arguments, *strides, **options, **more
        )
    if rows.pieces is not None and rows.starts is not None:
        where = windows, tables, slots, positions, rows.pieces
        grid = len(rows.pieces), triton.cdiv(channels, 64)
        sizes = {**options, **more, "BLOCK": 64, "TOKENS": PIECE}
        _pieces[grid](inputs, weight, with_bias, out, *where, *strides, **sizes)
        taps = triton.next_power_of_2(window - 1)
        _keep[(len(rows.starts) - 1, blocks)](inputs, *where, rows.starts, *strides, TAPS=taps, **options)
    return out
