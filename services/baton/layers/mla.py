"""Multi-head latent attention: DeepSeek-AI, DeepSeek-V2, arXiv:2405.04434.

The KV of a token is one latent vector and one rotated key, which all heads share. Two forms give the same
result. Plain: each head's keys and values are projected from the latents (`expand`). Absorbed: queries are
projected to the latents instead (`absorb`), which then serve as keys and as values of all heads (`project`);
that reads far less for a query that attends to many positions.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from baton.layers.attention import AttentionOptions, WritingAttention
from baton.layers.batch import Batch
from baton.layers.cache_spec import Latent
from baton.layers.norm import RmsNorm
from baton.layers.parameters import Parameters
from baton.layers.rope import Rope, apply_rope, half_split
from baton.layers.tensor_parallel import times

_NORM_EPS = 1e-6
"""Epsilon of the latents' norms; config.json does not name it."""


@dataclass(frozen=True, slots=True)
class MlaShape:
    """Sizes of one layer."""

    heads: int
    query_rank: int | None
    """Rank of the queries' own latent; None: they have none."""
    rank: int
    """Rank of the latent of keys and values."""
    plain: int
    """Values of a head's query and key that are not rotated."""
    rotated: int
    """Values of a head that are rotated."""
    value: int
    """Size of a head's values."""


