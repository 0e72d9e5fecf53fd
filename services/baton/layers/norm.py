"""Root mean square norm: Zhang and Sennrich, arXiv:1910.07467; layer norm: Ba et al., arXiv:1607.06450."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from baton.layers.parameters import Parameters


class RmsNorm:
    """x / rms(x) * weight over the last dimension."""

    __slots__ = ("_kernel", "_shape", "eps", "weight")

    def __init__(
        self, parameters: Parameters, name: str, size: int, eps: float, plus_one: bool = False
    ) -> None:
        """`plus_one`: the checkpoint holds weight - 1, as Gemma's do."""
        self.weight = parameters.empty(size)
        self._shape, self.eps = (size,), eps
        self._kernel = False
        parameters.add(
            f"{name}.weight",
            self.weight,
            fill="zeros" if plus_one else "ones",
            convert=add_one if plus_one else None,
        )

    def use_kernel(self) -> None:
        """From now on for [rows, size] in 16 bits, contiguous, on a Hopper GPU."""
        self._kernel = True

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        if self._kernel:
            from baton.layers.kernels.rmsnorm import rmsnorm

            return rmsnorm(x, self.weight, self.eps)
        return F.rms_norm(x, self._shape, self.weight, self.eps)


class LayerNorm:
    """(x - mean) / deviation * weight + bias over the last dimension."""

    __slots__ = ("_bias", "_eps", "_shape", "_weight")

    def __init__(self, parameters: Parameters, name: str, size: int, eps: float) -> None:
        self._weight = parameters.tensor(f"{name}.weight", size, fill="ones")
        self._bias = parameters.tensor(f"{name}.bias", size, fill="zeros")
        self._shape, self._eps = (size,), eps

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return F.layer_norm(x, self._shape, self._weight, self._bias, self._eps)


def add_one(weight: torch.Tensor) -> torch.Tensor:
    return weight.float() + 1
