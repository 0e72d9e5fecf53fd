"""Attention with torch's scaled_dot_product_attention, on every device."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F

from baton.attention.base import AttentionRow
from baton.kvcache.pool import KvPool


class TorchAttention:
    """Gathers each row's pages, then attends row by row; heads that share a KV head become queries of it."""

    name = "torch"

    @staticmethod
    def available(device: torch.device) -> str | None:
        return None

    def __init__(self, pool: KvPool, num_heads: int) -> None:
        self._pool = pool
        self._num_heads = num_heads
        self._group = num_heads // pool.layout.num_kv_heads
        self._rows: list[tuple[AttentionRow, torch.Tensor, torch.Tensor | None]] = []
        self._slots = torch.empty(0, dtype=torch.int64)

    def prepare(self, rows: Sequence[AttentionRow]) -> None:
        size, device = self._pool.layout.page_size, self._pool.device
        stride = self._pool.layout.num_layers * 2 * size
        slots: list[int] = []
        self._rows = []
        for row in rows:
            end = row.start + row.count
            slots += [row.pages[p // size] * stride + p % size for p in range(row.start, end)]
            pages = torch.tensor(row.pages[: -(-end // size)], device=device)
            mask = None
            if row.count > 1:
                positions = torch.arange(row.start, end, device=device).repeat(self._group)
                mask = torch.arange(end, device=device) <= positions[:, None]
            self._rows.append((row, pages, mask))
        self._slots = torch.tensor(slots, device=device)

    def forward(
        self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor
    ) -> None:
        layout = self._pool.layout
        slots = self._slots + layer * 2 * layout.page_size
        self._pool.tokens.index_copy_(0, slots, k)
        self._pool.tokens.index_copy_(0, slots + layout.page_size, v)
        keys, values = self._pool.layer(layer)
        first = 0
        for row, pages, mask in self._rows:
            last, end = first + row.count, row.start + row.count
            row_k = keys[pages].flatten(0, 1)[:end].transpose(0, 1)
            row_v = values[pages].flatten(0, 1)[:end].transpose(0, 1)
            shape = (row.count, layout.num_kv_heads, self._group, layout.head_dim)
            row_q = q[first:last].view(shape).permute(1, 2, 0, 3).flatten(1, 2)
            result = F.scaled_dot_product_attention(row_q[None], row_k[None], row_v[None], attn_mask=mask)[0]
            result = result.view(layout.num_kv_heads, self._group, row.count, layout.head_dim)
            out[first:last].view(shape).copy_(result.permute(2, 0, 1, 3))
            first = last
