"""A linear layer whose weight is laid out for the processor it runs on."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from baton.layers.cpu_layouts import CpuLayout


class Linear:
    """y = x W^T + b. Made from weight [out, in] and bias [out] or None, which can be filled until `pack`."""

    __slots__ = ("_packed", "bias", "weight")

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None = None) -> None:
        self.weight: torch.Tensor | None = weight
        self.bias = bias
        self._packed: CpuLayout | None = None

    def pack(self, layout: type[CpuLayout]) -> None:
        """On a CPU: lays the weight out anew and drops the plain one. Once; not on other devices."""
        assert self.weight is not None
        self._packed = layout(self.weight)
        self.weight = None

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """[rows, in] -> [rows, out]"""
        if self._packed is not None:
            return self._packed.apply(x, self.bias)
        assert self.weight is not None
        return F.linear(x, self.weight, self.bias)

    def into(self, x: torch.Tensor, out: torch.Tensor) -> None:
        """Writes y of a layer without bias into `out` [rows, out]; not on a CPU."""
        assert self.weight is not None and self.bias is None
        torch.mm(x, self.weight.t(), out=out)

    def add_to(self, residual: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        """residual + y, [rows, out]; `residual` may be overwritten."""
        if self._packed is not None:
            return self._packed.add_to(residual, x, self.bias)
        return residual.add_(self(x))
