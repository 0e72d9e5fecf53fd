"""A plain layer on a GPU's kernels: the same function as `DecoderLayer`'s modules, in fewer launches.

Fused add and norm, projection, head norms with rotation and KV write, attention (or a recurrent layer's
kernels), projection, fused add and norm, projection, SiLU and product, projection. For a few tokens of decode
rows: projections that gate what they write, or leave it to the norm in parts. For one token: projections
that norm what they read and gate or add what they write. Instead of a gated layer there may be a mixture of
experts (`fused_mixture`). With several ranks the add and norm of a few rows also sums what all ranks have
projected. Needs a GPU: import it where one is in use.
"""

from __future__ import annotations

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
from baton.layers.recurrent import RecurrentModule
from baton.layers.tensor_parallel import DeviceCommunicator
from baton.models.decoder import Decoder, DecoderLayer, plain_layers
from baton.models.fused_mixture import FusedMixture

_Attention = Attention | MlaAttention | RecurrentModule


def fuse_layers(model: Decoder, invariant: bool) -> None:
    """Gives a model of plain layers their fused bodies. `invariant`: a token is computed in the same order
    whatever else is in the step; slower."""
    layers = plain_layers(model)
    assert layers is not None
    followed = zip(layers, [*layers[1:], None], strict=True)
    model.bodies = [FusedLayer(model, layer, following, invariant) for layer, following in followed]


