"""Triton: projections of few rows by a matrix of 4 bits, fused as those of `gemm` are.

The matrix is the tall operand, which tensor cores take from registers. A thread loads words whose codes are
those that it passes on (`QuantizedWeight`), and makes two numbers of 16 bits of them at a time, with four
instructions. Needs a GPU: import it where one is in use.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait
from triton.tools.tensor_descriptor import TensorDescriptor

from baton.layers.kernels.tensor_cores import awaited
from baton.layers.quantization.weight_method import QuantizedWeight


def _unpacking(base: str, kind: str) -> str:
    """A word ($4; $5 is a copy of it) of four pairs of codes -> (code - zero) * scale in 16 bits. Behind the
    exponent of `base` a code is base + code, which less base + a whole number ($6) is exact. It is multiplied
    with the scale ($7); what the zero has beside the whole number is taken away after that ($8)."""
    lines = [".reg .b32 w, base;", f"mov.b32 base, {base};"]
    for operand, shift in enumerate((0, 8, 4, 12)):
        lines += [
            f"shr.b32 w, $4, {shift};",
            "lop3.b32 w, w, 0x000f000f, base, 0xea;",
            f"sub.rn.{kind} w, w, $6;",
            f"fma.rn.{kind} ${operand}, w, $7, $8;",
        ]
    return "\n".join(["{", *lines, "}"])


_BF16 = tl.constexpr(_unpacking("0x43004300", "bf16x2"))
_FP16 = tl.constexpr(_unpacking("0x64006400", "f16x2"))


@triton.jit
def _spread(each, words: tl.constexpr, GROUPS: tl.constexpr):
    """Numbers of a row [rows], or of its groups [rows, groups], for both halves of each of its words."""
    rows: tl.constexpr = each.shape[0]
    if GROUPS == 1:
        return tl.broadcast_to(each[:, None, None], (rows, words, 2))
    else:
        wide = tl.broadcast_to(each[:, :, None, None], (rows, GROUPS, words // GROUPS, 2))
        return tl.reshape(wide, (rows, words, 2))


@triton.jit
def _values(codes, scale, zero, dtype: tl.constexpr, GROUPS: tl.constexpr):
    """Words [rows, words] of codes -> [rows, 8 * words] in `dtype`"""
    rows: tl.constexpr = codes.shape[0]
    words: tl.constexpr = codes.shape[1]
    half: tl.constexpr = dtype == tl.float16
    base: tl.constexpr = 1024.0 if half else 128.0
    text: tl.constexpr = _FP16 if half else _BF16
    whole = tl.minimum(tl.maximum(zero + base, 0.0), 2 * base).to(dtype)
    rest = scale * (whole.to(tl.float32) - base - zero)
    # Each word twice, since an instance of the assembly makes two of each of its results.
    first, second, third, fourth = tl.inline_asm_elementwise(
        text,
        "=&r,=&r,=&r,=&r,r,r,r,r,r",
        [
            tl.broadcast_to(codes[:, :, None], (rows, words, 2)),
            _spread(whole, words, GROUPS),
            _spread(scale.to(dtype), words, GROUPS),
            _spread(rest.to(dtype), words, GROUPS),
        ],
        dtype=(tl.int16, tl.int16, tl.int16, tl.int16),
        is_pure=True,
        pack=2,
    )
    # [rows, 32 columns, words of them, which of a pair, which 8 of 16 columns, which 16] -> in order
    both = tl.join(tl.join(first, third), tl.join(second, fourth))
    both = tl.reshape(both, (rows, words // 4, 4, 2, 2, 2))
    both = tl.reshape(tl.permute(both, (0, 1, 4, 5, 2, 3)), (rows, 8 * words))
    return both.to(dtype, bitcast=True)


@triton.jit
def _groups(at, group, COUNT: tl.constexpr, LAST: tl.constexpr):
    """Numbers of so many groups from `group` on: [rows], or [rows, groups]. A load of each, which all threads
    make that need it; those past the last are multiplied with zeros."""
    first = tl.load(at + tl.minimum(group, LAST))
    if COUNT == 1:
        return first
    elif COUNT == 2:
        return tl.join(first, tl.load(at + tl.minimum(group + 1, LAST)))
    else:
        tl.static_assert(COUNT == 4)
        even = tl.join(first, tl.load(at + tl.minimum(group + 2, LAST)))
        odd = tl.join(tl.load(at + tl.minimum(group + 1, LAST)), tl.load(at + tl.minimum(group + 3, LAST)))
        return tl.reshape(tl.join(even, odd), (first.shape[0], 4))


@triton.jit
def _gemm(
    x,
    weight,
    scale,
    zero,
    bias,
    out,
    rows,
    columns,
    K: tl.constexpr,
    GROUP: tl.constexpr,
    BIAS: tl.constexpr,
    GATED: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    SPLITS: tl.constexpr,
    PDL: tl.constexpr,
):
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    tiles = tl.cdiv(rows, BM)
    row = tl.program_id(0) % tiles * BM
    column = tl.program_id(0) // tiles * BN
    split = tl.program_id(1)
    part: tl.constexpr = K // SPLITS
    start = split * part
    dtype: tl.constexpr = x.dtype
    count: tl.constexpr = 1 if BK <= GROUP else BK // GROUP
    last: tl.constexpr = K // GROUP - 1
    n = column + tl.arange(0, BN)
    output = tl.minimum(n, columns - 1)
    here = output * (last + 1)
    second = (columns + output) * (last + 1)
    total = tl.zeros((BN, BM), tl.float32)
    up = tl.zeros((BN, BM), tl.float32)
    s = _groups(scale + here, start // GROUP, count, last)
    z = _groups(zero + here, start // GROUP, count, last)
    if GATED:
        t = _groups(scale + second, start // GROUP, count, last)
        v = _groups(zero + second, start // GROUP, count, last)
    for step in range(0, part, BK):
        k = start + step
        tokens = x.load([row, k]).T
        codes = weight.load([column, k // 8])
        if GATED:
            more = weight.load([columns + column, k // 8])
        values = _values(codes, s, z, dtype, count)
        if GATED:
            others = _values(more, t, v, dtype, count)
        # The next step's, so that it need not wait for them.
        group = (k + BK) // GROUP
        s = _groups(scale + here, group, count, last)
        z = _groups(zero + here, group, count, last)
        if GATED:
            t = _groups(scale + second, group, count, last)
            v = _groups(zero + second, group, count, last)
            up = awaited(tl.dot(others, tokens, up))
        total = awaited(tl.dot(values, tokens, total))
    if BIAS:
        total += tl.load(bias + output).to(tl.float32)[:, None]
    if GATED:
        total = total / (1 + tl.exp(-total)) * up
    m = row + tl.arange(0, BM)
    offset = (split * rows + m).to(tl.int64)[:, None] * columns + n[None, :]
    inside = (m < rows)[:, None] & (n < columns)[None, :]
    tl.store(out + offset, total.to(out.dtype.element_ty).T, mask=inside)


def launch(
    x: torch.Tensor,
    weight: QuantizedWeight,
    out: torch.Tensor,
    tile: tuple[int, int, int, int, int],
    *,
    bias: torch.Tensor | None = None,
    splits: int = 1,
    gated: bool = False,
    pdl: bool = True,
) -> None:
    """As `quantized_gemm.launch`."""
    rows, k = x.shape
    columns = weight.shape[0] // 2 if gated else weight.shape[0]
    height, width, depth, warps, stages = tile
    words = weight.codes.view(torch.int32)
    _gemm[(triton.cdiv(rows, height) * triton.cdiv(columns, width), splits)](
        TensorDescriptor(x, [rows, k], [k, 1], [height, depth]),
        TensorDescriptor(words, list(words.shape), [k // 8, 1], [width, depth // 8]),
        weight.scale,
        weight.zero,
        x if bias is None else bias,
        out,
        rows,
        columns,
        K=k,
        GROUP=weight.group,
        BIAS=bias is not None,
        GATED=gated,
        BM=height,
        BN=width,
        BK=depth,
        SPLITS=splits,
        PDL=pdl,
        num_warps=warps,
        num_stages=stages,
        launch_pdl=pdl,
    )


@triton.jit
def _dequantize(codes, scale, zero, out, K: tl.constexpr, GROUP: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    byte = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    there = byte < K // 2
    pair = tl.load(codes + row * (K // 2) + byte, mask=there, other=0)
    # Its block, word, which of a pair, and which 8 of 16 columns.
    column = byte // 16 * 32 + byte % 16 // 4 * 2 + byte % 4 // 2 + byte % 2 * 8
    group = row * (K // GROUP) + column // GROUP
    s = tl.load(scale + group, mask=there, other=0.0)
    z = tl.load(zero + group, mask=there, other=0.0)
    at = out + row * K + column
    tl.store(at, (((pair & 15).to(tl.float32) - z) * s).to(out.dtype.element_ty), mask=there)
    tl.store(at + 16, (((pair >> 4).to(tl.float32) - z) * s).to(out.dtype.element_ty), mask=there)


def dequantize(weight: QuantizedWeight, dtype: torch.dtype) -> torch.Tensor:
    """-> [out, in]"""
    rows, columns = weight.shape
    out = torch.empty(rows, columns, dtype=dtype, device=weight.device)
    block = min(1024, triton.next_power_of_2(columns // 2))
    _dequantize[(rows, triton.cdiv(columns // 2, block))](
        weight.codes, weight.scale, weight.zero, out, K=columns, GROUP=weight.group, BLOCK=block
    )
    return out
