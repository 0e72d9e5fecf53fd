"""Matrices that stay quantized in memory: what a `Linear` needs of them, while loading and afterwards."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from baton.layers.quantization import fp8
from baton.layers.quantization.quantized_tensor import QuantizedTensor

INT4_GROUPS = (32, 64, 128, 256)
"""Group sizes that torch has a kernel for."""
_PIECE = {"cpu": 2**21, "cuda": 2**24}
"""Weights that are quantized to 4 bits at a time: more take less time in kernels' launches, and each takes 22
bytes meanwhile (46 MB and 370 MB)."""


class QuantizedWeight:
    """Memory for a matrix [out, in] of 8 or 4 bits, filled by rows in any order.

    8 bits: int8 or E4M3 codes, with scales by rows or blocks. 4 bits: two codes a byte, with scales and zeros
    by groups of columns. Of 32 neighbouring columns, word i of four has columns 8 j + 2 i in its low half
    and 8 j + 2 i + 1 in its high half, j = 0, 2, 1, 3 from the lowest bits on: what one thread passes to the
    tensor cores. The halves of a byte are 16 columns apart. Where `stacked`, of 16 columns byte i of 8 has
    column i in its low half and column 8 + i in its high half.
    """

    __slots__ = ("bits", "block", "codes", "group", "scale", "stacked", "zero")

    def __init__(
        self, method: WeightMethod, outputs: int, inputs: int, device: torch.device, *, stacked: bool = False
    ) -> None:
        self.bits, self.group = method.bits, method.group or inputs
        self.block = method.rows
        """Rows that share a scale."""
        scales = -(-outputs // self.block), -(-inputs // self.group)
        self.stacked = stacked and self.bits == 4
        """Whether these are a GPU's experts, one below the other, whose kernels read bytes."""
        self.zero: torch.Tensor | None = None
        """float32 as `scale`; 4 bits only."""
        if self.bits == 8:
            dtype = torch.float8_e4m3fn if method.floating else torch.int8
            self.codes = torch.empty(outputs, inputs, dtype=dtype, device=device)
        else:
            self.codes = torch.empty(outputs, inputs // 2, dtype=torch.uint8, device=device)
            self.zero = torch.empty(scales, device=device)
        self.scale = torch.empty(scales, device=device)
        """float32 [out / block, groups]"""

    @property
    def floating(self) -> bool:
        """Whether codes are E4M3."""
        return self.codes.dtype == torch.float8_e4m3fn

    @property
    def grouped(self) -> bool:
        """Whether a row has several scales."""
        return self.scale.shape[1] > 1

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
        """A view of some rows, from a multiple of `block` on."""
        part = object.__new__(QuantizedWeight)
        part.bits, part.group, part.block = self.bits, self.group, self.block
        part.stacked = self.stacked
        part.codes = self.codes[first : first + count]
        scales = slice(first // self.block, -(-(first + count) // self.block))
        part.scale = self.scale[scales]
        part.zero = None if self.zero is None else self.zero[scales]
        return part

    def fill(
        self, first: int, source: torch.Tensor | QuantizedTensor, columns: tuple[int, int] | None = None
    ) -> None:
        """Rows from the first on: copied if they are quantized likewise, else quantized here. `columns`: of
        the source, first and number; the others only take part in what scales are quantized by."""
        if not isinstance(source, QuantizedTensor):
            source = source.to(self.device)
            group = self.group if self.bits == 4 or columns is None else source.shape[1]
            if self.block > 1:
                source = fp8.quantize_blocks(source, self.block, self.group)
            else:
                source = fp8.quantize(source) if self.floating else quantize(source, self.bits, group)
        if columns is not None:
            source = source.columns(*columns)
        target = self.rows(first, len(source.codes))
        target.scale.copy_(source.scale[:: self.block])
        codes = source.codes
        if self.bits == 8:
            if source.zero is not None:  # unsigned codes of a symmetric scheme
                codes = codes.to(torch.int16).sub_(128)
            target.codes.copy_(codes)
        else:
            assert target.zero is not None and source.zero is not None
            if self.stacked:
                low, high = codes.reshape(len(codes), -1, 2, 8).unbind(2)
            else:
                # [out, block, which 16, which 8 of them, word, which of a pair] -> bytes of words
                parts = codes.reshape(len(codes), -1, 2, 2, 4, 2).permute(2, 0, 1, 4, 5, 3)
                low, high = parts.unbind(0)
            target.codes.copy_((low | (high << 4)).flatten(1))
            target.zero.copy_(source.zero)

    def clear(self, first: int) -> None:
        """Makes rows from the first on zero, those beyond a vocabulary's end."""
        for each in (self.codes, self.scale, self.zero):
            if each is not None:
                each[first:].zero_()

    def selected(self, rows: torch.Tensor) -> torch.Tensor:
        """float32 [n, in], dequantized: rows by number, int64 [n]; of a method without blocks of rows."""
        part = object.__new__(QuantizedWeight)
        part.bits, part.group, part.block, part.stacked = self.bits, self.group, 1, self.stacked
        part.codes, part.scale = self.codes[rows], self.scale[rows]
        part.zero = None if self.zero is None else self.zero[rows]
        return part.unpacked().dequantize()

    def unpacked(self) -> QuantizedTensor:
        codes = self.codes
        if self.bits == 4:
            pairs = codes.view(len(codes), -1, *((8,) if self.stacked else (4, 2, 2)))
            codes = torch.stack((pairs & 15, pairs >> 4), 2)
            if not self.stacked:  # block, which 16, word, which of a pair, which 8 of them
                codes = codes.permute(0, 1, 2, 5, 3, 4)
            codes = codes.flatten(1)
        scale = self.scale
        if self.block > 1:
            scale = scale.repeat_interleave(self.block, 0)[: len(codes)]
        return QuantizedTensor(codes, scale, self.group, self.zero)


def quantize(weight: torch.Tensor, bits: int, group: int) -> QuantizedTensor:
    """[out, in]: 8 bits symmetric, rounded to nearest; 4 bits with the least squared error that is found."""
    if bits == 8:
        parts = weight.float().reshape(len(weight), -1, group)
        scale = parts.abs().amax(2).clamp_min_(1e-12).div_(127)
        codes = parts.div(scale[..., None]).round_().clamp_(-127, 127).to(torch.int8)
        return QuantizedTensor(codes.flatten(1), scale, group)
    rows = max(1, _PIECE[weight.device.type] // weight.shape[1])
    pieces = [_four_bits(piece, group) for piece in torch.split(weight, rows)]
    codes, scale, zero = (torch.cat(each) for each in zip(*pieces, strict=True))
    return QuantizedTensor(codes, scale, group, zero)


def _four_bits(weight: torch.Tensor, group: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Codes [out, in], scale and zero [out, groups]. Begins with codes between a group's least and largest
    value, and with ones over nine tenths of that; twice takes the scale and zero that fit the codes best
    (linear regression), then the codes nearest to the values. A group of 16 values at equal distances keeps
    them."""
    values = weight.float().reshape(len(weight), -1, group)
    low, high = values.amin(2, keepdim=True), values.amax(2, keepdim=True)
    mean = values.mean(2, keepdim=True)
    centred = values - mean
    found: list[torch.Tensor] = []
    for part in (1.0, 0.9):
        scale = high.sub(low).mul_(part / 15).clamp_min_(1e-12)
        zero = 7.5 - (high + low).div_(2).div_(scale)
        codes = _codes(values, scale, zero)
        for _ in range(2):
            middle = codes.mean(2, keepdim=True)
            away = codes - middle
            square = away.square().sum(2, keepdim=True).clamp_min_(1e-9)
            fit = away.mul_(centred).sum(2, keepdim=True).div_(square)
            scale = torch.where(fit > 0, fit, scale)
            zero = middle - mean / scale
            codes = _codes(values, scale, zero)
        error = (codes - zero).mul_(scale).sub_(values).square_().sum(2, keepdim=True)
        best = [codes, scale, zero, error]
        if found:
            better = error < found[3]
            best = [torch.where(better, new, old) for new, old in zip(best, found, strict=True)]
        found = best
    codes, scale, zero, _ = found
    return codes.to(torch.uint8).flatten(1), scale[..., 0], zero[..., 0]


def _codes(values: torch.Tensor, scale: torch.Tensor, zero: torch.Tensor) -> torch.Tensor:
    return values.div(scale).add_(zero).round_().clamp_(0, 15)


_Rows = tuple[QuantizedWeight, int, torch.Tensor, tuple[int, int] | None]
"""What `QuantizedWeight.fill` takes."""


class Filling:
    """Fills matrices of a model, from any thread. Those that are quantized to 4 bits wait for each other, up
    to a piece: quantizing launches about 110 kernels for a matrix of any size, and a mixture has thousands of
    matrices. A GPU quantizes one piece at a time, for the memory that it takes; on a CPU each thread does."""

    def __init__(self) -> None:
        self._lock, self._one = threading.Lock(), threading.Lock()
        self._waiting: list[_Rows] = []

    def fill(
        self,
        target: QuantizedWeight,
        first: int,
        source: torch.Tensor | QuantizedTensor,
        columns: tuple[int, int] | None = None,
    ) -> None:
        """`QuantizedWeight.fill`, or that later: `finish` is to be called in the end."""
        if target.bits == 8 or isinstance(source, QuantizedTensor):
            target.fill(first, source, columns)
            return
        source, most = source.to(target.device), _PIECE[target.device.type]
        ready = [(target, first, source, columns)]
        if source.numel() < most:
            with self._lock:
                self._waiting += ready
                if sum(each.numel() for _, _, each, _ in self._waiting) > most:
                    ready, self._waiting = self._waiting[:-1], ready
                else:
                    ready = []
        with self._one if source.is_cuda else contextlib.nullcontext():
            _fill_together(ready)

    def finish(self) -> None:
        _fill_together(self._waiting)
        self._waiting = []


def _fill_together(several: Sequence[_Rows]) -> None:
    """Quantizes to 4 bits: groups of columns do not depend on each other."""
    if len(several) < 2:
        for target, first, source, columns in several:
            target.fill(first, source, columns)
        return
    group = several[0][0].group
    groups = [source.reshape(-1, group) for _, _, source, _ in several]
    merged = quantize(torch.cat(groups), 4, group)
    assert merged.zero is not None
    sizes = [len(pieces) for pieces in groups]
    parts = (torch.split(each, sizes) for each in (merged.codes, merged.scale, merged.zero))
    for (target, first, source, columns), *pieces in zip(several, *parts, strict=True):
        codes, scale, zero = (each.reshape(len(source), -1) for each in pieces)
        target.fill(first, QuantizedTensor(codes, scale, group, zero), columns)


@dataclass(frozen=True, slots=True)
class WeightMethod:
    """How a matrix is kept in memory."""

    bits: int
    group: int = 0
    """Columns that share a scale; 0: a whole row."""
    floating: bool = False
    """E4M3, else integers."""
    rows: int = 1
    """Rows that share a scale."""

    @property
    def name(self) -> str:
        if self.bits == 8:
            kind = "fp8" if self.floating else "int8"
            if self.group and self.rows > 1:
                return f"{kind} in blocks of {self.rows} x {self.group}"
            return f"{kind} in groups of {self.group}" if self.group else kind
        return f"int4 in groups of {self.group}"

    def fits(self, inputs: int) -> bool:
        if self.bits == 8:
            return inputs % (16 if self.floating else self.group or 16) == 0
        return self.group in INT4_GROUPS and inputs % self.group == 0


class Convert(Protocol):
    def __call__(self, tensor: torch.Tensor, /) -> torch.Tensor: ...


@dataclass(frozen=True, slots=True)
class WeightPlan:
    """Which matrices stay quantized in memory, or are quantized while loading."""

    method: WeightMethod | None = None
    stored: Mapping[str, WeightMethod] | None = None
    """Those that the checkpoint has quantized, by name (X.weight); None: all are quantized while loading, by
    `method`."""
    dummy: bool = False
    """Random weights are, in place of those that a checkpoint has quantized."""
    head: bool = False
    """The head is quantized while loading, too."""
    on_gpu: bool = False
    fp8: bool = False
    """Matrices are rounded to FP8 while loading and kept in the model's dtype."""

    @property
    def online(self) -> bool:
        """Whether quantization was asked for, of weights that are not quantized."""
        return self.stored is None and not self.dummy

    def method_of(self, names: Sequence[str], inputs: int) -> WeightMethod | None:
        """Weight method of matrices that are one in memory; None: they are not quantized there."""
        method = self.method
        if self.stored is not None:
            method, *others = {self.stored.get(name) for name in names}
            method = None if others else method
        return method if method is not None and method.fits(inputs) else None

    def rounding(self, convert: Callable[[torch.Tensor], torch.Tensor] | None) -> Convert | None:
        """`convert`, and rounding if that is asked for."""
        if not self.fp8:
            return convert

        def both(tensor: torch.Tensor) -> torch.Tensor:
            rounded = fp8.quantize(tensor).dequantize()
            return convert(rounded) if convert is not None else rounded

        return both
