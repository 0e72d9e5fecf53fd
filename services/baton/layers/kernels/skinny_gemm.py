"""Triton: projections of 2 to 16 rows, which are bound by the weights' bytes, as those of one row are.

The matrix is the tall operand of the tensor cores, and the rows are 8 or 16 columns of the other: tiles of 64
rows (`gemm`) would multiply padding. Small programs of two warps leave room for several on a multiprocessor,
which keep more bytes under way: gate and up of an 8B model take 48.6 instead of 61.8 us on an H200. Needs a
GPU: import it where one is in use.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

MOST_ROWS = 16
_ROWS = 32
"""Rows of the matrix in a tile."""
_WANTED_PROGRAMS = 256
"""Fewer do not keep an H200's memory busy."""


@triton.jit(do_not_specialize=["tokens"])
def _skinny(
    x,
    weight,
    out,
    tokens,
    rows,
    K: tl.constexpr,
    SPLITS: tl.constexpr,
    GATED: tl.constexpr,
    TOKENS: tl.constexpr,
    ROWS: tl.constexpr,
    DEPTH: tl.constexpr,
    STAGES: tl.constexpr,
):
    gdc_launch_dependents()
    part: tl.constexpr = K // SPLITS
    split = tl.program_id(1)
    n = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    t = tl.arange(0, TOKENS)
    k = split * part + tl.arange(0, DEPTH)
    inside = (n < rows)[:, None]
    there = (t < tokens)[None, :]
    at = weight + n.to(tl.int64)[:, None] * K + k[None, :]
    second = at + rows.to(tl.int64) * K
    total = tl.zeros((ROWS, TOKENS), tl.float32)
    up = tl.zeros((ROWS, TOKENS), tl.float32)
    gdc_wait()
    for start in tl.range(0, part, DEPTH, num_stages=STAGES):
        values = tl.load(x + t[None, :] * K + (start + k)[:, None], mask=there, other=0.0)
        w = tl.load(at + start, mask=inside, other=0.0, eviction_policy="evict_first")
        total = tl.dot(w, values, total)
        if GATED:
            w = tl.load(second + start, mask=inside, other=0.0, eviction_policy="evict_first")
            up = tl.dot(w, values, up)
    if GATED:
        total = total / (1 + tl.exp(-total)) * up
    to = out + (split * tokens + t).to(tl.int64)[None, :] * rows + n[:, None]
    tl.store(to, total.to(out.dtype.element_ty), mask=inside & there)


class _Tile(NamedTuple):
    depth: int
    splits: int
    """Parts of the matrix's columns."""


def fits(rows: int, weight: torch.Tensor | None) -> bool:
    """Whether these multiply x [rows, in] with a weight [out, in]: a plain one of 16 bits."""
    if not 1 < rows <= MOST_ROWS or weight is None or weight.dtype.itemsize != 2:
        return False
    return weight.shape[1] % 512 == 0


def project_parts(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """W x of x [rows, in], in parts to be added: float32 [parts, rows, out]"""
    rows, columns = weight.shape
    tile = _tile(rows, columns)
    out = torch.empty(tile.splits, len(x), rows, dtype=torch.float32, device=x.device)
    return _launch(x, weight, out, tile, gated=False)


def gated(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """silu(gate) * up of x [rows, in] -> [rows, out]; W holds the rows of gate, then those of up."""
    return _launch(x, weight, x.new_empty(len(x), len(weight) // 2), _Tile(256, 1), gated=True)


def _tile(rows: int, columns: int) -> _Tile:
    """The best of those tried on an H200 for the shapes of 0.6B, 8B and 30B-A3B models, or within 5 %."""
    programs = triton.cdiv(rows, _ROWS)
    possible = [splits for splits in (1, 2, 4) if columns % (splits * 128) == 0]
    splits = next((n for n in possible if programs * n >= _WANTED_PROGRAMS), possible[-1])
    part, most = columns // splits, 512 if programs >= 128 else 256
    return _Tile(next(depth for depth in (512, 256, 128) if depth <= most and part % depth == 0), splits)


def _launch(
    x: torch.Tensor, weight: torch.Tensor, out: torch.Tensor, tile: _Tile, *, gated: bool
) -> torch.Tensor:
    assert weight.is_contiguous()
    rows = out.shape[-1]
    _skinny[(triton.cdiv(rows, _ROWS), tile.splits)](
        x.contiguous(),  # what a recurrent layer gives for replayed drafts is not
        weight,
        out,
        len(x),
        rows,
        K=weight.shape[1],
        SPLITS=tile.splits,
        GATED=gated,
        TOKENS=8 if len(x) <= 8 else 16,
        ROWS=_ROWS,
        DEPTH=tile.depth,
        STAGES=3,
        num_warps=2,
        num_stages=3,
        launch_pdl=True,
    )
    return out
