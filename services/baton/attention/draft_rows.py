"""Baton's own Triton kernel for a few decode rows with drafts, directly on the paged pool."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from baton.attention.base import AttentionRows
from baton.attention.paged import PagedAttention
from baton.attention.triton_paged import PROGRAMS, TritonAttention
from baton.kvcache.kv_pool import KvPool
from baton.layers.attention import AttentionOptions

MOST_ROWS = 8
"""A graph for few rows has as many of padding, which take no time."""


class DraftRowsAttention(PagedAttention):
    """One launch for up to MOST_ROWS rows of up to 8 tokens. Reads nothing behind a row's end."""

    name = "triton-drafts"

    @staticmethod
    def available(
        device: torch.device, dtype: torch.dtype | None = None, head_dim: int | None = None
    ) -> str | None:
        return TritonAttention.available(device, dtype, head_dim)

    def __init__(
        self, pool: KvPool, num_heads: int, options: Sequence[AttentionOptions] = (), group: int = 0
    ) -> None:
        from baton.layers.kernels import draft_attention

        super().__init__(pool, num_heads, options, group)
        layout, self._kernel = pool.layout, draft_attention
        self._of_group = num_heads // layout.num_kv_heads
        sizes = self._of_group, layout.head_dim, layout.dtype
        self._fits = all(draft_attention.fits(*sizes, each) for each in self._options)
        processors = torch.cuda.get_device_properties(pool.device).multi_processor_count
        self._programs = PROGRAMS * processors
        # Zero between any two launches.
        self._counters = torch.zeros(MOST_ROWS * layout.num_kv_heads, dtype=torch.int32, device=pool.device)

    def takes(self, rows: AttentionRows) -> bool:
        """Whether it computes such rows."""
        few = rows.keys.shape[0] <= MOST_ROWS and 1 < rows.longest <= self._kernel.MOST_TOKENS
        return self._fits and few and rows.starts is not None

    def plan(self, rows: AttentionRows) -> None:
        """Scratch for the parts of rows."""
        layout, count = self._layout, rows.keys.shape[0]
        # Half of a graph's rows are padding.
        splits = self._programs // (-(-count // 2) * layout.num_kv_heads)
        splits = max(1, min(self._kernel.MOST_SPLITS, splits))
        size = self._kernel.scratch_size(count, layout.num_kv_heads, self._of_group, layout.head_dim, splits)
        scratch = torch.empty(size, dtype=torch.float32, device=self._pool.device)
        rows.plans[self._group] = splits, scratch

    def attend(self, layer: int, q: torch.Tensor, out: torch.Tensor, rows: AttentionRows) -> None:
        assert rows.starts is not None
        splits, scratch = rows.plans[self._group]
        where = rows.tables[self._group], rows.keys, rows.starts, out, scratch, self._counters
        self._kernel.attend(q, *self._layers[layer], *where, splits, self._options[layer].scale)
