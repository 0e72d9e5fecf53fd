"""Combines the two fast backends of a Hopper GPU."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from baton.attention.base import AttentionRows
from baton.attention.fa3 import Fa3Attention
from baton.attention.paged import PagedAttention
from baton.attention.triton_paged import TritonAttention
from baton.kvcache.kv_pool import KvPool
from baton.layers.attention import AttentionOptions

FEW_ROWS = 4
"""Rows of one token, up to which the Triton kernel's single launch beats FA3's two. Measured on an H200, 8 KV
heads of 128: up to 4 rows it takes 0.4 to 0.9 of FA3's time up to 1,024 keys, at most 1.05 at 32,768; at 8
it loses from 16,384 keys on."""


class MixedAttention(PagedAttention):
    """The Triton kernel for a few rows of one token, FA3 for more and for chunks. Over FP8 pages Triton for
    many rows, too: on an H200, 64 rows of 1,056 tokens in 39 us instead of 55, 256 of 700 in 98 instead of
    158."""

    name = "mixed"
    features = Fa3Attention.features & TritonAttention.features

    @staticmethod
    def available(
        device: torch.device, dtype: torch.dtype | None = None, head_dim: int | None = None
    ) -> str | None:
        for part in (Fa3Attention, TritonAttention):
            problem = part.available(device, dtype, head_dim)
            if problem is not None:
                return f"{part.name}: {problem}"
        return None

    def __init__(
        self, pool: KvPool, num_heads: int, options: Sequence[AttentionOptions] = (), group: int = 0
    ) -> None:
        super().__init__(pool, num_heads, options, group)
        self._few, self._many = (
            TritonAttention(pool, num_heads, options, group),
            Fa3Attention(pool, num_heads, options, group),
        )

    def plan(self, rows: AttentionRows) -> None:
        self._part(rows).plan(rows)

    def attend(self, layer: int, q: torch.Tensor, out: torch.Tensor, rows: AttentionRows) -> None:
        self._part(rows).attend(layer, q, out, rows)

    def _part(self, rows: AttentionRows) -> PagedAttention:
        count = rows.keys.shape[0]
        few = rows.starts is None and (count <= FEW_ROWS or self._few.streams(count))
        return self._few if few else self._many
