"""Latent attention in torch, on every device: the reference of the others."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F

from baton.attention.base import AttentionRow
from baton.kvcache.pool import KvPool
from baton.layers.attention import AttentionOptions


class TorchLatentAttention:
    """Rows of one token in the absorbed form, all together; chunks in the plain form, one by one."""

    name = "torch-latent"
    features = frozenset({"scale", "latent"})

    @staticmethod
    def available(
        device: torch.device, dtype: torch.dtype | None = None, head_dim: int | None = None
    ) -> str | None:
        return None

    def __init__(self, pool: KvPool, num_heads: int, options: Sequence[AttentionOptions] = ()) -> None:
        self._pool = pool
        self._options = options
        self._rows: list[tuple[slice, int, torch.Tensor]] = []
        """Of each chunk: its tokens, keys of its last one, pages."""
        self._single = 0
        self._table = torch.empty(0)
        self._lengths = torch.empty(0)
        self._pages = self._offsets = torch.empty(0)
        """Of each token: where its latent is written."""

    def prepare(self, rows: Sequence[AttentionRow]) -> None:
        size = self._pool.layout.page_size
        places = [
            (row.pages[p // size], p % size) for row in rows for p in range(row.start, row.start + row.count)
        ]
        self._pages, self._offsets = self._tensor(places).unbind(1)
        self._single = sum(row.count == 1 for row in rows)
        singles = rows[: self._single]
        used = [row.start // size + 1 for row in singles]
        width = max(used, default=0)
        self._table = self._tensor(
            [[*row.pages[:n], *([row.pages[0]] * (width - n))] for row, n in zip(singles, used, strict=True)]
        )
        self._lengths = self._tensor([row.start + 1 for row in singles])
        self._rows = []
        first = self._single
        for row in rows[self._single :]:
            end = row.start + row.count
            pages = self._tensor(row.pages[: -(-end // size)])
            self._rows.append((slice(first, first + row.count), end, pages))
            first += row.count

    def forward(
        self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor
    ) -> None:
        """`k` and `v`: the latents with rotated keys, [tokens, 1, rank + rotated]."""
        latents, _ = self._pool.layer(layer)
        latents[self._pages, self._offsets] = k
        options = self._options[layer]
        projections, scale = options.latent, options.scale
        assert projections is not None and scale is not None
        if self._single:
            gathered = latents[self._table].flatten(1, 3).view(self._single, -1, k.shape[-1])
            positions = torch.arange(gathered.shape[1], device=k.device)
            beyond = positions >= self._lengths[:, None]
            gathered = gathered.masked_fill(beyond[..., None], 0.0)  # unwritten memory may hold NaN
            absorbed = projections.absorb(q[: self._single])
            scores = torch.einsum("nhr,ntr->nht", absorbed, gathered).float() * scale
            weights = scores.masked_fill(beyond[:, None], -torch.inf).softmax(-1).to(k.dtype)
            attended = torch.einsum("nht,ntr->nhr", weights, gathered[..., : projections.rank])
            out[: self._single] = projections.project(attended)
        for tokens, end, pages in self._rows:
            keys, values = projections.expand(latents[pages].flatten(0, 2)[:end])
            count = tokens.stop - tokens.start
            mask = torch.ones(count, end, dtype=torch.bool, device=k.device).tril(end - count)
            result = F.scaled_dot_product_attention(
                q[tokens].transpose(0, 1),
                keys.transpose(0, 1),
                values.transpose(0, 1),
                attn_mask=mask,
                scale=scale,
            )
            out[tokens] = result.transpose(0, 1)

    def _tensor(self, values: Sequence[object]) -> torch.Tensor:
        return torch.tensor(values, device=self._pool.device)
