"""Latent attention on GPUs: kernels over latent pages, in the absorbed form.

`attend` takes absorbed queries and gives weighted latents (`layers.mla`); `forward` does the
whole.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

from baton.attention.base import AttentionRows
from baton.attention.fa3 import Fa3Attention
from baton.attention.paged import PagedAttention
from baton.attention.triton_paged import TritonAttention
from baton.kvcache.kv_pool import KvPool
from baton.layers.attention import AttentionOptions

_RANK, _ROTATED = 512, 64
"""The sizes of every DeepSeek model."""
_FA3_PAGE = 32
"""Most tokens of a page as FA3 sees it; a page of the pool is several of them. For pages of 64 it takes its
TMA kernels, which did not launch ("unknown error") where this was measured."""
_PROGRAMS = 132
_MOST_SPLITS = 32


class MlaPagedAttention(PagedAttention):
    """Base: `forward` absorbs the queries, writes the latents, and projects what `attend` gives."""

    features = frozenset({"scale", "latent"})

    @staticmethod
    def _problem(
        base: type[PagedAttention], device: torch.device, dtype: torch.dtype | None, head_dim: int | None
    ) -> str | None:
        if (problem := base.available(device, dtype)) is not None:
            return problem
        if head_dim not in (None, _RANK + _ROTATED):
            return f"has no kernel for latents of {head_dim} values, only of {_RANK + _ROTATED}"
        return None

    def __init__(
        self, pool: KvPool, num_heads: int, options: Sequence[AttentionOptions] = (), group: int = 0
    ) -> None:
        super().__init__(pool, num_heads, options, group)
        self._caches = [keys.squeeze(2) for keys, _ in self._layers]
        """Latents of each layer: [pages, page_size, rank + rotated]."""
        self._scales = [each.scale or 0.0 for each in self._options]
        projections = self._options[0].latent
        self._rank = _RANK if projections is None else projections.rank

    def forward(
        self,
        layer: int,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        out: torch.Tensor,
        rows: AttentionRows,
    ) -> None:
        """`k` and `v`: the latents with rotated keys, [tokens, 1, rank + rotated]."""
        projections = self._options[layer].latent
        assert projections is not None
        self._pool.vectors.index_copy_(0, self._written(rows) + layer * self._layout.page_size, k.squeeze(1))
        attended = q.new_empty(*q.shape[:2], projections.rank)
        self.attend(layer, projections.absorb(q), attended, rows)
        out.copy_(projections.project(attended))


class TritonMlaAttention(MlaPagedAttention):
    """Baton's own kernel. Reads nothing behind a row's end."""

    name = "triton-mla"

    @staticmethod
    def available(
        device: torch.device, dtype: torch.dtype | None = None, head_dim: int | None = None
    ) -> str | None:
        return MlaPagedAttention._problem(TritonAttention, device, dtype, head_dim)

    def __init__(
        self, pool: KvPool, num_heads: int, options: Sequence[AttentionOptions] = (), group: int = 0
    ) -> None:
        from baton.layers.kernels import mla_attention

        super().__init__(pool, num_heads, options, group)
        self._kernels = mla_attention
        self._pdl = torch.cuda.get_device_capability(pool.device) >= (9, 0)

    def plan(self, rows: AttentionRows) -> None:
        """Scratch for the parts of rows of one token."""
        if rows.starts is not None:
            return
        count, heads = rows.keys.shape[0], self._num_heads
        groups = -(-heads // 64)
        splits = max(1, min(_MOST_SPLITS, 2 * _PROGRAMS // (count * groups)))
        if splits > 1:
            device = self._pool.device
            rows.plans[self._group] = (
                torch.empty(splits, count, heads, self._rank, dtype=torch.float32, device=device),
                torch.empty(splits, count, heads, dtype=torch.float32, device=device),
            )

    def attend(self, layer: int, q: torch.Tensor, out: torch.Tensor, rows: AttentionRows) -> None:
        cache, scale = self._caches[layer], self._scales[layer]
        partial, sums = rows.plans.get(self._group) or (out, None)
        self._kernels.attend(
            q, cache, rows.tables[self._group], rows.keys, rows.starts, partial, scale, sums, pdl=self._pdl
        )
        if sums is not None:
            self._kernels.merge(partial, sums, out, pdl=self._pdl)


class Fa3MlaAttention(MlaPagedAttention):
    """FlashAttention-3 with a latent part of queries (`qv`), whose keys are the values. The pool must not
    hold NaN."""

    name = "fa3-mla"

    @staticmethod
    def available(
        device: torch.device, dtype: torch.dtype | None = None, head_dim: int | None = None
    ) -> str | None:
        return MlaPagedAttention._problem(Fa3Attention, device, dtype, head_dim)

    def __init__(
        self, pool: KvPool, num_heads: int, options: Sequence[AttentionOptions] = (), group: int = 0
    ) -> None:
        from sgl_kernel.flash_attn import flash_attn_with_kvcache

        super().__init__(pool, num_heads, options, group)
        self._attend: Any = flash_attn_with_kvcache
        layout = pool.layout
        self._page_size = math.gcd(layout.page_size, _FA3_PAGE)
        self._of_page = layout.page_size // self._page_size
        pages = pool.pages.view(-1, self._page_size, 1, layout.head_dim)
        of_layers = [pages[layer * self._of_page :] for layer in range(layout.num_layers)]
        self._views = [(each[..., self._rank :], each[..., : self._rank]) for each in of_layers]

    def plan(self, rows: AttentionRows) -> None:
        """Computes once for all layers the page table, and how rows of one token are split among
        multiprocessors."""
        layout = self._layout
        parts = torch.arange(self._of_page, dtype=torch.int32, device=self._pool.device)
        first = rows.tables[self._group] * (layout.num_layers * self._of_page)
        table = (first[..., None] + parts).flatten(1)
        rows.plans[self._group] = table, None
        if rows.starts is not None:
            return
        count, pages = table.shape
        rows.plans[self._group] = (
            table,
            torch.ops.sgl_kernel.get_scheduler_metadata(
                count,
                1,
                pages * self._page_size,
                self._num_heads,
                1,
                layout.head_dim - self._rank,
                self._rank,
                layout.dtype,
                rows.keys,
                None,
                None,
                None,
                None,
                None,
                _FA3_PAGE,
                0,
                True,
                num_splits=0,
            ),
        )

    def attend(self, layer: int, q: torch.Tensor, out: torch.Tensor, rows: AttentionRows) -> None:
        keys, values = self._views[layer]
        table, metadata = rows.plans[self._group]
        single = rows.starts is None
        query = q.unsqueeze(1) if single else q
        self._attend(
            query[..., self._rank :],
            keys,
            values,
            qv=query[..., : self._rank],
            cache_seqlens=rows.keys,
            page_table=table,
            cu_seqlens_q=rows.starts,
            max_seqlen_q=rows.longest,
            softmax_scale=self._scales[layer],
            causal=True,
            scheduler_metadata=metadata,
            out=out.unsqueeze(1) if single else out,
        )
