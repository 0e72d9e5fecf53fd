"""Gated DeltaNet: Yang, Kautz and Hatamizadeh, arXiv:2412.06464, with a short convolution before and a gated
norm behind the recurrence, as in Qwen3-Next."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
import torch.nn.functional as F

from baton.layers.batch import Batch, StateRows
from baton.layers.cache_spec import State
from baton.layers.linear import Linear
from baton.layers.parameters import Parameters
from baton.layers.quantization.weight_method import Convert, WeightPlan
from baton.layers.recurrent import RecurrentModule
from baton.layers.short_convolution import ShortConvolution
from baton.layers.tensor_parallel import times

CHUNK = 64
"""Tokens whose updates of a state become matrix products."""
L2_EPS = 1e-6


@dataclass(frozen=True, slots=True)
class DeltaNetShape:
    key_heads: int
    value_heads: int
    """A multiple of `key_heads`: each key serves neighbouring values."""
    key_dim: int
    value_dim: int
    window: int
    """Tokens that the convolution sees, the last of them its own."""

    @property
    def keys(self) -> int:
        return self.key_heads * self.key_dim

    @property
    def values(self) -> int:
        return self.value_heads * self.value_dim

    @property
    def mixed(self) -> int:
        """Channels of the convolution: queries, keys, values."""
        return 2 * self.keys + self.values


class GatedDeltaNet(RecurrentModule):
    """A layer whose state is, for each value head, a matrix [key_dim, value_dim], and the last inputs of the
    convolution."""

    def __init__(
        self,
        parameters: Parameters,
        index: int,
        hidden: int,
        shape: DeltaNetShape,
        eps: float,
        *,
        by_key_head: bool,
    ) -> None:
        """`by_key_head`: the checkpoint has two projections, whose rows are sorted by key heads (Qwen3-Next);
        else four (Qwen3.5). Ranks share the key heads, and the value heads that these serve."""
        self.index, self.eps = index, eps
        heads, per_key = shape.value_heads, shape.value_heads // shape.key_heads
        shard = parameters.shard
        own_keys = shard.split(shape.key_heads, "key heads of linear attention")
        values_here = times(own_keys, per_key)
        self.shape = replace(shape, key_heads=own_keys[1], value_heads=values_here[1])
        """Shape of this rank's part."""
        keys, values = times(own_keys, shape.key_dim), times(values_here, shape.value_dim)
        mixed = (
            keys,
            times(own_keys, shape.key_dim, shape.keys),
            times(values_here, shape.value_dim, 2 * shape.keys),
        )
        sizes = (heads, shape.key_dim, shape.value_dim), (shape.window - 1, shape.mixed)
        self.cache = State(sizes, axes=(0, 1))
        large = {"in_proj_qkv": shape.mixed, "in_proj_z": shape.values}
        small = {"in_proj_b": heads, "in_proj_a": heads}
        rows = {
            "in_proj_qkv": mixed,
            "in_proj_z": (values,),
            "in_proj_b": (values_here,),
            "in_proj_a": (values_here,),
        }
        convert: dict[str, Convert] = {}
        if by_key_head:
            kinds = [shape.key_dim, shape.key_dim, *[per_key * shape.value_dim] * 2]
            large, small = {"in_proj_qkvz": shape.mixed + shape.values}, {"in_proj_ba": 2 * heads}
            rows = {
                "in_proj_qkvz": (times(own_keys, sum(kinds)),),
                "in_proj_ba": (times(own_keys, 2 * per_key),),
            }
            convert["in_proj_qkvz"] = partial(_by_kind, kinds)
            convert["in_proj_ba"] = partial(_by_kind, [per_key, per_key])

        def projection(parts: dict[str, int], quantize: bool) -> Linear:
            own_convert = {name: each for name, each in convert.items() if name in parts}
            own_rows = {name: rows[name] for name in parts}
            return parameters.linear(parts, hidden, False, own_convert, quantize=quantize, rows=own_rows)

        self.gates: Linear | None = None
        """Projects the gates, which may have more bits than `input` has; None: `input` does."""
        if parameters.plan == WeightPlan():
            self.input = projection({**large, **small}, False)
        else:
            self.input, self.gates = projection(large, True), projection(small, False)
        self.convolution = ShortConvolution(
            parameters, "conv1d", shape.window, shape.mixed, cut=shard.cut(0, *mixed)
        )
        self.cuts = shard.cut(0, values_here), shard.cut(1, *mixed)
        self.decay = parameters.empty(values_here[1], dtype=torch.float32)
        self.decay_bias = parameters.empty(values_here[1], dtype=torch.float32)
        for name, target in (("A_log", self.decay), ("dt_bias", self.decay_bias)):
            exp = (lambda log: log.float().exp()) if name == "A_log" else None
            parameters.add(
                name,
                target,
                shape=torch.Size([heads]),
                fill="ones",
                convert=exp,
                cut=shard.cut(0, values_here),
            )
        self.norm = parameters.tensor("norm.weight", shape.value_dim, fill="ones")
        self.output = parameters.linear({"out_proj": hidden}, shape.values, columns=values)

    def project(self, x: torch.Tensor) -> torch.Tensor:
        projected = self.input(x)
        return projected if self.gates is None else torch.cat((projected, self.gates(x)), -1)

    def by_kernels(self, projected: torch.Tensor, batch: Batch, rows: StateRows) -> torch.Tensor:
        from baton.layers.kernels.gated_delta_net import delta_rule

        (states, windows), locations = batch.state(self.index)
        shape = self.shape
        mixed, z, gates = torch.split(projected, [shape.mixed, shape.values, 2 * shape.value_heads], -1)
        return delta_rule(
            self.convolution.by_kernels(mixed, windows, locations, rows, silu=True),
            z,
            gates,
            self.decay,
            self.decay_bias,
            self.norm,
            states,
            locations,
            rows,
            shape.key_heads,
            self.eps,
            L2_EPS,
        )

    def advance(
        self, projected: torch.Tensor, states: Sequence[torch.Tensor]
    ) -> tuple[torch.Tensor, Sequence[torch.Tensor]]:
        shape, heads = self.shape, self.shape.value_heads
        state, window = states
        mixed, z, b, a = torch.split(projected, [shape.mixed, shape.values, heads, heads], -1)
        mixed, window = self.convolution(mixed, window)
        mixed = F.silu(mixed)
        q, k, v = torch.split(mixed, [shape.keys, shape.keys, shape.values], -1)
        q, k = (_unit(_heads(part, shape.key_heads).float()) for part in (q, k))
        each = heads // shape.key_heads
        q, k = (part.repeat_interleave(each, 2).transpose(1, 2) for part in (q, k))
        v = _heads(v, heads).float().transpose(1, 2)
        beta = b.float().sigmoid().transpose(1, 2)
        decay = (-self.decay * F.softplus(a.float() + self.decay_bias)).transpose(1, 2)
        step = delta_step if q.shape[2] == 1 else delta_chunks
        out, state = step(q * shape.key_dim**-0.5, k, v, decay, beta, state)
        out = out.transpose(1, 2).to(projected.dtype)
        out = F.rms_norm(out, (shape.value_dim,), self.norm, self.eps).float()
        out = out * F.silu(_heads(z, heads).float())
        return out.to(projected.dtype).flatten(2), (state, window)


