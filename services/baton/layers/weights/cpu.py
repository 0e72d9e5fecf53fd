"""Products with quantized matrices on a CPU. Which one is used is measured, among those exact enough."""

from __future__ import annotations

import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Protocol

import torch
import torch.nn.functional as F

from baton.layers.weights.method import Method, QuantizedWeight

TOLERANCE = {4: 1e-2, 8: 2e-4}
"""By bits: the largest error of a product that is exact enough, relative to its norm, in a float32 model.
It is a small part of what quantizing has changed: that of 4 bits is rounding to bfloat16 twice, that of 8
rounding to 1/8192 of a row's largest."""
TOLERANCE_16 = 1e-2
"""In a model of 16 bits."""


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


class TwoDigits(ABC):
    """8 bits: activations as whole numbers of two digits, which are two rows of an exact product of 8-bit
    integers. So the error is that of rounding activations to a part of their row's largest."""

    __slots__ = ()

    def apply(self, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        out, unit = self._product(x.float())
        out.mul_(unit)
        if bias is not None:
            out.add_(bias)
        return out if x.dtype == torch.float32 else out.to(x.dtype)

    def add_to(self, residual: torch.Tensor, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        if bias is not None or x.dtype != torch.float32:
            return residual.add_(self.apply(x, bias))
        return residual.addcmul_(*self._product(x))

    @abstractmethod
    def _product(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """x W^T / unit [rows, out], and unit [rows, 1]; in few calls, each of which costs microseconds."""


class OneDnnDigits(TwoDigits):
    """To 1/32639, by oneDNN, on processors with products of 8-bit integers."""

    __slots__ = ("_matrix", "_offset", "_scale", "_tiny")

    def __init__(self, weight: QuantizedWeight, dtype: torch.dtype) -> None:
        self._matrix = torch.ops.onednn.qlinear_prepack(weight.codes, None)
        self._scale = weight.scale.flatten().contiguous()
        self._offset = torch.tensor(128.0 * 257.0 + 0.5)
        self._tiny = torch.tensor(1e-30)

    def _product(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        rows = len(x)
        # amax of abs: torch computes the maximum norm without vector instructions.
        unit = torch.add(self._tiny, x.abs().amax(1, True), alpha=1 / 32639)
        # Bytes b stand for b - 128, so that x / unit = 256 (high - 128) + (low - 128), rounded.
        whole = torch.addcdiv(self._offset, x, unit).to(torch.int32)
        digits = torch.cat((whole, whole >> 8)).to(torch.uint8)  # the low byte of each
        out = torch.ops.onednn.qlinear_pointwise.default(
            *(digits, 1.0, 128, self._matrix, self._scale, None, None, 1.0, 0, torch.float32, "none", [], "")
        )
        return out[:rows].add_(out[rows:], alpha=256), unit


class FbgemmDigits(TwoDigits):
    """To 1/8192, by FBGEMM, on processors with AVX2. Bytes up to 128 are exact where two products are added
    in 16 bits: -2^15 <= 2 x 128 x code < 2^15. Takes the memory of a number of inputs that 512 divides."""

    __slots__ = ("_matrix", "_multiply", "_places")

    def __init__(self, weight: QuantizedWeight, dtype: torch.dtype) -> None:
        scale = weight.scale.flatten().double() / 2**13
        # torch announces that it will drop such tensors one day. No `catch_warnings`: of two threads that
        # leave it in the other order, the filter of one would hide all warnings from then on.
        warnings.filterwarnings("ignore", module=__name__)
        zero = torch.zeros(len(scale), dtype=torch.int64)
        codes = torch._make_per_channel_quantized_tensor(weight.codes, scale, zero, 0)
        self._matrix = torch.ops.quantized.linear_prepack(codes, None)
        # `_op`: without a search for Python subclasses among the arguments, which takes 4 microseconds.
        self._multiply = torch.ops.quantized.linear_with_input_q_dq_qweight_dq_output_fp32.default._op
        self._places = torch.tensor([2.0**6, 2.0**13])[:, None, None]

    def _product(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        largest = x.abs().amax(1, True).clamp_min_(1e-30)
        digits = x * (self._places / largest)
        high, low = digits.unbind(0)
        low.sub_(high.round_(), alpha=128)  # from -64 to 64; FBGEMM rounds it
        high, low = self._multiply(digits, 1.0, 64, self._matrix).unbind(0)
        return low.add_(high, alpha=128), largest


class Bf16Int8:
    """8 bits: torch's kernel for bfloat16 activations."""

    __slots__ = ("_codes", "_scale")

    def __init__(self, weight: QuantizedWeight, dtype: torch.dtype) -> None:
        self._codes = weight.codes
        self._scale = weight.scale.flatten().to(torch.bfloat16)

    def apply(self, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        out = torch._weight_int8pack_mm(x.to(torch.bfloat16), self._codes, self._scale).to(x.dtype)
        return out if bias is None else out.add_(bias)

    def add_to(self, residual: torch.Tensor, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        return residual.add_(self.apply(x, bias))


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
"""Of a matrix, in a model of this dtype."""
CANDIDATES: dict[int, tuple[MakeProduct, ...]] = {
    8: (Dequantized, OneDnnDigits, FbgemmDigits, Bf16Int8),
    4: (Dequantized, Bf16Int4),
}


def exact_products(weight: QuantizedWeight, dtype: torch.dtype) -> list[Product]:
    """Those that work here and are exact enough for this matrix, and of 8 bits for the largest codes; always
    `Dequantized`, first. FBGEMM's only where oneDNN's is not exact: they are about as fast as each other, and
    workers should choose alike."""
    tolerance = TOLERANCE[weight.bits] if dtype == torch.float32 else TOLERANCE_16
    largest = _largest() if weight.bits == 8 else None
    x = torch.randn(3, weight.shape[1], generator=torch.Generator().manual_seed(0)).to(dtype)
    expected = x.double() @ weight.unpacked().dequantize().double().t()
    found: list[Product] = []
    for candidate in CANDIDATES[weight.bits]:
        if candidate is FbgemmDigits and isinstance(found[-1], OneDnnDigits):
            continue
        try:
            product = candidate(weight, dtype)
            error = (product.apply(x, None) - expected).norm() / expected.norm()
            if largest is not None:
                out = candidate(largest, dtype).apply(torch.ones(1, 64, dtype=dtype), None)
                error = torch.maximum(error, (out / (64 * 127) - 1).abs().max())
        except (RuntimeError, AttributeError, NotImplementedError):
            continue  # this torch or this processor does not have it
        if candidate is Dequantized or error <= tolerance:
            found.append(product)
    return found


def _largest() -> QuantizedWeight:
    """A matrix of the largest codes of 8 bits. A processor without products of 8-bit integers adds two of
    them in 16 bits, which overflow with the largest activations, but hardly ever with random ones."""
    weight = QuantizedWeight(Method(8), 64, 64, torch.device("cpu"))
    weight.codes.fill_(127)
    weight.scale.fill_(1.0)
    return weight
