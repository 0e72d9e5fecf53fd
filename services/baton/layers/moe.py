"""Mixtures of experts: Shazeer et al., arXiv:1701.06538, as today's families route and compute them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Literal

import torch
import torch.nn.functional as F

from baton.layers.linear import Linear
from baton.layers.mlp import ACTIVATIONS, GatedMlp, Mlp
from baton.layers.moe_routing import MoeGate
from baton.layers.norm import RmsNorm
from baton.layers.parameters import Parameters
from baton.layers.quantization.weight_method import QuantizedWeight, WeightMethod
from baton.layers.tensor_parallel import ONE_RANK, IndexRange, TensorSlice, times


@dataclass(frozen=True, slots=True)
class ClampedSwiglu:
    """gpt-oss' activation: (up + 1) * gate * sigmoid(alpha * gate), gate and up clamped."""

    alpha: float
    limit: float

    def __call__(self, gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
        gate = gate.clamp(max=self.limit)
        return (up.clamp(-self.limit, self.limit) + 1) * gate * torch.sigmoid(gate * self.alpha)


@dataclass(frozen=True, slots=True)
class ExpertMatrix:
    """A matrix of all experts."""

    values: torch.Tensor
    """[experts, out, in]: weights, or codes of 8 bits; of 4 bits bytes, [experts, out, in / 2]"""
    scale: torch.Tensor | None = None
    """float32 [experts * out, 1], [experts * out / 128, in / 128] or [experts * out, in / group]"""
    scaled: Literal["", "rows", "blocks", "groups"] = ""
    zero: torch.Tensor | None = None
    """Zero points of 4 bits, which alone are scaled by groups; shaped like `scale`."""
    group: int = 0


ExpertTensorNames = tuple[str, ...]
"""Tensor names of an expert's projections in the checkpoint: gate, up and down, or without a gate up and
down."""
PROJECTIONS: ExpertTensorNames = ("gate_proj", "up_proj", "down_proj")


class Experts:
    """The experts of one layer: down(activation(gate(x)) * up(x)) each, or without a gate
    down(activation(up(x)))."""

    def __init__(
        self,
        parameters: Parameters,
        count: int,
        hidden: int,
        inner: int,
        *,
        projections: ExpertTensorNames | None = PROJECTIONS,
        bias: bool = False,
        activation: str | ClampedSwiglu = "silu",
        scale_inputs: bool = False,
    ) -> None:
        """`projections` None: the checkpoint has all experts in one tensor, transposed, gate and up
        interleaved, as gpt-oss has. `scale_inputs`: what an expert sees is multiplied by its weight, not what
        it gives."""
        self.hidden = hidden
        self.total, self.first = count, 0
        """Experts of all ranks; the first one of this rank."""
        if parameters.shard.ep and parameters.shard.size > 1:
            self.first, count = parameters.shard.split(count, "experts")
            for expert in {*range(self.total)} - {*range(self.first, self.first + count)}:
                for name in projections or ():
                    parameters.leave(f"{expert}.{name}.weight")
                    parameters.leave(f"{expert}.{name}.bias")
            parameters = replace(parameters, shard=ONE_RANK)  # of each expert it has all
        span = parameters.shard.split(inner, "inner values of an expert")
        self.count, self.inner = count, span[1]
        """Inner values of each expert on this rank."""
        self.communicator = parameters.communicator
        """With several ranks what comes out is this rank's part of a sum."""
        self.activation, self.scale_inputs = activation, scale_inputs
        self.gated = projections is None or len(projections) == 3
        inputs = 1 + self.gated
        self.quantized: list[tuple[Linear, Linear]] | None = None
        """Each expert's gate_up and down where they stay quantized; the tensors below are then empty."""
        self.merged: tuple[QuantizedWeight, QuantizedWeight] | None = None
        """On a GPU: gate_up and down of all experts, one below the other."""
        method = None
        if projections is not None and not bias:
            method = _method(parameters, hidden, inner, span[1], projections)
        if projections is not None and method is not None:
            if parameters.plan.on_gpu:
                device = parameters.device
                self.merged = (
                    QuantizedWeight(method, count * inputs * span[1], hidden, device, stacked=True),
                    QuantizedWeight(method, count * hidden, span[1], device, stacked=True),
                )
            self.quantized = [
                self._expert(parameters, expert, hidden, projections, inner, span) for expert in range(count)
            ]
            count = 0
        self.gate_up = parameters.empty(count, inputs * self.inner, hidden)
        """Without a gate: up alone."""
        self.down = parameters.empty(count, hidden, self.inner)
        self.gate_up_bias = parameters.empty(count, inputs * self.inner) if bias else None
        self.down_bias = parameters.empty(count, hidden) if bias else None
        if projections is None:
            self._declare_merged(parameters, inner, span)
        else:
            for expert in range(count):
                self._declare(parameters, expert, projections, inner, span)
        if self.down_bias is not None and parameters.shard.rank:
            self.down_bias = None  # rank 0 adds it

    def _expert(
        self,
        parameters: Parameters,
        expert: int,
        hidden: int,
        projections: ExpertTensorNames,
        inner: int,
        span: IndexRange,
    ) -> tuple[Linear, Linear]:
        """One that stays quantized. `inner`: of all ranks; `span`: the part of this one."""
        parameters, (*ups, down) = parameters.under(str(self.first + expert)), projections
        into: tuple[QuantizedWeight | None, QuantizedWeight | None] = None, None
        if self.merged is not None:
            first, second = self.merged
            height = len(ups) * span[1]
            into = first.rows(expert * height, height), second.rows(expert * hidden, hidden)
        rows, parts = {name: [span] for name in ups}, dict.fromkeys(ups, inner)
        gate_up = parameters.linear(parts, hidden, rows=rows, memory=into[0])
        out = parameters.linear({down: hidden}, inner, columns=span, reduce=False, memory=into[1])
        return gate_up, out

    @property
    def computable(self) -> bool:
        """Whether kernels can read all experts: `matrices`."""
        return self.quantized is None or self.merged is not None

    def matrices(self) -> tuple[ExpertMatrix, ExpertMatrix]:
        """gate_up and down, as kernels read them."""
        if self.merged is not None:
            first, second = self.merged
            return _matrix(first, self.count), _matrix(second, self.count)
        return ExpertMatrix(self.gate_up), ExpertMatrix(self.down)

    def _declare(
        self,
        parameters: Parameters,
        expert: int,
        projections: ExpertTensorNames,
        inner: int,
        span: IndexRange,
    ) -> None:
        """`inner`: of all ranks; `span`: the part of this one."""
        parameters, (*ups, down) = parameters.under(str(self.first + expert)), projections
        hidden, rows = self.down.shape[1], parameters.shard.cut(0, span)
        inners, columns = torch.Size([inner, hidden]), parameters.shard.cut(1, span)
        parts = torch.split(self.gate_up[expert], self.inner)
        for name, target, shape, cut in (
            *((name, part, inners, rows) for name, part in zip(ups, parts, strict=True)),
            (down, self.down[expert], torch.Size([hidden, inner]), columns),
        ):
            convert = parameters.plan.rounding(None)
            parameters.add(f"{name}.weight", target, shape=shape, convert=convert, cut=cut)
        if self.gate_up_bias is not None and self.down_bias is not None:
            for name, bias in zip(ups, torch.split(self.gate_up_bias[expert], self.inner), strict=True):
                parameters.add(f"{name}.bias", bias, shape=inners[:1], fill="zeros", cut=rows)
            parameters.add(f"{down}.bias", self.down_bias[expert], fill="zeros")

    def _declare_merged(self, parameters: Parameters, inner: int, span: IndexRange) -> None:
        """Gate and up of an inner value are neighbours."""
        count, hidden, _ = self.down.shape
        pairs, experts = times(span, 2), None
        if count < self.total:
            count, experts = self.total, TensorSlice(0, ((self.first, count),))
        parameters.add(
            "gate_up_proj",
            self.gate_up,
            shape=torch.Size([count, hidden, 2 * inner]),
            convert=lambda tensor: _halves(tensor.transpose(1, 2)),
            cut=experts or parameters.shard.cut(2, pairs),
        )
        parameters.add(
            "down_proj",
            self.down,
            shape=torch.Size([count, inner, hidden]),
            convert=lambda tensor: tensor.transpose(1, 2).contiguous(),
            cut=experts or parameters.shard.cut(1, span),
        )
        if self.gate_up_bias is not None and self.down_bias is not None:
            parameters.add(
                "gate_up_proj_bias",
                self.gate_up_bias,
                shape=torch.Size([count, 2 * inner]),
                fill="zeros",
                convert=_halves,
                cut=experts or parameters.shard.cut(1, pairs),
            )
            shape = torch.Size([count, hidden])
            parameters.add("down_proj_bias", self.down_bias, shape=shape, fill="zeros", cut=experts)

    def __call__(self, x: torch.Tensor, weights: torch.Tensor, experts: torch.Tensor) -> torch.Tensor:
        """x [tokens, hidden], weights and experts [tokens, n] -> float32 [tokens, hidden]: the weighted sum
        of each token's experts, in the order of their numbers; of those of this rank."""
        order = experts.flatten().argsort(stable=True)
        tokens = order.div(experts.shape[1], rounding_mode="floor")
        total = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
        sizes = experts.flatten().bincount(minlength=self.total).tolist()
        start = sum(sizes[: self.first])
        for expert, size in enumerate(sizes[self.first : self.first + self.count]):
            if size:
                rows = tokens[start : start + size]
                row_weights = weights.view(-1, 1)[order[start : start + size]]
                total.index_add_(0, rows, self._weighted(expert, x[rows], row_weights))
                start += size
        return total

    def dense(self, x: torch.Tensor, weights: torch.Tensor, experts: torch.Tensor) -> torch.Tensor:
        """What `forward` computes, with each expert for all tokens: more products, but their sizes do not
        depend on the data."""
        table = torch.zeros(len(x), self.total, dtype=torch.float32, device=x.device)
        table = table.scatter_(1, experts, weights)[:, self.first : self.first + self.count]
        total = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
        for expert in range(self.count):
            total.add_(self._weighted(expert, x, table[:, expert, None]))
        return total

    def _weighted(self, expert: int, x: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """x [tokens, hidden], weights float32 [tokens, 1] -> float32 [tokens, hidden]"""
        if self.scale_inputs:
            return self._one(expert, (x * weights).to(x.dtype)).float()
        return self._one(expert, x) * weights

    def _one(self, expert: int, x: torch.Tensor) -> torch.Tensor:
        if self.quantized is not None:
            gate_up, down = self.quantized[expert]
            return down(self._inner(gate_up(x)))
        bias = None if self.gate_up_bias is None else self.gate_up_bias[expert]
        inner = self._inner(F.linear(x, self.gate_up[expert], bias))
        bias = None if self.down_bias is None else self.down_bias[expert]
        return F.linear(inner, self.down[expert], bias)

    def _inner(self, gate_up: torch.Tensor) -> torch.Tensor:
        if not self.gated:
            assert isinstance(self.activation, str)
            return ACTIVATIONS[self.activation](gate_up)
        gate, up = gate_up.chunk(2, -1)
        if isinstance(self.activation, str):
            return ACTIVATIONS[self.activation](gate) * up
        return self.activation(gate, up)


def _method(
    parameters: Parameters, hidden: int, inner: int, inner_here: int, projections: ExpertTensorNames
) -> WeightMethod | None:
    """How expert 0 stays quantized, and so all; None: they do not. GPUs have no kernels for parts of blocks.
    `inner_here`: of `inner`, on this rank."""
    *ups, down = (f"{parameters.prefix}0.{name}.weight" for name in projections)
    method = parameters.plan.method_of(ups, hidden)
    if method is None or parameters.plan.method_of([down], inner) is None:
        return None
    plan = parameters.plan
    if plan.on_gpu and (hidden % method.rows or inner % method.rows):
        return None
    if inner_here % method.rows or (not plan.online and not method.fits(inner_here)):
        parameters.check_whole_blocks(down)
    return method


def _matrix(weight: QuantizedWeight, experts: int) -> ExpertMatrix:
    codes = weight.codes.view(experts, -1, weight.codes.shape[1])
    if weight.bits == 4:
        return ExpertMatrix(codes, weight.scale, "groups", weight.zero, weight.group)
    return ExpertMatrix(codes, weight.scale, "blocks" if weight.block > 1 else "rows")


def _halves(interleaved: torch.Tensor) -> torch.Tensor:
    """[experts, (gate, up) pairs, ...] -> gates, then ups"""
    return torch.cat((interleaved[:, ::2], interleaved[:, 1::2]), 1)


class GatedExpert:
    """A shared expert that is weighed by the sigmoid of a gate of its own."""

    def __init__(self, parameters: Parameters, name: str, hidden: int, inner: int) -> None:
        """`name`: the expert's in the checkpoint."""
        self.mlp = GatedMlp(parameters.under(name), hidden, inner, reduce=False)
        self.gate = parameters.linear({f"{name}_gate": 1}, hidden, quantize=False)

    def add_to(self, residual: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        """residual + the weighed expert of x; `residual` may be overwritten."""
        return residual.addcmul_(self.mlp(x), self.gate(x).sigmoid())


class Mixture:
    """A feed-forward layer: a token's experts, and a shared expert if there is one, which has every token."""

    def __init__(
        self,
        router: MoeGate,
        experts: Experts,
        shared: GatedMlp | GatedExpert | Mlp | None = None,
        expert_norm: RmsNorm | None = None,
    ) -> None:
        """`shared`: made with `reduce` false; `expert_norm`: of what the experts see, not the router."""
        self.router, self.experts, self.shared, self._expert_norm = router, experts, shared, expert_norm
        self.kernels: Callable[[torch.Tensor], torch.Tensor] | None = None
        """What `forward` computes, where it must not wait for the host: `models.device_mixture`."""
        self._communicator = experts.communicator

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """[tokens, hidden] -> [tokens, hidden]"""
        out = self._part(x) if self.kernels is None else self.kernels(x)
        return out if self._communicator is None else self._communicator.all_reduce(out)

    def _part(self, x: torch.Tensor) -> torch.Tensor:
        return self._with_shared(x, self.experts(self._normed(x), *self.router(x)))

    def dense(self, x: torch.Tensor) -> torch.Tensor:
        """Computes each expert for all tokens: see `Experts.dense`. Of several ranks this one's part."""
        return self._with_shared(x, self.experts.dense(self._normed(x), *self.router(x)))

    @property
    def plain(self) -> bool:
        """Whether the router is a `MoeGate` as it stands, and sees what the experts see."""
        return type(self.router) is MoeGate and self._expert_norm is None

    def _normed(self, x: torch.Tensor) -> torch.Tensor:
        return x if self._expert_norm is None else self._expert_norm(x)

    def _with_shared(self, x: torch.Tensor, routed: torch.Tensor) -> torch.Tensor:
        out = routed.to(x.dtype)
        return out if self.shared is None else self.shared.add_to(out, x)

    def add_to(self, residual: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        """residual + the same; `residual` may be overwritten."""
        return residual.add_(self(x))
