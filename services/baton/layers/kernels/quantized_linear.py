"""How a product with quantized weights is computed on a GPU: by the number of rows.

One row and few rows: by kernels that read the codes and compute with activations of 16 bits. Many rows, 8
bits: activations are quantized as well. Many rows, 4 bits: the matrix is dequantized first. Nothing waits for
the device. Needs a Hopper GPU: import it where one is in use.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from baton.layers.kernels import quantized_gemm
from baton.layers.kernels.int4_gemm import dequantize
from baton.layers.kernels.quantize import BLOCK, Quantized, quantize
from baton.layers.kernels.quantized_gemv import gemv
from baton.layers.kernels.scaled_mm import scaled_product
from baton.layers.quantization.weight_method import QuantizedWeight

MOST_ROWS = {8: 1, 4: 256}
"""By bits: rows up to which activations stay in 16 bits and the matrix is read as it is."""


def most_rows(weight: QuantizedWeight) -> int | None:
    """Rows up to which the kernels for few rows compute; None: any number."""
    unit = BLOCK if weight.block > 1 else 16
    if weight.bits == 8 and any(size % unit for size in weight.shape):
        return None  # sgl_kernel has no product of such sizes
    return MOST_ROWS[weight.bits]


def quantizes(weight: QuantizedWeight | None, rows: int) -> bool:
    """Whether so many rows are multiplied in 8 bits."""
    if weight is None or weight.bits != 8:
        return False
    most = most_rows(weight)
    return most is not None and rows > most


def quantize_for(weight: QuantizedWeight, x: torch.Tensor) -> Quantized:
    return quantize(x, weight.codes.dtype, weight.block > 1)


def project(x: torch.Tensor, weight: QuantizedWeight, bias: torch.Tensor | None) -> torch.Tensor:
    """x W^T + b of x [rows, in] -> [rows, out]"""
    rows, most = len(x), most_rows(weight)
    if weight.stacked:  # of a mixture that no kernel computes as a whole
        return F.linear(x, weight.unpacked().dequantize().to(x.dtype), bias)
    if rows == 1:
        out = torch.empty(1, weight.shape[0], dtype=x.dtype, device=x.device)
        return gemv(x.contiguous(), weight, out, bias=bias)
    if most is None or rows <= most:
        return quantized_gemm.project(x.contiguous(), weight, bias)
    if weight.bits == 8:
        return scaled_product(quantize_for(weight, x), weight, x.dtype, bias)
    return F.linear(x, dequantize(weight, x.dtype), bias)


class KernelProduct:
    """A `Product` of a `Linear` on a GPU."""

    __slots__ = ("_weight",)

    def __init__(self, weight: QuantizedWeight, dtype: torch.dtype) -> None:
        self._weight = weight

    def apply(self, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        return project(x, self._weight, bias)

    def add_to(self, residual: torch.Tensor, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        return residual.add_(project(x, self._weight, bias))
