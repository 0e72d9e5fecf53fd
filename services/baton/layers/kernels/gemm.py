"""Triton: projections of a few to a few hundred rows, fused with the operations that follow.

With so few rows a matrix has fewer tiles than the GPU has multiprocessors, and cuBLAS needs more launches to
split it further. Here the parts stay separate, in float32, until the norm that follows adds them, and gate
and up are multiplied where they are computed. Needs a Hopper GPU (its tensor memory access): import it where
one is in use.
"""

from __future__ import annotations

import itertools

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait
from triton.tools.tensor_descriptor import TensorDescriptor

from baton.layers.kernels import quantized_gemm, skinny_gemm
from baton.layers.kernels.quantize import BLOCK, Quantized, quantized
from baton.layers.linear import Linear

MOST_ROWS = 256
_SPLITS = (4, 2, 1)


@triton.jit
def _scaled(total, x_unit, unit, m, n, rows, columns, TOKENS: tl.constexpr):
    """A product of codes times the scales of their rows; of the weights' alone without `TOKENS`."""
    units = tl.load(unit + n, mask=n < columns, other=0.0)
    total = total.to(tl.float32) * units[None, :]
    return total * tl.load(x_unit + m, mask=m < rows, other=0.0)[:, None] if TOKENS else total


@triton.jit(do_not_specialize=["rows"])
def _gemm(
    x,
    weight,
    second,
    x_unit,
    unit,
    out,
    out_unit,
    rows,
    columns,
    x_unit_stride,
    out_unit_stride,
    K: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    SPLITS: tl.constexpr,
    GATED: tl.constexpr,
    SCALED: tl.constexpr,
    BLOCKS: tl.constexpr,
):
    gdc_launch_dependents()
    gdc_wait()
    # Neighbours share their part of the weights, which is the larger one.
    tiles = tl.cdiv(rows, BM)
    top = tl.program_id(0) % tiles * BM
    left = tl.program_id(0) // tiles * BN
    split = tl.program_id(1)
    part: tl.constexpr = K // SPLITS
    m = top + tl.arange(0, BM)
    n = left + tl.arange(0, BN)
    dots: tl.constexpr = tl.int32 if x.dtype == tl.int8 else tl.float32
    sums: tl.constexpr = tl.float32 if BLOCKS else dots
    total = tl.zeros((BM, BN), sums)
    if GATED:
        up = tl.zeros((BM, BN), sums)
    for k in range(0, part, BK):
        a = x.load([top, split * part + k])
        if BLOCKS:  # of which a tile and a step have one
            block = (split * part + k) // BK
            x_units = tl.load(x_unit + block * x_unit_stride + m, mask=m < rows, other=0.0)[:, None]
            at = unit + left // BK * (K // BK) + block
            dot = tl.dot(a, weight.load([left, split * part + k]).T, out_dtype=dots)
            total += dot.to(tl.float32) * (x_units * tl.load(at) if SCALED == "blocks" else x_units)
            if GATED:
                at += columns // BK * (K // BK)
                dot = tl.dot(a, second.load([left, split * part + k]).T, out_dtype=dots)
                up += dot.to(tl.float32) * (x_units * tl.load(at) if SCALED == "blocks" else x_units)
        else:
            total = tl.dot(a, weight.load([left, split * part + k]).T, total, out_dtype=sums)
            if GATED:
                up = tl.dot(a, second.load([left, split * part + k]).T, up, out_dtype=sums)
    if SCALED == "rows":
        total = _scaled(total, x_unit, unit, m, n, rows, columns, not BLOCKS)
        if GATED:
            up = _scaled(up, x_unit, unit + columns, m, n, rows, columns, not BLOCKS)
    if GATED:
        total = total / (1 + tl.exp(-total)) * up
        if out.dtype.element_ty.primitive_bitwidth == 8:  # a tile is a block
            total, units = quantized(total, out.dtype.element_ty, 1)
            tl.store(out_unit + left // BN * out_unit_stride + m, units, mask=m < rows)
    at = (split * rows + m).to(tl.int64)[:, None] * columns + n[None, :]
    tl.store(out + at, total.to(out.dtype.element_ty), mask=(m < rows)[:, None] & (n < columns)[None, :])


@triton.jit(do_not_specialize=["rows"])
def _add_norm(
    residual,
    parts,
    weight,
    bias,
    out,
    eps,
    rows,
    COLUMNS: tl.constexpr,
    BLOCK: tl.constexpr,
    PARTS: tl.constexpr,
    BIAS: tl.constexpr,
):
    gdc_launch_dependents()
    gdc_wait()
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    inside = columns < COLUMNS
    total = tl.load(residual + row * COLUMNS + columns, mask=inside, other=0.0).to(tl.float32)
    for part in tl.static_range(PARTS):
        total += tl.load(parts + (part * rows + row) * COLUMNS + columns, mask=inside, other=0.0)
    if BIAS:
        total += tl.load(bias + columns, mask=inside, other=0.0)
    tl.store(residual + row * COLUMNS + columns, total, mask=inside)
    scale = tl.rsqrt(tl.sum(total * total, 0) / COLUMNS + eps)
    y = total * scale * tl.load(weight + columns, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + row * COLUMNS + columns, y, mask=inside)


def fits(linear: Linear, *, bias: bool = False) -> bool:
    """Whether `project_parts` and `gated` compute this layer: on a Hopper GPU, 16 bits or quantized. `bias`:
    it may have one, which they leave out."""
    if linear.bias is not None and not bias:
        return False
    if linear.quantized is not None:
        return True
    weight = linear.weight
    if weight is None or weight.dtype.itemsize != 2:
        return False
    hopper = torch.cuda.get_device_capability(weight.device)[0] == 9
    return hopper and weight.shape[1] % 8 == 0 and weight.data_ptr() % 16 == 0


def project_parts(x: torch.Tensor | Quantized, linear: Linear) -> torch.Tensor:
    """y = W x of x [rows, in], at most MOST_ROWS, in parts to be added: float32 [parts, rows, out]."""
    if linear.quantized is not None and isinstance(x, torch.Tensor):
        return quantized_gemm.project_parts(x, linear.quantized)
    weight, scaled = _operand(x, linear)
    if isinstance(x, torch.Tensor) and skinny_gemm.fits(len(x), weight):
        return skinny_gemm.project_parts(x, weight)
    codes = x.codes if isinstance(x, Quantized) else x
    rows, (columns, k) = codes.shape[0], weight.shape
    deep = scaled is not None and not _in_blocks(scaled)
    tile, splits = _tiles(rows, columns, k, quantized_gemm.processors(codes.device), deep)
    out = torch.empty(splits, rows, columns, dtype=torch.float32, device=codes.device)
    _launch(codes, weight, weight, out, columns, tile, splits, warps=4, gated=False, scaled=scaled)
    return out


def project_few(x: Quantized, linear: Linear, dtype: torch.dtype) -> torch.Tensor | None:
    """W x of x [rows, in] -> [rows, out] in `dtype`, in one part; None where sgl_kernel is faster."""
    weight, scaled = _operand(x, linear)
    rows, (columns, k) = len(x.codes), weight.shape
    if scaled is None or _in_blocks(scaled) or linear.bias is not None or rows > 64 or k % 256:
        return None
    if triton.cdiv(columns, 64) > quantized_gemm.processors(x.codes.device):
        return None
    out = torch.empty(rows, columns, dtype=dtype, device=x.codes.device)
    _launch(x.codes, weight, weight, out, columns, (64, 64, 256), 1, warps=4, gated=False, scaled=scaled)
    return out


def gated(
    x: torch.Tensor | Quantized, linear: Linear, dtype: torch.dtype, eight: bool = False
) -> torch.Tensor | Quantized | None:
    """silu(gate) * up of x [rows, in], at most MOST_ROWS; W holds the rows of gate, then those of up. None
    where its tiles exceed the multiprocessors, and cuBLAS is faster. `eight`: in 8 bits, in blocks, if x has
    8 bits and a tile is a block; but not of FP8 with a scale a row, for which a launch that quantizes by rows
    and a product without blocks are faster (8B on an H200: 5 of 132 us a layer at 48 rows, 6 of 177 at 96, 10
    of 184 at 128)."""
    if linear.quantized is not None and isinstance(x, torch.Tensor):
        return quantized_gemm.gated(x, linear.quantized)
    weight, scaled = _operand(x, linear)
    if isinstance(x, torch.Tensor) and skinny_gemm.fits(len(x), weight):
        return skinny_gemm.gated(x, weight)
    codes = x.codes if isinstance(x, Quantized) else x
    rows, columns = codes.shape[0], weight.shape[0] // 2
    tile = _gated_tile(rows, columns, quantized_gemm.processors(codes.device))
    if tile is None:
        return None
    if scaled is not None:
        tile = tile[0], tile[1], BLOCK
    gate, up = weight[:columns], weight[columns:]
    out: torch.Tensor | Quantized
    blocks = scaled is not None and (scaled[2] == "blocks" or codes.dtype == torch.int8)
    if eight and blocks and tile[1] == BLOCK and columns % BLOCK == 0:
        out = Quantized.empty(rows, columns, codes.dtype, True, codes.device)
    else:
        out = torch.empty(rows, columns, dtype=dtype, device=codes.device)
    _launch(
        codes, gate, up, out, columns, tile, 1, warps=8 if tile[1] == 128 else 4, gated=True, scaled=scaled
    )
    return out


Scales = tuple[torch.Tensor, torch.Tensor, str]
"""Scales of x and of the weight, and what shares one in the weight: "rows" or "blocks"."""


def _in_blocks(scales: Scales) -> bool:
    """Whether each step of a tile has its own."""
    of_x, _, kind = scales
    return kind == "blocks" or of_x.shape[1] > 1


def _operand(x: torch.Tensor | Quantized, linear: Linear) -> tuple[torch.Tensor, Scales | None]:
    """What x is multiplied with."""
    if isinstance(x, torch.Tensor):
        assert linear.weight is not None
        return linear.weight, None
    weight = linear.quantized
    assert weight is not None
    return weight.codes, (x.scale, weight.scale, "blocks" if weight.block > 1 else "rows")


def add_norm(
    residual: torch.Tensor,
    parts: torch.Tensor,
    weight: torch.Tensor,
    out: torch.Tensor,
    eps: float,
    bias: torch.Tensor | None = None,
) -> None:
    """residual += sum of `parts` [parts, rows, columns] and `bias` [columns]; out = RMS-normalized residual,
    times `weight` [columns]. residual, out: [rows, columns]. In float32, rounded once."""
    count, rows, columns = parts.shape
    block = triton.next_power_of_2(columns)
    _add_norm[(rows,)](
        residual,
        parts,
        weight,
        weight if bias is None else bias,
        out,
        eps,
        rows,
        COLUMNS=columns,
        BLOCK=block,
        PARTS=count,
        BIAS=bias is not None,
        num_warps=min(8, max(1, block // 512)),
        launch_pdl=True,
    )


def _launch(
    x: torch.Tensor,
    weight: torch.Tensor,
    second: torch.Tensor,
    out: torch.Tensor | Quantized,
    columns: int,
    tile: tuple[int, int, int],
    splits: int,
    *,
    warps: int,
    gated: bool,
    scaled: Scales | None = None,
) -> None:
    rows, k = x.shape
    height, width, depth = tile
    x_unit, unit, kind = scaled or (x, x, "")
    target, out_unit = (out, x_unit) if isinstance(out, torch.Tensor) else (out.codes, out.scale)
    _gemm[(triton.cdiv(rows, height) * triton.cdiv(columns, width), splits)](
        TensorDescriptor.from_tensor(x, [height, depth]),
        TensorDescriptor.from_tensor(weight, [width, depth]),
        TensorDescriptor.from_tensor(second, [width, depth]),
        x_unit,
        unit,
        target,
        out_unit,
        rows,
        columns,
        x_unit.stride(1),
        out_unit.stride(1),
        K=k,
        BM=height,
        BN=width,
        BK=depth,
        SPLITS=splits,
        GATED=gated,
        SCALED=kind,
        BLOCKS=scaled is not None and _in_blocks(scaled),
        num_warps=warps,
        num_stages=4,
        launch_pdl=True,
    )


def _tiles(rows: int, columns: int, k: int, processors: int, deep: bool) -> tuple[tuple[int, int, int], int]:
    """Rows, columns and depth of a tile and parts of `k`, so that about as many programs run as there are
    multiprocessors. The best of those tried on an H200 for the shapes of 0.6B and 8B models, or within 5 % of
    it. `deep`: 8 bits with a scale a row. Up to 64 rows a step may take 256 of them (4096 x 4096: 7.6 instead
    of 8.5 us); of more than 128, where they are long of more than 64, tiles of 128 rows read less from the L2
    cache (256 rows, 4096 x 12288: 27.8 instead of 37.1 us, 4096 x 4096: 12.3 instead of 15.1)."""
    height = 128 if deep and rows > (64 if k >= 8192 else 128) else 64
    high = triton.cdiv(rows, height)
    if deep and rows <= 64 and k % 256 == 0:
        programs = triton.cdiv(columns, 64)
        splits = next((n for n in _SPLITS if k % (n * 256) == 0 and programs * n <= processors), 1)
        return (64, 64, 256), splits
    if high == 1 and not deep and (columns, k) in ((4096, 2048), (4096, 6144)):
        return (64, 64, 128), 2  # 8B on two ranks, 64 rows: 6.3 and 15.4 us rather than 7.6 and 16.1
    width = 128
    possible = [n for n in _SPLITS if n == 1 or k % (n * 128) == 0]
    programs = high * triton.cdiv(columns, width)
    splits = next((n for n in possible if programs * n <= processors), 1)
    while width > 32 and high * triton.cdiv(columns, width) * splits < 0.7 * processors:
        width //= 2
    return (height, width, 128), splits


def _gated_tile(rows: int, columns: int, processors: int) -> tuple[int, int, int] | None:
    """Rows, columns and depth of the tile that makes the most programs without exceeding the multiprocessors;
    None: each does."""
    most, chosen = 0, None
    for height, width in itertools.product((64, 128), (128, 64, 32)):
        programs = triton.cdiv(rows, height) * triton.cdiv(columns, width)
        if most < programs <= processors:
            most, chosen = programs, (height, width, 64 if max(height, width) == 128 else 128)
    return chosen
