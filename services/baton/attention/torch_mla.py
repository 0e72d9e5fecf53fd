"""Latent attention in torch, on every device: the reference of the others."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F

from baton.attention.base import AttentionRows, SeenRow, seen_rows
from baton.kvcache.kv_pool import KvPool
from baton.layers.attention import AttentionOptions


class TorchMlaAttention:
    """Rows of one token in the absorbed form, all together; chunks one by one, in the cheaper form."""

    name = "torch-mla"
    features = frozenset({"scale", "latent", "states", "top_k"})

    @staticmethod
    def available(
        device: torch.device, dtype: torch.dtype | None = None, head_dim: int | None = None
    ) -> str | None:
        return None

    def __init__(
        self, pool: KvPool, num_heads: int, options: Sequence[AttentionOptions] = (), group: int = 0
    ) -> None:
        self._pool = pool
        self._group = group
        self._options = options
        self._rows: list[tuple[slice, int, torch.Tensor]] = []
        """For each chunk its tokens, keys of its last one, pages."""
        self._single = 0
        self._table = torch.empty(0)
        self._lengths = torch.empty(0)
        self._pages = self._offsets = torch.empty(0)
        """For each token, where its latent is written."""
        self._hidden: dict[int, torch.Tensor] = {}
        """By a row's first token: what its tokens do not attend to, by the last layer that has chosen. The
        rows of one token have the entry -1."""

    def plan(self, rows: AttentionRows) -> None:
        self._hidden.clear()
        self._plan(seen_rows(rows, self._group, self._pool.layout.page_size, None))

    def _plan(self, rows: Sequence[SeenRow]) -> None:
        size = self._pool.layout.page_size
        locations = [
            (row.pages[p // size], p % size) for row in rows for p in range(row.start, row.start + row.tokens)
        ]
        self._pages, self._offsets = self._tensor(locations).unbind(1)
        self._single = sum(row.tokens == 1 for row in rows)
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
            end = row.start + row.tokens
            pages = self._tensor(row.pages[: -(-end // size)])
            self._rows.append((slice(first, first + row.tokens), end, pages))
            first += row.tokens

    def forward(
        self,
        layer: int,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        out: torch.Tensor,
        rows: AttentionRows,
    ) -> None:
        """`k`: the latents with rotated keys, [tokens, 1, rank + rotated], of a sparse layer with index keys
        behind them; `v` of a sparse layer: what `sparse_mla.Indexer` makes of queries, empty if the layer
        before has chosen."""
        latents, _ = self._pool.layer(layer)
        latents[self._pages, self._offsets] = k
        options = self._options[layer]
        projections = options.latent
        assert projections is not None
        width = q.shape[2] - projections.keys.shape[1] + projections.rank
        if self._single:
            gathered = latents[self._table].flatten(1, 3).view(self._single, -1, k.shape[-1])
            positions = torch.arange(gathered.shape[1], device=k.device)
            beyond = (positions >= self._lengths[:, None])[:, None]
            gathered = gathered.masked_fill(beyond.transpose(1, 2), 0.0)  # unwritten memory may hold NaN
            top_k = options.top_k or gathered.shape[1]
            if gathered.shape[1] > top_k:
                beyond = self._sparse(-1, v[: self._single, None], gathered[..., width:], beyond, top_k)
            out[: self._single] = _absorbed(q[: self._single, None], gathered[..., :width], beyond, options)
        for tokens, end, pages in self._rows:
            cached = latents[pages].flatten(0, 2)[None, :end]
            count, top_k = tokens.stop - tokens.start, options.top_k or end
            absorbed = projections.cheaper_absorbed(count, end, q.shape[2])
            hidden: torch.Tensor | None = None
            if absorbed or count < end or end > top_k:
                hidden = torch.ones(1, count, end, dtype=torch.bool, device=k.device).triu(end - count + 1)
                if end > top_k:
                    hidden = self._sparse(tokens.start, v[None, tokens], cached[..., width:], hidden, top_k)
            if absorbed and hidden is not None:
                out[tokens] = _absorbed(q[None, tokens], cached[..., :width], hidden, options)
            else:
                out[tokens] = _plain(q[tokens], cached[0, :, :width], hidden, options)

    def _sparse(
        self, row: int, index: torch.Tensor, keys: torch.Tensor, hidden: torch.Tensor, top_k: int
    ) -> torch.Tensor:
        """`hidden`, with all that has not been chosen: by this layer, or where `index` is empty by the last
        one that chose. row: a key of `_hidden`."""
        if index.shape[-1]:
            self._hidden[row] = hidden | _not_chosen(index, keys.float(), hidden, top_k)
        return self._hidden[row]

    def _tensor(self, values: Sequence[object]) -> torch.Tensor:
        return torch.tensor(values, device=self._pool.device)


def _absorbed(
    q: torch.Tensor, latents: torch.Tensor, hidden: torch.Tensor, options: AttentionOptions
) -> torch.Tensor:
    """q [rows, tokens, heads, plain + rotated], latents [rows, keys, rank + rotated], hidden bool
    [rows, tokens, keys] -> [rows * tokens, heads, value]"""
    projections = options.latent
    assert projections is not None and options.scale is not None
    rows, tokens, heads, _ = q.shape
    absorbed = projections.absorb(q.flatten(0, 1)).view(rows, tokens * heads, -1)
    scores = (absorbed @ latents.transpose(1, 2)).float() * options.scale
    scores = scores.view(rows, tokens, heads, -1).masked_fill_(hidden[:, :, None], -torch.inf)
    weights = scores.softmax(-1).to(latents.dtype).view(rows, tokens * heads, -1)
    attended = weights @ latents[..., : projections.rank]
    return projections.project(attended.view(rows * tokens, heads, -1))


def _not_chosen(index: torch.Tensor, keys: torch.Tensor, hidden: torch.Tensor, top_k: int) -> torch.Tensor:
    """index [rows, tokens, heads, dim + 1] float32: queries, each with its weight; keys [rows, keys, dim],
    hidden bool [rows, tokens, keys] -> bool [rows, tokens, keys]: all but the `top_k` best, of equals the
    earlier."""
    scores = keys.new_zeros(hidden.shape)
    for head in index.unbind(2):  # one by one: the scores of all heads would fill memory
        scores += head[..., -1:] * (head[..., :-1] @ keys.transpose(1, 2)).relu_()
    scores.masked_fill_(hidden, -torch.inf)
    best = scores.sort(dim=-1, descending=True, stable=True).indices[..., :top_k]
    return torch.ones_like(hidden).scatter_(-1, best, False)


def _plain(
    q: torch.Tensor, latents: torch.Tensor, hidden: torch.Tensor | None, options: AttentionOptions
) -> torch.Tensor:
    """q [tokens, heads, plain + rotated], latents [keys, rank + rotated], those of the tokens last, hidden
    bool [1, tokens, keys], None: as many tokens as keys, and each sees all up to its own ->
    [tokens, heads, value]"""
    assert options.latent is not None
    keys, values = options.latent.expand(latents)
    dim, width = q.shape[2], values.shape[2]
    mask = None
    if hidden is not None:
        mask = q.new_zeros(hidden.shape[1:]).masked_fill_(hidden[0], -torch.inf)
    # Of one size, because torch's flash attention takes no others; without it scores would fill memory.
    values = F.pad(values, (0, max(0, dim - width)))
    q, keys, values = (x.transpose(0, 1)[None] for x in (q, keys, values))
    result = F.scaled_dot_product_attention(
        q, keys, values, attn_mask=mask, is_causal=mask is None, scale=options.scale
    )
    return result[0].transpose(0, 1)[..., :width]
