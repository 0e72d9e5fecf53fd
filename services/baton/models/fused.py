"""The decoder's forward pass on a GPU's kernels: the same function as `Model.forward`, in fewer launches.

A layer: fused add and norm, projection, head norms with rotation and KV write, attention, projection, fused
add and norm, projection, SiLU and product, projection. For a few tokens of decode rows: projections that gate
what they write, or leave it to the norm in parts. For one token: projections that norm what they read and
gate or add what they write. Instead of a gated layer there may be a mixture of experts (`fused_mixture`).
With several ranks the add and norm of a few rows also sums what all ranks have projected.
Needs a GPU: import it where one is in use.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import cast

import torch
from sgl_kernel import silu_and_mul

from baton.layers.attention import Attention
from baton.layers.batch import Batch
from baton.layers.kernels import quantize
from baton.layers.kernels.batch_invariant_matmul import matmul
from baton.layers.kernels.gemm import MOST_ROWS, add_norm, fits, gated, project_few, project_parts
from baton.layers.kernels.gemv import gemv
from baton.layers.kernels.quantize import Quantized
from baton.layers.kernels.quantized_linear import quantize_for, quantizes
from baton.layers.kernels.rmsnorm import fused_add_rmsnorm, rmsnorm
from baton.layers.kernels.scaled_mm import scaled_product
from baton.layers.linear import Linear
from baton.layers.mla import MlaAttention
from baton.layers.mlp import GatedMlp
from baton.layers.moe import Mixture
from baton.layers.tensor_parallel import DeviceCommunicator
from baton.models.decoder import Decoder, plain_layers
from baton.models.fused_mixture import FusedMixture


@dataclass(slots=True)
class _Weights:
    """Weights of one layer."""

    input_norm: torch.Tensor
    attention: Attention | MlaAttention
    post_norm: torch.Tensor
    feed_forward: GatedMlp | FusedMixture


class FusedDecoder:
    """Implements `body.Body`."""

    def __init__(
        self,
        model: Decoder,
        context_length: int,
        invariant: bool = False,
    ) -> None:
        """`model`: of plain layers. `context_length`: positions that will be used. `invariant`: a token is
        computed in the same order whatever else is in the step; slower."""
        self.model = model
        self._invariant = invariant
        self._communicator = cast(DeviceCommunicator | None, model.communicator)
        summed = self._communicator is not None
        """Then rank 0 alone has the biases of what is summed, and all must take the same path."""
        layers = plain_layers(model)
        assert layers is not None
        for rope in model.ropes:
            rope.prepare_kernels(context_length, model.device)
        self._layers: list[_Weights] = []
        for layer in layers:
            attention, mlp = layer.attention, layer.feed_forward
            assert isinstance(attention, Attention | MlaAttention) and isinstance(mlp, GatedMlp | Mixture)
            self._layers.append(
                _Weights(
                    layer.input_norm.weight,
                    attention,
                    layer.post_norm.weight,
                    mlp if isinstance(mlp, GatedMlp) else FusedMixture(mlp, invariant),
                )
            )
        dense = [w.feed_forward for w in self._layers if isinstance(w.feed_forward, GatedMlp)]
        self._inner = max((mlp.inner for mlp in dense), default=0)
        downs = [mlp.down for mlp in dense]
        linears = [*(mlp.gate_up for mlp in dense), *downs]
        few = all(fits(linear, bias=summed and linear in downs) for linear in linears)
        for w in self._layers:
            # Where a mixture follows, `add_norm` adds the bias that `project_parts` leaves out.
            few = few and fits(w.attention.output, bias=summed or isinstance(w.feed_forward, FusedMixture))
        self._few = MOST_ROWS if few and not invariant else 0
        """Rows up to which `_forward_few` computes decode steps."""

    def forward(self, batch: Batch) -> torch.Tensor:
        """What follows the last layer's attention is not computed for tokens that are not wanted."""
        model, eps, wanted = self.model, self.model.config.rms_norm_eps, batch.wanted
        residual = model.embed(batch.tokens)
        if len(residual) == 1 and not self._invariant:
            return self._forward_one(batch, residual)
        if batch.few and len(residual) <= self._few:
            return self._forward_few(batch, residual)
        x = self._norm(residual, None, self._layers[0].input_norm, self._layers[0].attention.input)
        for w, following, user in self._followed():
            attention = w.attention
            q = attention.write(self._project(attention.input, x), batch)
            if wanted is not None and following is model.norm.weight and not wanted.shape[0]:
                if self._communicator is not None:
                    # A sum follows all writes: what has retired on rank 0 has everywhere.
                    self._communicator.all_reduce(residual.new_zeros(16))
                return residual[:0]
            attended = attention.attend(batch, q)
            if wanted is not None and following is model.norm.weight:
                attended, residual = (part.index_select(0, wanted) for part in (attended, residual))
            update = self._project(attention.output, attended)
            mlp = w.feed_forward
            if isinstance(mlp, FusedMixture):
                fused_add_rmsnorm(update, residual, w.post_norm, eps)
                x = self._add_norm(residual, mlp.parts(update), following, user, update)
            else:
                x = self._norm(residual, update[None], w.post_norm, mlp.gate_up)
                inner = self._inner_of(self._project(mlp.gate_up, x), mlp.down)
                x = self._norm(residual, self._project(mlp.down, inner)[None], following, user)
        assert isinstance(x, torch.Tensor)
        return x

    def _followed(self) -> Iterator[tuple[_Weights, torch.Tensor, Linear | None]]:
        """Each layer, with the norm that follows it and the projection that takes what that writes."""
        for w, after in itertools.pairwise(self._layers):
            yield w, after.input_norm, after.attention.input
        yield self._layers[-1], self.model.norm.weight, None

    def _norm(
        self,
        residual: torch.Tensor,
        parts: torch.Tensor | None,
        norm: torch.Tensor,
        user: Linear | None,
        *,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor | Quantized:
        """residual [tokens, hidden] += `parts` [n, tokens, hidden] -> normalized, as `user` takes it, in
        `out`, which several parts need, or in place of the only one."""
        eps = self.model.config.rms_norm_eps
        weight = user.quantized if user is not None and not self._invariant else None
        if weight is not None and quantizes(weight, len(residual)):
            return quantize.add_norm(residual, parts, norm, eps, weight.codes.dtype, weight.block > 1)
        if parts is None:
            return rmsnorm(residual, norm, eps)
        if out is not None:
            add_norm(residual, parts, norm, out, eps)
            return out
        x: torch.Tensor = parts[0]
        fused_add_rmsnorm(x, residual, norm, eps)
        return x

    def _add_norm(
        self,
        residual: torch.Tensor,
        parts: torch.Tensor,
        norm: torch.Tensor,
        user: Linear | None,
        out: torch.Tensor,
        bias: torch.Tensor | None = None,
    ) -> torch.Tensor | Quantized:
        """`_norm` of the parts of all ranks, and `bias` [hidden]. Ranks normalize in 16 bits; what `user`
        takes in 8 is quantized by a launch of its own."""
        if self._communicator is not None:
            eps = self.model.config.rms_norm_eps
            self._communicator.add_norm(residual, parts, norm, out, eps, bias)
            return out if user is None else _for(user, out)
        if bias is not None:
            add_norm(residual, parts, norm, out, self.model.config.rms_norm_eps, bias)
            return out
        return self._norm(residual, parts, norm, user, out=out)

    def _inner_of(self, gate_up: torch.Tensor, user: Linear) -> torch.Tensor | Quantized:
        """[tokens, 2 * inner] -> silu(gate) * up, as `user` takes it."""
        weight = None if self._invariant else user.quantized
        if weight is not None and quantizes(weight, len(gate_up)):
            return quantize.silu_and_mul(gate_up, weight.codes.dtype, weight.block > 1)
        inner: torch.Tensor = silu_and_mul(gate_up)
        return inner

    def _forward_few(self, batch: Batch, residual: torch.Tensor) -> torch.Tensor:
        """The forward pass for a few tokens of decode rows; `residual` [tokens, hidden]: their embedding."""
        normed = torch.empty_like(residual)
        x = self._norm(residual, None, self._layers[0].input_norm, self._layers[0].attention.input)
        for w, following, user in self._followed():
            attention = w.attention
            few = project_few(x, attention.input, residual.dtype) if isinstance(x, Quantized) else None
            projected = self._project(attention.input, x) if few is None else few
            q = attention.write(projected, batch)
            attended = attention.attend(batch, q)
            parts = project_parts(_for(attention.output, attended), attention.output)
            mlp = w.feed_forward
            bias = attention.output.bias
            if isinstance(mlp, FusedMixture):
                self._add_norm(residual, parts, w.post_norm, None, normed, bias)
                parts, bias = mlp.parts(normed), None
            else:
                x = self._add_norm(residual, parts, w.post_norm, mlp.gate_up, normed, bias)
                eight = quantizes(mlp.down.quantized, len(residual))
                inner = gated(x, mlp.gate_up, residual.dtype, eight)
                if inner is None:
                    inner = self._inner_of(self._project(mlp.gate_up, x), mlp.down)
                elif isinstance(inner, torch.Tensor):
                    inner = _for(mlp.down, inner)
                parts, bias = project_parts(inner, mlp.down), mlp.down.bias
            x = self._add_norm(residual, parts, following, user, normed, bias)
        assert isinstance(x, torch.Tensor)
        return x if batch.wanted is None else x.index_select(0, batch.wanted)

    def logits(self, hidden: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        if self._communicator is None:
            return self._project(self.model.head, hidden, out)
        logits = self.model.gathered(self._project(self.model.head, hidden))
        if self.model.shard.rank:
            return logits
        return logits.contiguous() if out is None else out.copy_(logits)

    def _project(
        self, linear: Linear, x: torch.Tensor | Quantized, out: torch.Tensor | None = None
    ) -> torch.Tensor:
        """[rows, in] -> [rows, out], into `out` if given, which is for layers without bias."""
        if isinstance(x, Quantized):
            assert linear.quantized is not None and out is None
            return linear.summed(scaled_product(x, linear.quantized, self.model.dtype, linear.bias))
        if self._invariant:
            return matmul(x, linear, out)
        if out is None:
            return linear(x)
        linear.into(x, out)
        return out

    def _forward_one(self, batch: Batch, residual: torch.Tensor) -> torch.Tensor:
        """The forward pass for one token; `residual` [1, hidden] is its embedding."""
        model, eps = self.model, self.model.config.rms_norm_eps
        inner = residual.new_empty(1, self._inner)
        if self._communicator is not None:
            return self._forward_one_of_ranks(batch, residual, inner)
        for w in self._layers:
            attention = w.attention
            projected = gemv(residual, attention.input, None, norm=w.input_norm, eps=eps)
            q = attention.write(projected, batch)
            attended = attention.attend(batch, q)
            gemv(attended, attention.output, residual, add=True)
            mlp = w.feed_forward
            if isinstance(mlp, FusedMixture):
                mlp.add_one(residual, w.post_norm, eps)
            else:
                gemv(residual, mlp.gate_up, inner, norm=w.post_norm, eps=eps, gated=True)
                gemv(inner, mlp.down, residual, add=True)
        if batch.wanted is not None:
            residual = residual.index_select(0, batch.wanted)
        return rmsnorm(residual, model.norm.weight, eps)

    def _forward_one_of_ranks(
        self, batch: Batch, residual: torch.Tensor, inner: torch.Tensor
    ) -> torch.Tensor:
        """What a projection adds is summed first, so norms are kernels of their own. `inner`: a buffer."""
        x = rmsnorm(residual, self._layers[0].input_norm, self.model.config.rms_norm_eps)
        for w, following, _ in self._followed():
            attention = w.attention
            q = attention.write(gemv(x, attention.input, None), batch)
            part = gemv(attention.attend(batch, q), attention.output, None)
            self._add_norm(residual, part[None], w.post_norm, None, x)
            mlp = w.feed_forward
            if isinstance(mlp, FusedMixture):
                parts = mlp.parts(x)
            else:
                gemv(x, mlp.gate_up, inner, gated=True)
                parts = gemv(inner, mlp.down, None)[None]
            self._add_norm(residual, parts, following, None, x)
        return x if batch.wanted is None else x.index_select(0, batch.wanted)


def _for(user: Linear, x: torch.Tensor) -> torch.Tensor | Quantized:
    """x [tokens, in] as `user` multiplies it."""
    weight = user.quantized
    return quantize_for(weight, x) if weight is not None and quantizes(weight, len(x)) else x