@dataclass(frozen=True, slots=True)
class MlaProjections:
    """From latents to each head's keys and values."""

    keys: torch.Tensor
    """[heads, plain, rank]"""
    values: torch.Tensor
    """[heads, value, rank]"""

    @property
    def rank(self) -> int:
        return self.keys.shape[2]

    @property
    def value_dim(self) -> int:
        return self.values.shape[1]

    def cheaper_absorbed(self, tokens: int, keys: int, query_dim: int) -> bool:
        """Whether the absorbed form takes fewer multiplications: where few tokens attend to many keys, which
        the plain form would all project (DeepSeek's sizes: fewer than about 170). `query_dim`: plain +
        rotated."""
        projected = self.rank * (self.keys.shape[1] + self.value_dim)
        latent = 2 * self.rank + query_dim - self.keys.shape[1]
        plain = keys * projected + tokens * keys * (query_dim + self.value_dim)
        return tokens * projected + tokens * keys * latent < plain

    def absorb(self, q: torch.Tensor) -> torch.Tensor:
        """[tokens, heads, plain + rotated] -> [tokens, heads, rank + rotated]: the scores' other factors are
        latents with rotated keys"""
        plain = self.keys.shape[1]
        return torch.cat((torch.einsum("thd,hdr->thr", q[..., :plain], self.keys), q[..., plain:]), -1)

    def project(self, attended: torch.Tensor) -> torch.Tensor:
        """Weighted latents [tokens, heads, rank] -> [tokens, heads, value]"""
        return torch.einsum("thr,hvr->thv", attended, self.values)

    def expand(self, latents: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Latents with rotated keys [tokens, rank + rotated] -> keys [tokens, heads, plain + rotated] and
        values [tokens, heads, value]"""
        heads, rank = self.keys.shape[0], self.rank
        keys = torch.einsum("tr,hdr->thd", latents[:, :rank], self.keys)
        rotated = latents[:, None, rank:].expand(-1, heads, -1)
        return torch.cat((keys, rotated), -1), torch.einsum("tr,hvr->thv", latents[:, :rank], self.values)


class MlaAttention(WritingAttention):
    """Projections to and from latents, rotation, attention over the paged pool, output projection."""

    def __init__(
        self,
        parameters: Parameters,
        index: int,
        hidden: int,
        shape: MlaShape,
        rope: Rope,
        scale: float,
        *,
        bias: bool = False,
        interleaved: bool = True,
    ) -> None:
        """`interleaved`: the checkpoint's rotation pairs neighbours."""
        head_range = parameters.shard.split(shape.heads, "attention heads")
        self.shape = replace(shape, heads=head_range[1])
        """Shape with the heads of this rank."""
        self.index, self.rope = index, rope
        self.cache = Latent(head_dim=shape.rank + shape.rotated)
        size, latent = shape.plain + shape.rotated, shape.rank + shape.rotated
        down, convert = {"kv_a_proj_with_mqa": latent}, {}
        if interleaved:
            convert = dict.fromkeys(("q_proj", "q_b_proj"), half_split(size, shape.plain))
            convert["kv_a_proj_with_mqa"] = half_split(latent, shape.rank)
        rows = {name: [times(head_range, size)] for name in ("q_proj", "q_b_proj")}
        self.query_norm: RmsNorm | None = None
        if shape.query_rank is None:
            down = {"q_proj": shape.heads * size, **down}
        else:
            down = {"q_a_proj": shape.query_rank, **down}
            self.query_norm = RmsNorm(parameters, "q_a_layernorm", shape.query_rank, _NORM_EPS)
            up = {"q_b_proj": shape.heads * size}
            self.query_up = parameters.linear(up, shape.query_rank, convert=convert, rows=rows)
        self._queries = shape.query_rank or head_range[1] * size
        self.input = parameters.linear(down, hidden, bias, convert, rows=rows)
        self.latent_norm = RmsNorm(parameters, "kv_a_layernorm", shape.rank, _NORM_EPS)
        up_size = shape.plain + shape.value
        cut = parameters.shard.cut(0, times(head_range, up_size))
        whole = parameters.tensor("kv_b_proj.weight", shape.heads * up_size, shape.rank, cut=cut)
        up_projection = whole.view(self.shape.heads, -1, shape.rank)
        self.options = AttentionOptions(
            scale=scale,
            latent=MlaProjections(up_projection[:, : shape.plain], up_projection[:, shape.plain :]),
        )
        self.output = parameters.linear(
            {"o_proj": hidden}, shape.heads * shape.value, bias, columns=times(head_range, shape.value)
        )

    def split(self, projected: torch.Tensor, batch: Batch) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        shape = self.shape
        q, latents, key = torch.split(projected, [self._queries, shape.rank, shape.rotated], -1)
        if self.query_norm is not None:
            q = self.query_up(self.query_norm(q))
        q = q.reshape(len(q), shape.heads, -1)
        rotation = batch.rotation(self.rope)
        q = torch.cat((q[..., : shape.plain], apply_rope(q[..., shape.plain :], *rotation)), -1)
        key = apply_rope(key[:, None], *rotation)
        latent = torch.cat((self.latent_norm(latents)[:, None], key), -1)
        return q, latent, latent

    def write(self, projected: torch.Tensor, batch: Batch) -> torch.Tensor:
        """Rotates and absorbs queries, normalizes and writes latents in one kernel. -> absorbed queries
        [tokens, heads, rank + rotated]"""
        from baton.layers.kernels.mla_projections import absorb

        latent, norm = self.options.latent, self.latent_norm
        assert latent is not None
        q, latents = projected[:, : self._queries], projected[:, self._queries :]
        if self.query_norm is not None:
            q = self.query_up(self.query_norm(q))
        positions, slots, _, cache = batch.where(self.index)
        where = self.rope.kernel_table, positions, slots, cache.tables, cache.pages[:, 0, 0]
        return absorb(q, latents, latent.keys, norm.weight, *where, norm.eps)

    def attend(self, batch: Batch, q: torch.Tensor) -> torch.Tensor:
        from baton.layers.kernels.mla_projections import project

        shape, latent = self.shape, self.options.latent
        assert latent is not None
        attended = q.new_empty(len(q), shape.heads, shape.rank)
        batch.attention.attend(self.index, q, attended)
        values = q.new_empty(len(q), shape.heads, shape.value)
        project(attended, latent.values, values)
        return values.flatten(1)
