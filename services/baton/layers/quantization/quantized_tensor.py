"""A quantized matrix, whatever the format it comes from, and the interface of the formats."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Protocol

import torch


@dataclass(frozen=True, slots=True)
class QuantizedTensor:
    """value[i, j] = (codes[i, j] - zero[i, g]) * scale[i, g], where g is the group of column j."""

    codes: torch.Tensor
    """[out, in], integers or FP8"""
    scale: torch.Tensor
    """float32 [out, groups]"""
    group: int
    """Neighbouring columns that share a scale; the last group may be smaller."""
    zero: torch.Tensor | None = None
    """float32 [out, groups]; None: all are 0."""
    order: torch.Tensor | None = None
    """int64 [in]: the group of each column, where groups are not neighbours."""

    @property
    def shape(self) -> torch.Size:
        return self.codes.shape

    def dequantize(self) -> torch.Tensor:
        """float32 [out, in]; each value is rounded once."""
        zero = None if self.zero is None else self._spread(self.zero)
        values = self.codes.float()
        return (values if zero is None else values.sub_(zero)).mul_(self._spread(self.scale))

    def map_rows(self, convert: Callable[[torch.Tensor], torch.Tensor]) -> QuantizedTensor:
        """With its rows reordered by a function that does the same to tensors [out, any number]."""
        zero = None if self.zero is None else convert(self.zero)
        return QuantizedTensor(convert(self.codes), convert(self.scale), self.group, zero, self.order)

    def columns(self, first: int, count: int) -> QuantizedTensor:
        """Columns of groups that are neighbours, whole ones."""
        scale, zero = self.scale, self.zero
        if scale.shape[1] > 1:
            groups = slice(first // self.group, -(-(first + count) // self.group))
            scale, zero = scale[:, groups], None if zero is None else zero[:, groups]
        return QuantizedTensor(self.codes[:, first : first + count], scale, self.group, zero)

    def _spread(self, each: torch.Tensor) -> torch.Tensor:
        """[out, groups] -> [out, in], or [out, 1]"""
        if self.order is not None:
            return each[:, self.order]
        if each.shape[1] == 1:
            return each
        return each.repeat_interleave(self.group, 1)[:, : self.codes.shape[1]]


Parts = Iterator[tuple[str, int, torch.Tensor | QuantizedTensor]]
"""Parts of a checkpoint's tensors: name, where the part begins on the first axis, part."""


Kept = Mapping[str, tuple[int, int]]
"""Matrices that will be kept in groups, by name: bits of a code, and columns of a group."""
NONE_KEPT: Kept = MappingProxyType({})


class CheckpointFormat(Protocol):
    """How a checkpoint stores quantized matrices. The matrix that other checkpoints call X.weight is
    quantized if there is a tensor X.`marker`."""

    @property
    def name(self) -> str:
        """For people: the scheme and who calls it that."""
        ...

    @property
    def marker(self) -> str: ...

    @property
    def weight(self) -> str:
        """The tensor that holds the codes is X.`weight`."""
        ...

    @property
    def needed(self) -> Sequence[str]:
        """Tensors beside it, by the ends of their names."""
        ...

    @property
    def optional(self) -> Sequence[str]:
        """Further tensors that may be there. Those that say how to quantize activations are not used."""
        ...

    def shape(self, stored: Sequence[int]) -> list[int]:
        """[out, in] of a matrix, from the shape of the tensor with its codes."""
        ...

    def decode(self, tensors: Mapping[str, torch.Tensor]) -> QuantizedTensor:
        """From the tensors of one matrix, by the ends of their names. Raises ValueError for tensors that do
        not fit together."""
        ...


def unpack(words: torch.Tensor, bits: int, order: Sequence[int] | None = None) -> torch.Tensor:
    """int32 [rows, words] -> uint8 [rows, words * 32 / bits]: the numbers of `bits` bits in each word, lowest
    first; or the n-th of them at index order[n]."""
    mask = (1 << bits) - 1
    parts = [((words >> shift) & mask).to(torch.uint8) for shift in range(0, 32, bits)]
    if order is not None:
        parts = [parts[list(order).index(index)] for index in range(len(parts))]
    return torch.stack(parts, -1).flatten(-2)


def by_row(scale: torch.Tensor, rows: int) -> torch.Tensor:
    """The scales of a whole tensor ([] or [1]), of its rows ([out] or [out, groups]), or of blocks of rows
    ([blocks, groups]), as float32 [out, groups]. Raises ValueError."""
    scale = scale.float()
    if scale.numel() == 1:
        return scale.reshape(1, 1).expand(rows, 1)
    if scale.dim() == 1:
        scale = scale[:, None]
    if len(scale) == rows:
        return scale
    raise ValueError(f"scales of shape {list(scale.shape)} for {rows} rows")
