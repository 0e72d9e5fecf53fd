"""compressed-tensors (quant_method "compressed-tensors"): FP8 and integers of 8 bits as they are, of 4 and 8
bits packed into words."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from baton.layers.quantization.fp8 import IGNORED, check_e4m3, of_blocks
from baton.layers.quantization.quantized_tensor import QuantizedTensor, by_row, unpack


@dataclass(frozen=True)
class Compressed:
    """Codes in a dtype of their own."""

    floating: bool
    """FP8, else INT8."""
    symmetric: bool
    group: int
    """Inputs that share a scale; -1: all."""
    rows: int
    """Outputs that share a scale, in blocks; else 1."""

    marker, weight = "weight_scale", "weight"
    optional = (*IGNORED, "input_zero_point", "weight_zero_point")

    @property
    def bits(self) -> int:
        return 8

    @property
    def needed(self) -> Sequence[str]:
        return ("weight_scale",) if self.symmetric else ("weight_scale", "weight_zero_point")

    @property
    def name(self) -> str:
        return _name("FP8" if self.floating else "INT8", self.group, self.rows)

    def shape(self, stored: Sequence[int]) -> list[int]:
        return list(stored)

    def decode(self, tensors: Mapping[str, torch.Tensor]) -> QuantizedTensor:
        codes = tensors["weight"]
        if self.floating:
            check_e4m3(codes)
        elif codes.dtype != torch.int8:
            raise ValueError(f"codes are {str(codes.dtype).removeprefix('torch.')} instead of int8")
        group = codes.shape[1] if self.group < 0 else self.group

        def spread(each: torch.Tensor) -> torch.Tensor:
            if self.rows > 1:
                return of_blocks(each, codes.shape, self.rows, group)
            return _checked(by_row(each, len(codes)), codes, group)

        zero = None if self.symmetric else spread(tensors["weight_zero_point"])
        return QuantizedTensor(codes, spread(tensors["weight_scale"]), group, zero)


@dataclass(frozen=True)
class Packed:
    """Unsigned codes in words; the number that stands for 0 is the middle one, or stored likewise."""

    bits: int
    symmetric: bool
    group: int
    """-1: all inputs."""

    marker, weight = "weight_packed", "weight_packed"
    optional = ("weight_zero_point", "weight_shape", "weight_g_idx", *IGNORED)

    @property
    def needed(self) -> Sequence[str]:
        return ("weight_scale",) if self.symmetric else ("weight_scale", "weight_zero_point")

    @property
    def name(self) -> str:
        return _name(f"{self.bits} bits", self.group, 1)

    def shape(self, stored: Sequence[int]) -> list[int]:
        return [stored[0], stored[1] * 32 // self.bits]

    def decode(self, tensors: Mapping[str, torch.Tensor]) -> QuantizedTensor:
        codes = unpack(tensors["weight_packed"], self.bits)
        rows, inputs = codes.shape
        group = inputs if self.group < 0 else self.group
        scale = _checked(by_row(tensors["weight_scale"], rows), codes, group)
        if self.symmetric:
            zero = torch.full_like(scale, float(1 << (self.bits - 1)))
        else:
            zero = unpack(tensors["weight_zero_point"].t(), self.bits)[:, :rows].float().t().contiguous()
            if zero.shape != scale.shape:
                raise ValueError(f"zeros {list(zero.shape)} instead of {list(scale.shape)}")
        order = tensors["weight_g_idx"].long() if "weight_g_idx" in tensors else None
        if order is not None and int(order.min()) < 0:
            order = None  # -1: as if there were none
        if order is not None and (order.shape != (inputs,) or int(order.max()) >= scale.shape[1]):
            raise ValueError("weight_g_idx does not name the group of each input")
        return QuantizedTensor(codes, scale, group, zero, order)


def _checked(scale: torch.Tensor, codes: torch.Tensor, group: int) -> torch.Tensor:
    expected = -(-codes.shape[1] // group)
    if scale.shape[1] != expected:
        raise ValueError(f"scales of shape {list(scale.shape)} instead of {[len(codes), expected]}")
    return scale


def _name(kind: str, group: int, rows: int) -> str:
    how = f"blocks of {rows} x {group}" if rows > 1 else f"groups of {group}" if group > 0 else "rows"
    return f"{kind} in {how} (compressed-tensors)"
