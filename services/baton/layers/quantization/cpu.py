"""Products with quantized matrices on a CPU. Which one of 4 bits is used is measured."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch
import torch.nn.functional as F

from baton.layers.quantization.blocks_cpu import BlockMatrix
from baton.layers.quantization.int8_cpu import Int8Matrix
from baton.layers.quantization.weight_method import QuantizedWeight

TOLERANCE = 1e-2
"""The largest error of a product of 4 bits that is exact enough, relative to its norm: rounding to bfloat16
twice, a small part of what quantizing has changed."""


class Product(Protocol):
    """With a matrix in the form that it is computed from."""

    def apply(self, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """[rows, in] -> x W^T + bias, [rows, out]"""
        ...

    def add_to(self, residual: torch.Tensor, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """residual + x W^T + bias, [rows, out]; `residual` may be overwritten."""
        ...


class Dequantized:
    """The matrix is dequantized for each product. Works for all and everywhere."""

    __slots__ = ("_dtype", "_weight")

    def __init__(self, weight: QuantizedWeight, dtype: torch.dtype) -> None:
        self._weight, self._dtype = weight, dtype

    def apply(self, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        return F.linear(x, self._weight.unpacked().dequantize().to(self._dtype), bias)

    def add_to(self, residual: torch.Tensor, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        return residual.add_(self.apply(x, bias))


class InFloat32:
    """Codes are computed with as they are, in float32."""

    __slots__ = ("_matrix",)

    def __init__(self, weight: QuantizedWeight, dtype: torch.dtype) -> None:
        if weight.bits == 8 and not weight.grouped:
            self._matrix: Int8Matrix | BlockMatrix = Int8Matrix(weight.codes, weight.scale.flatten())
        else:
            self._matrix = BlockMatrix(weight.unpacked())

    def apply(self, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        out = self._matrix.multiply(x.float().contiguous())
        if bias is not None:
            out.add_(bias)
        return out if x.dtype == torch.float32 else out.to(x.dtype)

    def add_to(self, residual: torch.Tensor, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        if bias is not None or x.dtype != torch.float32 or not residual.is_contiguous():
            return residual.add_(self.apply(x, bias))
        return self._matrix.multiply(x.contiguous(), residual)


class Bf16Int4:
    """4 bits: torch's kernel for bfloat16 activations."""

    __slots__ = ("_codes", "_group", "_scales")

    def __init__(self, weight: QuantizedWeight, dtype: torch.dtype) -> None:
        assert weight.zero is not None
        codes = weight.unpacked().codes
        self._codes = torch._convert_weight_to_int4pack_for_cpu(codes.to(torch.int32), 1)
        self._group = weight.group
        # The kernel's values are (code - 8) * scale + zero.
        zero = (8 - weight.zero) * weight.scale
        self._scales = torch.stack((weight.scale.t(), zero.t()), -1).to(torch.bfloat16).contiguous()

    def apply(self, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        out = torch._weight_int4pack_mm_for_cpu(
            x.to(torch.bfloat16).contiguous(), self._codes, self._group, self._scales
        ).to(x.dtype)
        return out if bias is None else out.add_(bias)

    def add_to(self, residual: torch.Tensor, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        return residual.add_(self.apply(x, bias))


MakeProduct = Callable[[QuantizedWeight, torch.dtype], Product]
"""Makes the product of a matrix, in a model of this dtype."""
FOUR_BITS: tuple[MakeProduct, ...] = (Dequantized, InFloat32, Bf16Int4)


def exact_products(weight: QuantizedWeight, dtype: torch.dtype) -> list[Product]:
    """Products with 4 bits that work here and are exact enough for this matrix; always `Dequantized`,
    first."""
    x = torch.randn(3, weight.shape[1], generator=torch.Generator().manual_seed(0)).to(dtype)
    expected = x.double() @ weight.unpacked().dequantize().double().t()
    found: list[Product] = []
    for candidate in FOUR_BITS:
        try:
            product = candidate(weight, dtype)
            error = (product.apply(x, None) - expected).norm() / expected.norm()
        except (RuntimeError, AttributeError, NotImplementedError):
            continue  # this torch or this processor does not have it
        if candidate is Dequantized or error <= TOLERANCE:
            found.append(product)
    return found
