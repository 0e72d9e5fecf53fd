"""FlashAttention-3 that sums every row in the same order, whatever else is in the step."""

from __future__ import annotations

from typing import Any

import torch

from baton.attention.fa3 import Fa3Attention
from baton.attention.paged import PagedRows

_HEAD_DIM = 128
_LEAST = 2
"""Least row length passed to FA3: rows of one token would otherwise get another kernel."""


class FixedFa3Attention(Fa3Attention):
    """A row's keys are not split among programs, and rows of one token are chunks of one: a token's result
    depends only on its own query and keys. Few rows with long contexts are slower.

    One program passes over all keys of a tile of queries, in blocks that start at multiples of the block's
    size; those behind a query's own position weigh nothing.
    """

    name = "fa3-fixed"

    @staticmethod
    def available(
        device: torch.device, dtype: torch.dtype | None = None, head_dim: int | None = None
    ) -> str | None:
        if (problem := Fa3Attention.available(device, dtype, head_dim)) is not None:
            return problem
        if head_dim not in (None, _HEAD_DIM):
            return f"heads of {head_dim} were measured to depend on the batch; those of {_HEAD_DIM} do not"
        return None

    def plan(self, rows: PagedRows) -> None:
        """Computes once for all layers how chunks are split among multiprocessors."""
        layout = self._layout
        count, pages = rows.table.shape
        starts = self._starts_of(rows)
        metadata: Any = torch.ops.sgl_kernel.get_scheduler_metadata(
            count,
            max(rows.longest, _LEAST),
            pages * layout.page_size,
            self._num_heads,
            layout.num_kv_heads,
            layout.head_dim,
            layout.head_dim,
            layout.dtype,
            rows.lengths,
            starts,
            None,
            None,
            None,
            None,
            layout.page_size,
            0,
            True,
            num_splits=1,
        )
        rows.plan = starts, metadata

    def attend(self, layer: int, q: torch.Tensor, out: torch.Tensor, rows: PagedRows) -> None:
        keys, values = self._layers[layer]
        starts, metadata = rows.plan
        self._attend(
            q,
            keys,
            values,
            cache_seqlens=rows.lengths,
            page_table=rows.table,
            cu_seqlens_q=starts,
            max_seqlen_q=max(rows.longest, _LEAST),
            causal=True,
            scheduler_metadata=metadata,
            num_splits=1,
            out=out,
        )

    def _starts_of(self, rows: PagedRows) -> torch.Tensor:
        if rows.starts is not None:
            return rows.starts
        return torch.arange(rows.lengths.shape[0] + 1, dtype=torch.int32, device=self._pool.device)
