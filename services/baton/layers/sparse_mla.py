"""Sparse attention over latents: DeepSeek-AI, DeepSeek-V3.2-Exp (DeepSeek Sparse Attention).

An indexer of small heads scores all positions that a token sees, by the sum over heads of
weight * relu(query * key); the token attends to the best of them alone. A position's index key lies behind
its latent, in the same page.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from baton.layers.batch import Batch
from baton.layers.cache_spec import Latent
from baton.layers.mla import MlaAttention, MlaShape
from baton.layers.norm import LayerNorm
from baton.layers.parameters import Parameters
from baton.layers.rope import Rope, apply_rope

_NORM_EPS = 1e-6


@dataclass(frozen=True, slots=True)
class IndexShape:
    """Sizes of an indexer."""

    heads: int
    head_dim: int
    top_k: int
    """Positions that a token attends to, at most."""
    interleaved: bool
    """The checkpoint's rotation of index heads pairs neighbours."""


class Indexer:
    """Queries, weights and keys by which positions are scored. All ranks have all its heads."""

    def __init__(self, parameters: Parameters, hidden: int, query_rank: int, shape: IndexShape) -> None:
        self._shape = shape
        self._queries = parameters.linear({"wq_b": shape.heads * shape.head_dim}, query_rank)
        self._keys = parameters.linear({"wk": shape.head_dim}, hidden)
        self._norm = LayerNorm(parameters, "k_norm", shape.head_dim, _NORM_EPS)
        float32 = replace(parameters, dtype=torch.float32)
        self._weights = float32.linear({"weights_proj": shape.heads}, hidden, quantize=False)

    def __call__(
        self, x: torch.Tensor, query_latents: torch.Tensor, rotation: tuple[torch.Tensor, torch.Tensor]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """x [tokens, hidden], query_latents [tokens, query_rank] -> queries with their weights, float32
        [tokens, heads, head_dim + 1], and keys [tokens, 1, head_dim]"""
        shape = self._shape
        q = self._rotate(self._queries(query_latents).view(len(x), shape.heads, -1), rotation)
        key = self._rotate(self._norm(self._keys(x))[:, None], rotation)
        weights = self._weights(x.float()) * (shape.heads * shape.head_dim) ** -0.5
        return torch.cat((q.float(), weights[..., None]), -1), key

    def _rotate(self, x: torch.Tensor, rotation: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        if self._shape.interleaved:  # products do not change when both factors are reordered
            dim = rotation[0].shape[-1]
            x = torch.cat((x[..., 0:dim:2], x[..., 1:dim:2], x[..., dim:]), -1)
        return apply_rope(x, *rotation)


class SparseMlaAttention(MlaAttention):
    """A layer that chooses positions by an indexer of its own, or takes those of the layer before it."""

    def __init__(
        self,
        parameters: Parameters,
        index: int,
        hidden: int,
        shape: MlaShape,
        rope: Rope,
        scale: float,
        index_shape: IndexShape,
        *,
        shared: bool,
        bias: bool = False,
    ) -> None:
        """`shared`: it has no indexer."""
        assert shape.query_rank is not None
        super().__init__(parameters, index, hidden, shape, rope, scale, bias=bias)
        self.cache = Latent(head_dim=shape.rank + shape.rotated + index_shape.head_dim)
        self.options = replace(self.options, top_k=index_shape.top_k)
        self._key_size = index_shape.head_dim
        self._indexer = None
        if not shared:
            self._indexer = Indexer(parameters.under("indexer"), hidden, shape.query_rank, index_shape)

    def _attend(self, x: torch.Tensor, batch: Batch) -> torch.Tensor:
        projected = self.input(x)
        q, latent, _ = self.split(projected, batch)
        index, key = latent[..., :0], latent.new_zeros(len(x), 1, self._key_size)
        if self._indexer is not None:
            assert self.query_norm is not None
            query_latents = self.query_norm(projected[:, : self._queries])
            index, key = self._indexer(x, query_latents, batch.rotation(self.rope))
        return batch.attention.write_and_attend(self.index, q, torch.cat((latent, key), -1), index)
