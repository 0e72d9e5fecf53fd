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
from baton.layers.kernels.gemm import MOST_ROWS, add_norm, fits, gated, project_parts
from baton.layers.kernels.gemv import gemv
from baton.layers.kernels.matmul import matmul
from baton.layers.kernels.norm import fused_add_rmsnorm, rmsnorm
from baton.layers.kernels.qkv import write_qkv
from baton.layers.linear import Linear
from baton.layers.mlp import GatedMlp
from baton.models.body import Attend
from baton.models.decoder import Decoder, DecoderLayer, plain_layers
from baton.models.fused_mixture import FusedMixture


@dataclass(slots=True)
class _Weights:
    """Of one layer."""

    input_norm: torch.Tensor
    qkv: Linear
    qk_norm: torch.Tensor | None
    output: Linear
    post_norm: torch.Tensor
    feed_forward: GatedMlp | FusedMixture

    @staticmethod
    def of(layer: DecoderLayer, invariant: bool) -> _Weights:
        attention, feed_forward = layer.attention, layer.feed_forward
        assert isinstance(attention, Attention) and isinstance(feed_forward, GatedMlp | Mixture)
        return _Weights(
            layer.input_norm.weight,
            attention.qkv,
            attention.qk_norm,
            attention.output,
            layer.post_norm.weight,
            feed_forward if isinstance(feed_forward, GatedMlp) else FusedMixture(feed_forward, invariant),
        )


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
        self._tables = tables
        self._caches = [pool.pages[:, :, index] for index in range(pool.layout.num_layers)]
        layers = plain_layers(model)
        assert layers is not None
        rope = layers[0].attention.rope
        assert rope is not None
        self._layers = [_Weights.of(layer, invariant) for layer in layers]
        dense = [w.feed_forward for w in self._layers if isinstance(w.feed_forward, GatedMlp)]
        self._inner = max((mlp.inner for mlp in dense), default=0)
        self._rope = rope.halves(context_length, model.device)
        linears = [w.output for w in self._layers]
        linears += [linear for mlp in dense for linear in (mlp.gate_up, mlp.down)]
        self._few = not invariant and all(fits(linear) for linear in linears)

    def forward(
        self,
        tokens: torch.Tensor,
        positions: torch.Tensor,
        slots: torch.Tensor,
        attend: Attend,
        wanted: torch.Tensor | None = None,
        *,
        decode: bool = False,
    ) -> torch.Tensor:
        """What follows the last layer's attention is not computed for tokens that are not wanted."""
        config, model = self.model.config, self.model
        heads, dim, eps = config.num_heads, config.head_dim, config.rms_norm_eps
        residual = F.embedding(tokens, model.embedding)
        if tokens.shape[0] == 1 and not self._invariant:
            return self._forward_one(residual, positions, slots, attend, wanted)
        if decode and self._few and tokens.shape[0] <= MOST_ROWS:
            return self._forward_few(residual, positions, slots, attend, wanted)
        norms = [w.input_norm for w in self._layers[1:]] + [model.norm.weight]
        x = rmsnorm(residual, self._layers[0].input_norm, eps)
        for index, (w, following) in enumerate(zip(self._layers, norms, strict=True)):
            qkv = self._project(w.qkv, x)
            self._write(index, qkv, positions, slots)
            if wanted is not None and following is model.norm.weight and not wanted.shape[0]:
                return x[:0]
            q = qkv.view(tokens.shape[0], -1, dim)[:, :heads]
            attended = torch.empty(tokens.shape[0], heads, dim, dtype=x.dtype, device=x.device)
            attend(index, q, attended)
            attended = attended.flatten(1)
            if wanted is not None and following is model.norm.weight:
                attended, residual = (part.index_select(0, wanted) for part in (attended, residual))
            x = self._project(w.output, attended)
            fused_add_rmsnorm(x, residual, w.post_norm, eps)
            mlp = w.feed_forward
            if isinstance(mlp, FusedMixture):
                add_norm(residual, mlp.parts(x), following, x, eps)
            else:
                x = self._project(mlp.down, silu_and_mul(self._project(mlp.gate_up, x)))
                fused_add_rmsnorm(x, residual, following, eps)
        return x

    def _write(self, index: int, qkv: torch.Tensor, positions: torch.Tensor, slots: torch.Tensor) -> None:
        """Normalizes and rotates a layer's queries and keys; writes keys and values into the pool."""
        config, norm = self.model.config, self._layers[index].qk_norm
        write_qkv(
            qkv,
            norm,
            self._rope,
            positions,
            slots,
            self._tables,
            self._caches[index],
            config.num_heads,
            config.rms_norm_eps,
        )

    def _forward_few(
        self,
        residual: torch.Tensor,
        positions: torch.Tensor,
        slots: torch.Tensor,
        attend: Attend,
        wanted: torch.Tensor | None,
    ) -> torch.Tensor:
        """The same for a few rows of one token; `residual` [tokens, hidden] is their embedding."""
        config, model = self.model.config, self.model
        heads, dim, eps = config.num_heads, config.head_dim, config.rms_norm_eps
        norms = [w.input_norm for w in self._layers[1:]] + [model.norm.weight]
        x = rmsnorm(residual, self._layers[0].input_norm, eps)
        attended = residual.new_empty(residual.shape[0], heads, dim)
        for index, (w, following) in enumerate(zip(self._layers, norms, strict=True)):
            qkv = w.qkv(x)
            self._write(index, qkv, positions, slots)
            attend(index, qkv.view(residual.shape[0], -1, dim)[:, :heads], attended)
            add_norm(residual, project_parts(attended.flatten(1), w.output), w.post_norm, x, eps)
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
        attend: Attend,
        wanted: torch.Tensor | None,
    ) -> torch.Tensor:
        """The same for one token, of which `residual` [1, hidden] is the embedding."""
        config, model = self.model.config, self.model
        heads, kv_heads, dim = config.num_heads, config.num_kv_heads, config.head_dim
        eps = config.rms_norm_eps
        qkv, inner = (residual.new_empty(1, size) for size in ((heads + 2 * kv_heads) * dim, self._inner))
        attended = residual.new_empty(1, heads, dim)
        for index, w in enumerate(self._layers):
            gemv(residual, w.qkv, qkv, norm=w.input_norm, eps=eps)
            self._write(index, qkv, positions, slots)
            attend(index, qkv.view(1, -1, dim)[:, :heads], attended)
            gemv(attended.flatten(1), w.output, residual, add=True)
            mlp = w.feed_forward
            if isinstance(mlp, FusedMixture):
                mlp.add_one(residual, w.post_norm, eps)
            else:
                gemv(residual, mlp.gate_up, inner, norm=w.post_norm, eps=eps, gated=True)
                gemv(inner, mlp.down, residual, add=True)
        if wanted is not None:
            residual = residual.index_select(0, wanted)
        return rmsnorm(residual, model.norm.weight, eps)
