"""The decoder's forward pass on a GPU's kernels: the same function as `Model.forward`, in fewer launches.

A layer: fused add and norm, projection, head norms with rotation and KV write, attention, projection, fused
add and norm, projection, SiLU and product, projection. For a few rows of one token: projections that gate
what they write, or leave it to the norm in parts. For one token: projections that norm what they read and
gate or add what they write. Instead of a gated layer there may be a mixture of experts (`fused_mixture`).
Needs a GPU: import it where one is in use.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from sgl_kernel import silu_and_mul

from baton.kvcache.pool import KvPool
from baton.layers.attention import Attention
from baton.layers.experts import Mixture
from baton.layers.forward_batch import AttendPages
from baton.layers.kernels.gemm import MOST_ROWS, add_norm, fits, gated, project_parts
from baton.layers.kernels.gemv import gemv
from baton.layers.kernels.matmul import matmul
from baton.layers.kernels.norm import fused_add_rmsnorm, rmsnorm
from baton.layers.latent_attention import LatentAttention
from baton.layers.linear import Linear
from baton.layers.mlp import GatedMlp
from baton.models.decoder import Decoder, plain_layers
from baton.models.fused_mixture import FusedMixture


@dataclass(slots=True)
class _Weights:
    """Of one layer."""

    input_norm: torch.Tensor
    attention: Attention | LatentAttention
    cache: torch.Tensor
    """Its pages."""
    post_norm: torch.Tensor
    feed_forward: GatedMlp | FusedMixture


class FusedDecoder:
    """Implements `body.Body`."""

    def __init__(
        self,
        model: Decoder,
        pool: KvPool,
        tables: torch.Tensor,
        context_length: int,
        invariant: bool = False,
    ) -> None:
        """`model`: of plain layers. `tables`: int32 [slots, pages]; `context_length`: positions that will be
        used. `invariant`: a token is computed in the same order whatever else is in the step; slower."""
        self.model = model
        self._invariant = invariant
        layers = plain_layers(model)
        assert layers is not None
        rope = layers[0].attention.rope
        assert rope is not None
        self._tables, self._rope = tables, rope.halves(context_length, model.device)
        self._layers: list[_Weights] = []
        for index, layer in enumerate(layers):
            attention, mlp = layer.attention, layer.feed_forward
            assert isinstance(attention, Attention | LatentAttention) and isinstance(mlp, GatedMlp | Mixture)
            self._layers.append(
                _Weights(
                    layer.input_norm.weight,
                    attention,
                    pool.pages[:, :, index],
                    layer.post_norm.weight,
                    mlp if isinstance(mlp, GatedMlp) else FusedMixture(mlp, invariant),
                )
            )
        dense = [w.feed_forward for w in self._layers if isinstance(w.feed_forward, GatedMlp)]
        self._inner = max((mlp.inner for mlp in dense), default=0)
        linears = [w.attention.output for w in self._layers]
        linears += [linear for mlp in dense for linear in (mlp.gate_up, mlp.down)]
        self._few = not invariant and all(fits(linear) for linear in linears)

    def forward(
        self,
        tokens: torch.Tensor,
        positions: torch.Tensor,
        slots: torch.Tensor,
        attend: AttendPages,
        wanted: torch.Tensor | None = None,
        *,
        decode: bool = False,
    ) -> torch.Tensor:
        """What follows the last layer's attention is not computed for tokens that are not wanted."""
        model, eps = self.model, self.model.config.rms_norm_eps
        residual = F.embedding(tokens, model.embedding)
        if tokens.shape[0] == 1 and not self._invariant:
            return self._forward_one(residual, positions, slots, attend, wanted)
        if decode and self._few and tokens.shape[0] <= MOST_ROWS:
            return self._forward_few(residual, positions, slots, attend, wanted)
        norms = [w.input_norm for w in self._layers[1:]] + [model.norm.weight]
        x = rmsnorm(residual, self._layers[0].input_norm, eps)
        for w, following in zip(self._layers, norms, strict=True):
            attention = w.attention
            projected = self._project(attention.input, x)
            q = attention.write(projected, positions, slots, self._tables, w.cache, self._rope)
            if wanted is not None and following is model.norm.weight and not wanted.shape[0]:
                return x[:0]
            attended = attention.attend(attend, q)
            if wanted is not None and following is model.norm.weight:
                attended, residual = (part.index_select(0, wanted) for part in (attended, residual))
            x = self._project(attention.output, attended)
            fused_add_rmsnorm(x, residual, w.post_norm, eps)
            mlp = w.feed_forward
            if isinstance(mlp, FusedMixture):
                add_norm(residual, mlp.parts(x), following, x, eps)
            else:
                x = self._project(mlp.down, silu_and_mul(self._project(mlp.gate_up, x)))
                fused_add_rmsnorm(x, residual, following, eps)
        return x

    def _forward_few(
        self,
        residual: torch.Tensor,
        positions: torch.Tensor,
        slots: torch.Tensor,
        attend: AttendPages,
        wanted: torch.Tensor | None,
    ) -> torch.Tensor:
        """The same for a few rows of one token; `residual` [tokens, hidden] is their embedding."""
        model, eps = self.model, self.model.config.rms_norm_eps
        norms = [w.input_norm for w in self._layers[1:]] + [model.norm.weight]
        x = rmsnorm(residual, self._layers[0].input_norm, eps)
        for w, following in zip(self._layers, norms, strict=True):
            attention = w.attention
            q = attention.write(attention.input(x), positions, slots, self._tables, w.cache, self._rope)
            attended = attention.attend(attend, q)
            add_norm(residual, project_parts(attended, attention.output), w.post_norm, x, eps)
            mlp = w.feed_forward
            if isinstance(mlp, FusedMixture):
                parts = mlp.parts(x)
            else:
                inner = gated(x, mlp.gate_up)
                if inner is None:
                    inner = silu_and_mul(mlp.gate_up(x))
                parts = project_parts(inner, mlp.down)
            add_norm(residual, parts, following, x, eps)
        return x if wanted is None else x.index_select(0, wanted)

    def logits(self, hidden: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        return self._project(self.model.head, hidden, out)

    def _project(self, linear: Linear, x: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        """[rows, in] -> [rows, out], into `out` if given, which is for layers without bias."""
        if self._invariant:
            return matmul(x, linear, out)
        if out is None:
            return linear(x)
        linear.into(x, out)
        return out

    def _forward_one(
        self,
        residual: torch.Tensor,
        positions: torch.Tensor,
        slots: torch.Tensor,
        attend: AttendPages,
        wanted: torch.Tensor | None,
    ) -> torch.Tensor:
        """The same for one token, of which `residual` [1, hidden] is the embedding."""
        model, eps = self.model, self.model.config.rms_norm_eps
        inner = residual.new_empty(1, self._inner)
        for w in self._layers:
            attention = w.attention
            projected = gemv(residual, attention.input, None, norm=w.input_norm, eps=eps)
            q = attention.write(projected, positions, slots, self._tables, w.cache, self._rope)
            attended = attention.attend(attend, q)
            gemv(attended, attention.output, residual, add=True)
            mlp = w.feed_forward
            if isinstance(mlp, FusedMixture):
                mlp.add_one(residual, w.post_norm, eps)
            else:
                gemv(residual, mlp.gate_up, inner, norm=w.post_norm, eps=eps, gated=True)
                gemv(inner, mlp.down, residual, add=True)
        if wanted is not None:
            residual = residual.index_select(0, wanted)
        return rmsnorm(residual, model.norm.weight, eps)
