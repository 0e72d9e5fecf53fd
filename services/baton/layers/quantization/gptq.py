"""GPTQ: Frantar et al., arXiv:2210.17323, as AutoGPTQ and GPTQModel store it: packed along the inputs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from baton.layers.quantization.quantized_tensor import QuantizedTensor, unpack


class Gptq:
    marker, weight = "qweight", "qweight"
    needed, optional = ("qzeros", "scales"), ("g_idx",)

    def __init__(self, bits: int, group: int, *, reordered: bool, minus_one: bool) -> None:
        """`group`: -1 for all inputs; `reordered`: g_idx is in use (desc_act); `minus_one`: zeros are stored
        as one less (all but checkpoint_format "gptq_v2")."""
        self.bits, self.group, self.reordered, self._minus_one = bits, group, reordered, minus_one
        groups = "rows" if group < 0 else f"groups of {group}"
        self.name = f"{bits} bits in {groups} (gptq{', desc_act' if reordered else ''})"

    def shape(self, stored: Sequence[int]) -> list[int]:
        return [stored[1], stored[0] * 32 // self.bits]

    def decode(self, tensors: Mapping[str, torch.Tensor]) -> QuantizedTensor:
        codes = unpack(tensors["qweight"].t(), self.bits)
        inputs = codes.shape[1]
        group = inputs if self.group < 0 else self.group
        scale = tensors["scales"].float().t().contiguous()
        zero = unpack(tensors["qzeros"], self.bits).float().t() + (1.0 if self._minus_one else 0.0)
        expected = (len(codes), -(-inputs // group))
        if scale.shape != expected or zero.shape != expected:
            raise ValueError(f"scales {list(scale.shape)} and zeros {list(zero.shape)} instead of {expected}")
        order = tensors["g_idx"].long() if "g_idx" in tensors else None
        if order is not None and not self.reordered:
            if not torch.equal(order, torch.arange(inputs) // group):
                raise ValueError("g_idx has groups of other columns than neighbours; set desc_act to true")
            order = None
        if self.reordered:
            if order is None:
                raise ValueError("desc_act is true, and there is no g_idx")
            if order.shape != (inputs,) or not 0 <= int(order.min()) <= int(order.max()) < expected[1]:
                raise ValueError("g_idx does not name the group of each input")
        return QuantizedTensor(codes, scale, group, zero.contiguous(), order)
