"""Matrices that stay quantized in memory: what a `Linear` needs of them, while loading and afterwards."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from baton.layers.weights import fp8
from baton.layers.weights.quantized import QuantizedTensor

INT4_GROUPS = (32, 64, 128, 256)
"""Those that torch has a kernel for."""


class QuantizedWeight:
    """Memory for a matrix [out, in] of 8 or 4 bits, filled by rows in any order.

    8 bits: int8 codes with a scale a row. 4 bits: two codes a byte, the even column's in its low half, with
    scales and zeros by groups of columns.
    """

    __slots__ = ("bits", "codes", "group", "scale", "zero")

    def __init__(self, method: Method, outputs: int, inputs: int, device: torch.device) -> None:
        self.bits, self.group = method.bits, method.group or inputs
        groups = inputs // self.group
        self.zero: torch.Tensor | None = None
        """float32 [out, groups]"""
        if self.bits == 8:
            self.codes = torch.empty(outputs, inputs, dtype=torch.int8, device=device)
        else:
            self.codes = torch.empty(outputs, inputs // 2, dtype=torch.uint8, device=device)
            self.zero = torch.empty(outputs, groups, device=device)
        self.scale = torch.empty(outputs, groups, device=device)
        """float32 [out, groups]"""

    @property
    def shape(self) -> tuple[int, int]:
        return len(self.codes), self.codes.shape[1] * 8 // self.bits

    @property
    def device(self) -> torch.device:
        return self.codes.device

    @property
    def nbytes(self) -> int:
        zero = 0 if self.zero is None else self.zero.nbytes
        return self.codes.nbytes + self.scale.nbytes + zero

    def rows(self, first: int, count: int) -> QuantizedWeight:
        """A view of some rows."""
        part = object.__new__(QuantizedWeight)
        part.bits, part.group = self.bits, self.group
        own = slice(first, first + count)
        part.codes, part.scale = self.codes[own], self.scale[own]
        part.zero = None if self.zero is None else self.zero[own]
        return part

    def fill(
        self, first: int, source: torch.Tensor | QuantizedTensor, columns: tuple[int, int] | None = None
    ) -> None:
        """Rows from the first on: copied if they are quantized likewise, else quantized here. `columns`: of
        the source, first and number; the others only take part in what scales are quantized by."""
        if not isinstance(source, QuantizedTensor):
            group = self.group if self.bits == 4 or columns is None else source.shape[1]
            source = quantize(source, self.bits, group)
        self._store(first, source if columns is None else source.columns(*columns))

    def _store(self, first: int, source: QuantizedTensor) -> None:
        rows = slice(first, first + len(source.codes))
        self.scale[rows] = source.scale
        if self.bits == 8:
            codes = source.codes
            if source.zero is not None:  # unsigned codes of a symmetric scheme
                codes = codes.to(torch.int16).sub_(128)
            self.codes[rows] = codes
        else:
            assert self.zero is not None and source.zero is not None
            self.codes[rows] = source.codes[:, ::2] | (source.codes[:, 1::2] << 4)
            self.zero[rows] = source.zero

    def unpacked(self) -> QuantizedTensor:
        codes = self.codes
        if self.bits == 4:
            codes = torch.stack((codes & 15, codes >> 4), -1).flatten(-2)
        return QuantizedTensor(codes, self.scale, self.group, self.zero)


def quantize(weight: torch.Tensor, bits: int, group: int) -> QuantizedTensor:
    """[out, in], rounded to nearest: 8 bits symmetric, 4 bits between a group's least and largest."""
    parts = weight.float().reshape(len(weight), -1, group)
    if bits == 8:
        scale = parts.abs().amax(2).clamp_min_(1e-12).div_(127)
        codes = parts.div(scale[..., None]).round_().clamp_(-127, 127).to(torch.int8)
        return QuantizedTensor(codes.flatten(1), scale, group)
    low, high = parts.amin(2), parts.amax(2)
    scale = high.sub(low).clamp_min_(1e-12).div_(15)
    zero = low.div(scale).neg_()
    codes = parts.div(scale[..., None]).add_(zero[..., None]).round_().clamp_(0, 15).to(torch.uint8)
    return QuantizedTensor(codes.flatten(1), scale, group, zero)


@dataclass(frozen=True, slots=True)
class Method:
    """How a matrix is kept in memory."""

    bits: int
    group: int = 0
    """Columns that share a scale; 0: a whole row."""

    @property
    def name(self) -> str:
        return "int8" if self.bits == 8 else f"int4 in groups of {self.group}"

    def fits(self, inputs: int) -> bool:
        return self.bits == 8 or (self.group in INT4_GROUPS and inputs % self.group == 0)


class Convert(Protocol):
    def __call__(self, tensor: torch.Tensor, /) -> torch.Tensor: ...


@dataclass(frozen=True, slots=True)
class WeightPlan:
    """Which matrices stay quantized in memory, or are quantized while loading."""

    method: Method | None = None
    stored: Collection[str] | None = None
    """Names (X.weight) of those that the checkpoint has quantized by this method; None: all are quantized
    while loading."""
    head: bool = False
    """The head is quantized while loading, too."""
    fp8: bool = False
    """Matrices are rounded to FP8 while loading and kept in the model's dtype."""

    def method_of(self, names: Sequence[str], inputs: int) -> Method | None:
        """Of matrices that are one in memory; None: they are not quantized there."""
        if self.method is None or not self.method.fits(inputs):
            return None
        return self.method if self.stored is None or all(name in self.stored for name in names) else None

    def rounding(self, convert: Callable[[torch.Tensor], torch.Tensor] | None) -> Convert | None:
        """`convert`, and rounding if that is asked for."""
        if not self.fp8:
            return convert

        def both(tensor: torch.Tensor) -> torch.Tensor:
            rounded = fp8.quantize(tensor).dequantize()
            return convert(rounded) if convert is not None else rounded

        return both
