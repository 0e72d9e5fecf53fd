"""Causal convolution of each channel by itself over the last few tokens, and LFM2's layer that is made of one
(Liquid AI, arXiv:2511.23404)."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from baton.layers.batch import Batch, StateLocations, StateRows
from baton.layers.cache_spec import State
from baton.layers.parameters import Parameters
from baton.layers.recurrent import RecurrentModule
from baton.layers.tensor_parallel import TensorSlice
from baton.model_path import CheckpointError


class ShortConvolution:
    """The state that it needs is the last inputs of each channel."""

    def __init__(
        self,
        parameters: Parameters,
        name: str,
        window: int,
        channels: int,
        *,
        bias: bool = False,
        cut: TensorSlice | None = None,
    ) -> None:
        """`window`: tokens that it sees, the last of them its own; `cut`: the channels of this rank. Raises
        CheckpointError if the window is not at least 2."""
        if window < 2:
            raise CheckpointError(f"a short convolution sees at least 2 tokens, not {window}")
        self.shape = window - 1, channels
        """Shape of the state of all ranks."""
        whole = torch.Size([channels, 1, window])
        self.weight = parameters.empty(window, (whole if cut is None else cut.shape(whole))[0])
        parameters.add(
            f"{name}.weight", self.weight, shape=whole, convert=lambda weight: weight[:, 0].t(), cut=cut
        )
        self.bias = parameters.tensor(f"{name}.bias", channels, fill="zeros", cut=cut) if bias else None

    def __call__(self, x: torch.Tensor, before: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """x [rows, tokens, channels], and the inputs before it, float32 [rows, window - 1, channels] -> as x,
        and the last inputs."""
        count = x.shape[1]
        inputs = torch.cat((before.to(x.dtype), x), 1)
        out = inputs[:, :count] * self.weight[0]
        for back in range(1, len(self.weight)):
            out.addcmul_(inputs[:, back : back + count], self.weight[back])
        if self.bias is not None:
            out += self.bias
        return out, inputs[:, count:].float()

    def by_kernels(
        self,
        x: torch.Tensor,
        windows: torch.Tensor,
        locations: StateLocations,
        rows: StateRows,
        *,
        silu: bool = False,
        gated: bool = False,
    ) -> torch.Tensor:
        """See `kernels.short_convolution.convolve`."""
        from baton.layers.kernels.short_convolution import convolve

        return convolve(x, self.weight, self.bias, windows, locations, rows, silu=silu, gated=gated)


class GatedConvolution(RecurrentModule):
    """A short convolution between two gates."""

    def __init__(
        self, parameters: Parameters, index: int, hidden: int, window: int, *, bias: bool = False
    ) -> None:
        self.index = index
        self.convolution = ShortConvolution(parameters, "conv", window, hidden, bias=bias)
        self.cache = State((self.convolution.shape,))
        self.input = parameters.linear({"in_proj": 3 * hidden}, hidden, bias)
        self.output = parameters.linear({"out_proj": hidden}, hidden, bias)

    def by_kernels(self, projected: torch.Tensor, batch: Batch, rows: StateRows) -> torch.Tensor:
        (windows,), locations = batch.state(self.index)
        return self.convolution.by_kernels(projected, windows, locations, rows, gated=True)

    def advance(
        self, projected: torch.Tensor, states: Sequence[torch.Tensor]
    ) -> tuple[torch.Tensor, Sequence[torch.Tensor]]:
        before, behind, x = projected.chunk(3, -1)
        out, window = self.convolution(before * x, states[0])
        return behind * out, (window,)
