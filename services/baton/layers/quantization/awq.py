"""AWQ: Lin et al., arXiv:2306.00978, as AutoAWQ stores it (version "gemm"): packed along the outputs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from baton.layers.quantization.quantized_tensor import QuantizedTensor, unpack

NIBBLE_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
"""Which of eight neighbours is in a word's first, second, ... four bits."""


class Awq:
    marker, weight = "qweight", "qweight"
    needed, optional = ("qzeros", "scales"), ()

    def __init__(self, group: int) -> None:
        """`group`: -1 for all inputs."""
        self.bits, self.group = 4, group
        self.name = f"4 bits in {'rows' if group < 0 else f'groups of {group}'} (awq)"

    def shape(self, stored: Sequence[int]) -> list[int]:
        return [stored[1] * 8, stored[0]]

    def decode(self, tensors: Mapping[str, torch.Tensor]) -> QuantizedTensor:
        codes = unpack(tensors["qweight"], 4, NIBBLE_ORDER).t().contiguous()
        group = codes.shape[1] if self.group < 0 else self.group
        scale = tensors["scales"].float().t().contiguous()
        zero = unpack(tensors["qzeros"], 4, NIBBLE_ORDER).float().t().contiguous()
        expected = (len(codes), -(-codes.shape[1] // group))
        if scale.shape != expected or zero.shape != expected:
            raise ValueError(f"scales {list(scale.shape)} and zeros {list(zero.shape)} instead of {expected}")
        return QuantizedTensor(codes, scale, group, zero)
