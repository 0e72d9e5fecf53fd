"""Mamba-2: Dao and Gu, Transformers are SSMs, arXiv:2405.21060, with a short convolution before and a gated
norm behind the recurrence."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import inf

import torch
import torch.nn.functional as F

from baton.layers.batch import Batch, StateRows
from baton.layers.cache_spec import State
from baton.layers.parameters import Parameters
from baton.layers.recurrent import RecurrentModule
from baton.layers.short_convolution import ShortConvolution
from baton.model_path import CheckpointError

CHUNK = 64
"""Tokens whose updates of a state become matrix products."""


@dataclass(frozen=True, slots=True)
class Mamba2Shape:
    heads: int
    head_dim: int
    groups: int
    """Divides `heads`: those of a group, which are neighbours, share keys and queries of the state."""
    state_dim: int
    window: int
    """Tokens that the convolution sees, the last of them its own."""

    @property
    def inner(self) -> int:
        return self.heads * self.head_dim

    @property
    def mixed(self) -> int:
        """Channels of the convolution: values, and of each group a key and a query of the state."""
        return self.inner + 2 * self.groups * self.state_dim


class Mamba2(RecurrentModule):
    """A layer whose state is, for each head, a matrix [state_dim, head_dim], and the last inputs of the
    convolution."""

    def __init__(
        self,
        parameters: Parameters,
        index: int,
        hidden: int,
        shape: Mamba2Shape,
        eps: float,
        *,
        bias: bool = False,
        output_bias: bool | None = None,
        convolution_bias: bool = True,
        step_limits: tuple[float, float] = (0.0, inf),
        norm: bool = True,
    ) -> None:
        """`bias`: of the projections, but for the last where `output_bias` says otherwise; `step_limits`:
        least and largest size of a token's step; `norm` false: there is a gate alone. Raises
        CheckpointError."""
        heads = shape.heads
        if shape.groups < 1 or heads % shape.groups:
            raise CheckpointError(f"{heads} heads of Mamba-2 cannot be in {shape.groups} groups")
        self.index, self.shape, self.eps, self.step_limits = index, shape, eps, step_limits
        self.convolution = ShortConvolution(
            parameters, "conv1d", shape.window, shape.mixed, bias=convolution_bias
        )
        self.cache = State(((heads, shape.state_dim, shape.head_dim), self.convolution.shape))
        self.input = parameters.linear({"in_proj": shape.inner + shape.mixed + heads}, hidden, bias)
        self.decay = parameters.empty(heads, dtype=torch.float32)
        self.step_bias = parameters.empty(heads, dtype=torch.float32)
        self.skip = parameters.empty(heads, dtype=torch.float32)
        parameters.add("A_log", self.decay, fill="ones", convert=lambda log: log.float().exp())
        parameters.add("dt_bias", self.step_bias, fill="ones")
        parameters.add("D", self.skip, fill="ones")
        self.norm = parameters.tensor("norm.weight", shape.inner, fill="ones") if norm else None
        of_output = bias if output_bias is None else output_bias
        self.output = parameters.linear({"out_proj": hidden}, shape.inner, of_output)

    def by_kernels(self, projected: torch.Tensor, batch: Batch, rows: StateRows) -> torch.Tensor:
        from baton.layers.kernels.mamba2 import scan

        shape = self.shape
        (states, windows), locations = batch.state(self.index)
        gate, mixed, step = torch.split(projected, [shape.inner, shape.mixed, shape.heads], -1)
        out = scan(
            self.convolution.by_kernels(mixed, windows, locations, rows, silu=True),
            gate,
            step,
            self.decay,
            self.step_bias,
            self.skip,
            self.step_limits,
            shape.groups,
            states,
            locations,
            rows,
        )
        return self._normed(out, projected.dtype)

    def advance(
        self, projected: torch.Tensor, states: Sequence[torch.Tensor]
    ) -> tuple[torch.Tensor, Sequence[torch.Tensor]]:
        shape = self.shape
        state, window = states
        gate, mixed, step = torch.split(projected, [shape.inner, shape.mixed, shape.heads], -1)
        mixed, window = self.convolution(mixed, window)
        per_group = shape.groups * shape.state_dim
        x, k, q = torch.split(F.silu(mixed).float(), [shape.inner, per_group, per_group], -1)
        x = self._by_group(x, shape.heads)
        k, q = self._by_group(k, shape.groups), self._by_group(q, shape.groups)
        step = F.softplus(step.float() + self.step_bias).clamp(*self.step_limits)
        decay = self._by_group(-self.decay * step, shape.heads).squeeze(-1)
        step = self._by_group(step, shape.heads)
        scan = mamba_step if x.shape[3] == 1 else mamba_chunks
        by_group = state.view(len(state), shape.groups, -1, shape.state_dim, shape.head_dim)
        out, after = scan(q, k, x * step, decay, by_group)
        out = out + self.skip.view(shape.groups, -1, 1, 1) * x
        out = out.flatten(1, 2).transpose(1, 2).flatten(2) * F.silu(gate.float())
        return self._normed(out, projected.dtype), (after.flatten(1, 2), window)

    def _normed(self, out: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """float32 [..., inner], gated -> in `dtype`, each group by itself."""
        if self.norm is None:
            return out.to(dtype)
        group = self.shape.inner // self.shape.groups
        out = F.rms_norm(out.reshape(*out.shape[:-1], -1, group), (group,), None, self.eps)
        return out.flatten(-2).to(dtype) * self.norm

    def _by_group(self, x: torch.Tensor, heads: int) -> torch.Tensor:
        """[rows, tokens, heads * dim] -> [rows, groups, heads of a group, tokens, dim]"""
        groups = self.shape.groups
        return x.reshape(*x.shape[:2], groups, heads // groups, -1).permute(0, 2, 3, 1, 4)


def mamba_step(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, decay: torch.Tensor, state: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """One token of each row: float32 q and k [rows, groups, 1, 1, state_dim], v
    [rows, groups, heads of a group, 1, head_dim], decay (logarithm) [rows, groups, heads of a group, 1],
    state [rows, groups, heads of a group, state_dim, head_dim], which is overwritten -> as v, state."""
    state.mul_(decay.exp().unsqueeze(-1)).addcmul_(k.transpose(-1, -2), v)
    return q @ state, state


def mamba_chunks(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, decay: torch.Tensor, state: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """`mamba_step` for several tokens of each row. Within a chunk tokens attend to each other."""
    count = v.shape[3]
    size = min(CHUNK, count)
    chunks = -(-count // size)
    if spare := chunks * size - count:
        # Tokens of zeros change nothing: neither decay nor update.
        q, k, v = (F.pad(part, (0, 0, 0, spare)) for part in (q, k, v))
        decay = F.pad(decay, (0, spare))
    q, k, v = (part.reshape(*part.shape[:3], chunks, size, -1) for part in (q, k, v))
    passed = decay.reshape(*decay.shape[:3], chunks, size).cumsum(-1)
    between = (passed.unsqueeze(-1) - passed.unsqueeze(-2)).tril().exp().tril()
    within = (q @ k.transpose(-1, -2) * between) @ v
    last = passed[..., -1:]
    change = k.transpose(-1, -2) @ (v * (last - passed).exp().unsqueeze(-1))
    since, kept = passed.exp().unsqueeze(-1), last.exp().unsqueeze(-1)
    outs = []
    for i in range(chunks):
        outs.append(within[:, :, :, i] + q[:, :, :, i] @ state * since[:, :, :, i])
        state = state * kept[:, :, :, i] + change[:, :, :, i]
    return torch.cat(outs, 3)[:, :, :, :count], state
