"""Feed-forward layers, gated (Shazeer, GLU Variants Improve Transformer, arXiv:2002.05202) and not."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F

from baton.layers.parameters import Parameters
from baton.layers.tensor_parallel import times

ACTIVATIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "silu": F.silu,
    "gelu_pytorch_tanh": partial(F.gelu, approximate="tanh"),
    "relu2": lambda x: F.relu(x).square(),
}
"""By their names in config.json."""


class Mlp:
    """down(activation(up(x)))"""

    def __init__(
        self,
        parameters: Parameters,
        hidden: int,
        inner: int,
        activation: str,
        *,
        bias: bool = False,
        reduce: bool = True,
    ) -> None:
        """`reduce`: see GatedMlp. Raises KeyError for an activation that is not in ACTIVATIONS."""
        self._activation = ACTIVATIONS[activation]
        shard_range = parameters.shard.split(inner, "inner values of a feed-forward layer")
        self.up = parameters.linear({"up_proj": inner}, hidden, bias, rows={"up_proj": [shard_range]})
        self.down = parameters.linear({"down_proj": hidden}, inner, bias, columns=shard_range, reduce=reduce)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """[tokens, hidden] -> [tokens, hidden]"""
        return self.down(self._activation(self.up(x)))

    def add_to(self, residual: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        """residual + the same; `residual` may be overwritten."""
        return self.down.add_to(residual, self._activation(self.up(x)))


class GatedMlp:
    """down(activation(gate(x)) * up(x)); gate and up are one product."""

    def __init__(
        self,
        parameters: Parameters,
        hidden: int,
        inner: int,
        *,
        bias: bool = False,
        activation: str = "silu",
        merged: str | None = None,
        reduce: bool = True,
    ) -> None:
        """`merged`: the checkpoint's name for gate and up in one tensor. `reduce` false: with several ranks
        the result is this rank's part of a sum. Raises KeyError for an activation that is not in
        ACTIVATIONS."""
        parts = {merged: 2 * inner} if merged else {"gate_proj": inner, "up_proj": inner}
        self.activation = activation
        self._activation = ACTIVATIONS[activation]
        shard_range = parameters.shard.split(inner, "inner values of a feed-forward layer")
        self.inner = shard_range[1]
        """Inner values of this rank."""
        rows = {name: [shard_range] for name in parts}
        if merged:
            rows = {merged: [shard_range, times(shard_range, 1, inner)]}
        self.gate_up = parameters.linear(parts, hidden, bias, rows=rows)
        self.down = parameters.linear({"down_proj": hidden}, inner, bias, columns=shard_range, reduce=reduce)
        self._kernels = False

    def use_kernels(self) -> None:
        """From now on gate and up of a few rows are multiplied where they are computed, on a Hopper GPU."""
        self._kernels = self.activation == "silu" and self.gate_up.bias is None

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """[tokens, hidden] -> [tokens, hidden]"""
        return self.down(self._inner(x))

    def add_to(self, residual: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        """residual + the same; `residual` may be overwritten."""
        return self.down.add_to(residual, self._inner(x))

    def _inner(self, x: torch.Tensor) -> torch.Tensor:
        if self._kernels:
            from baton.layers.kernels import gemv, skinny_gemm

            if len(x) == 1:
                return gemv.gemv(x, self.gate_up, x.new_empty(1, self.inner), gated=True)
            weight = self.gate_up.weight
            if weight is not None and skinny_gemm.fits(len(x), weight):
                return skinny_gemm.gated(x, weight)
        gate, up = self.gate_up(x).chunk(2, -1)
        return self._activation(gate).mul_(up)