def _heads(x: torch.Tensor, count: int) -> torch.Tensor:
    return x.reshape(*x.shape[:-1], count, -1)


def _unit(x: torch.Tensor) -> torch.Tensor:
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + L2_EPS)


def _by_kind(sizes: Sequence[int], tensor: torch.Tensor) -> torch.Tensor:
    """Rows of [key head, kinds of these sizes] -> all of the first kind, all of the second, and so on."""
    heads = tensor.view(-1, sum(sizes), *tensor.shape[1:])
    return torch.cat([part.flatten(0, 1) for part in torch.split(heads, list(sizes), 1)])


def delta_step(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    decay: torch.Tensor,
    beta: torch.Tensor,
    state: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """One token of each row: float32 [rows, heads, 1, dim], decay (logarithm) and beta [rows, heads, 1],
    state [rows, heads, key_dim, value_dim], which is overwritten -> as v, state."""
    state.mul_(decay.exp().unsqueeze(-1))
    change = (v - k @ state) * beta.unsqueeze(-1)
    state.addcmul_(k.transpose(2, 3), change)
    return q @ state, state


def delta_chunks(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    decay: torch.Tensor,
    beta: torch.Tensor,
    state: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """`delta_step` for several tokens of each row. Within a chunk the changes solve a triangular system;
    what the state before the chunk has to do with them is a product."""
    count = q.shape[2]
    size = min(CHUNK, count)
    chunks = -(-count // size)
    if spare := chunks * size - count:
        # Tokens of zeros change nothing: neither decay nor update.
        q, k, v = (F.pad(part, (0, 0, 0, spare)) for part in (q, k, v))
        decay, beta = (F.pad(part, (0, spare)) for part in (decay, beta))
    split = (*q.shape[:2], chunks, size)
    q, k, v = (part.reshape(*split, -1) for part in (q, k, v))
    beta, passed = beta.reshape(*split, 1), decay.reshape(split).cumsum(-1)
    between = (passed.unsqueeze(-1) - passed.unsqueeze(-2)).tril().exp().tril()
    system = (k * beta) @ k.transpose(-1, -2) * between
    right_side = torch.cat((v, k * passed.exp().unsqueeze(-1)), -1) * beta
    solved = torch.linalg.solve_triangular(system, right_side, upper=False, unitriangular=True)
    values, of_state = torch.split(solved, [v.shape[-1], k.shape[-1]], -1)
    seen = q @ k.transpose(-1, -2) * between
    q = q * passed.exp().unsqueeze(-1)
    last = passed[..., -1:]
    k = (k * (last - passed).exp().unsqueeze(-1)).transpose(-1, -2)
    kept = last.exp().unsqueeze(-1)
    outs = []
    for i in range(chunks):
        change = values[:, :, i] - of_state[:, :, i] @ state
        outs.append(q[:, :, i] @ state + seen[:, :, i] @ change)
        state = state * kept[:, :, i] + k[:, :, i] @ change
    return torch.cat(outs, 2)[:, :, :count], state