class FusedLayer:
    """Implements `decoder.LayerBody`. What it leaves is normalized for the layer that follows; the last one
    leaves the final states, and without a tap computes nothing behind its attention for tokens that are not
    wanted."""

    def __init__(
        self, model: Decoder, layer: DecoderLayer, following: DecoderLayer | None, invariant: bool
    ) -> None:
        """`following`: None: none."""
        attention, mlp = layer.attention, layer.feed_forward
        assert isinstance(attention, _Attention) and isinstance(mlp, GatedMlp | Mixture)
        self._attention: _Attention = attention
        self._mlp = mlp if isinstance(mlp, GatedMlp) else FusedMixture(mlp, invariant)
        self._input_norm, self._post_norm = layer.input_norm.weight, layer.post_norm.weight
        self._last, self._following, self._user = True, model.norm.weight, None
        if following is not None:
            self._last, self._following = False, following.input_norm.weight
            self._user = following.attention.input
        self._eps, self._dtype, self._invariant = model.config.rms_norm_eps, model.dtype, invariant
        self._communicator = cast(DeviceCommunicator | None, model.communicator)
        summed = self._communicator is not None
        """Then rank 0 alone has the biases of what is summed, and all must take the same path."""
        # Where a mixture follows, `add_norm` adds the bias that `project_parts` leaves out.
        few = fits(attention.output, bias=summed or isinstance(mlp, Mixture))
        if isinstance(mlp, GatedMlp):
            few = few and fits(mlp.gate_up, bias=False) and fits(mlp.down, bias=summed)
        self._most_few = MOST_ROWS if few and not invariant else 0
        """Tokens up to which `_few` computes decode rows."""

    def forward(
        self, residual: torch.Tensor, x: torch.Tensor | Quantized | None, batch: Batch
    ) -> tuple[torch.Tensor, torch.Tensor | Quantized | None]:
        indices = batch.logits_indices if self._last and batch.tap is None else None
        if len(residual) == 1 and not self._invariant:
            if self._communicator is not None:
                return self._one_of_ranks(residual, x, batch, indices)
            return self._one(residual, batch, indices)
        if x is None:
            x = self._norm(residual, None, self._input_norm, self._attention.input)
        if batch.few and len(residual) <= self._most_few:
            return self._few(residual, x, batch, indices)
        return self._many(residual, x, batch, indices)

    def _many(
        self, residual: torch.Tensor, x: torch.Tensor | Quantized, batch: Batch, indices: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor | Quantized]:
        attention, mlp = self._attention, self._mlp
        q = attention.write(self._project(attention.input, x), batch)
        if indices is not None:
            if not indices.shape[0]:
                if self._communicator is not None:
                    # A sum follows all writes: what has retired on rank 0 has everywhere.
                    self._communicator.all_reduce(residual.new_zeros(16))
                return residual[:0], residual[:0]
            attended, residual = (
                part.index_select(0, indices) for part in (attention.attend(batch, q), residual)
            )
        else:
            attended = attention.attend(batch, q)
        update = self._project(attention.output, attended)
        if isinstance(mlp, FusedMixture):
            fused_add_rmsnorm(update, residual, self._post_norm, self._eps)
            return residual, self._add_norm(residual, mlp.parts(update), self._following, self._user, update)
        x = self._norm(residual, update[None], self._post_norm, mlp.gate_up)
        inner = self._inner_of(self._project(mlp.gate_up, x), mlp.down)
        update = self._project(mlp.down, inner)
        return residual, self._norm(residual, update[None], self._following, self._user)

    def _few(
        self, residual: torch.Tensor, x: torch.Tensor | Quantized, batch: Batch, indices: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor | Quantized]:
        attention, mlp = self._attention, self._mlp
        normed = x if isinstance(x, torch.Tensor) else torch.empty_like(residual)
        few = project_few(x, attention.input, residual.dtype) if isinstance(x, Quantized) else None
        projected = self._project(attention.input, x) if few is None else few
        q = attention.write(projected, batch)
        attended = attention.attend(batch, q)
        parts = project_parts(_for(attention.output, attended), attention.output)
        bias = attention.output.bias
        if isinstance(mlp, FusedMixture):
            self._add_norm(residual, parts, self._post_norm, None, normed, bias)
            parts, bias = mlp.parts(normed), None
        else:
            x = self._add_norm(residual, parts, self._post_norm, mlp.gate_up, normed, bias)
            eight = quantizes(mlp.down.quantized, len(residual))
            inner = gated(x, mlp.gate_up, residual.dtype, eight)
            if inner is None:
                inner = self._inner_of(self._project(mlp.gate_up, x), mlp.down)
            elif isinstance(inner, torch.Tensor):
                inner = _for(mlp.down, inner)
            parts, bias = project_parts(inner, mlp.down), mlp.down.bias
        x = self._add_norm(residual, parts, self._following, self._user, normed, bias)
        if indices is None:
            return residual, x
        assert isinstance(x, torch.Tensor)
        return residual, x.index_select(0, indices)

    def _one(
        self, residual: torch.Tensor, batch: Batch, indices: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """For one token: norms are a part of the product that reads what they write."""
        attention, mlp, eps = self._attention, self._mlp, self._eps
        projected = gemv(residual, attention.input, None, norm=self._input_norm, eps=eps)
        attended = attention.attend(batch, attention.write(projected, batch))
        gemv(attended, attention.output, residual, add=True)
        if isinstance(mlp, FusedMixture):
            mlp.add_one(residual, self._post_norm, eps)
        else:
            inner = residual.new_empty(1, mlp.inner)
            gemv(residual, mlp.gate_up, inner, norm=self._post_norm, eps=eps, gated=True)
            gemv(inner, mlp.down, residual, add=True)
        if not self._last:
            return residual, None
        chosen = residual if indices is None else residual.index_select(0, indices)
        return residual, rmsnorm(chosen, self._following, eps)

    def _one_of_ranks(
        self,
        residual: torch.Tensor,
        x: torch.Tensor | Quantized | None,
        batch: Batch,
        indices: torch.Tensor | None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """What a projection adds is summed first, so norms are kernels of their own."""
        attention, mlp = self._attention, self._mlp
        if x is None:
            x = rmsnorm(residual, self._input_norm, self._eps)
        assert isinstance(x, torch.Tensor)
        q = attention.write(gemv(x, attention.input, None), batch)
        part = gemv(attention.attend(batch, q), attention.output, None)
        self._add_norm(residual, part[None], self._post_norm, None, x)
        if isinstance(mlp, FusedMixture):
            parts = mlp.parts(x)
        else:
            inner = residual.new_empty(1, mlp.inner)
            gemv(x, mlp.gate_up, inner, gated=True)
            parts = gemv(inner, mlp.down, None)[None]
        self._add_norm(residual, parts, self._following, None, x)
        return residual, x if indices is None else x.index_select(0, indices)

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
        weight = user.quantized if user is not None and not self._invariant else None
        if weight is not None and quantizes(weight, len(residual)):
            return quantize.add_norm(residual, parts, norm, self._eps, weight.codes.dtype, weight.block > 1)
        if parts is None:
            return rmsnorm(residual, norm, self._eps)
        if out is not None:
            add_norm(residual, parts, norm, out, self._eps)
            return out
        x: torch.Tensor = parts[0]
        fused_add_rmsnorm(x, residual, norm, self._eps)
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
            self._communicator.add_norm(residual, parts, norm, out, self._eps, bias)
            return out if user is None else _for(user, out)
        if bias is not None:
            add_norm(residual, parts, norm, out, self._eps, bias)
            return out
        return self._norm(residual, parts, norm, user, out=out)

    def _inner_of(self, gate_up: torch.Tensor, user: Linear) -> torch.Tensor | Quantized:
        """[tokens, 2 * inner] -> silu(gate) * up, as `user` takes it."""
        weight = None if self._invariant else user.quantized
        if weight is not None and quantizes(weight, len(gate_up)):
            return quantize.silu_and_mul(gate_up, weight.codes.dtype, weight.block > 1)
        inner: torch.Tensor = silu_and_mul(gate_up)
        return inner

    def _project(self, linear: Linear, x: torch.Tensor | Quantized) -> torch.Tensor:
        """[tokens, in] -> [tokens, out]"""
        if isinstance(x, Quantized):
            assert linear.quantized is not None
            return linear.summed(scaled_product(x, linear.quantized, self._dtype, linear.bias))
        return matmul(x, linear, None) if self._invariant else linear(x)


def _for(user: Linear, x: torch.Tensor) -> torch.Tensor | Quantized:
    """x [tokens, in] as `user` multiplies it."""
    weight = user.quantized
    return quantize_for(weight, x) if weight is not None and quantizes(weight, len(x)) else x
