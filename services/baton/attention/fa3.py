"""FlashAttention-3 (Shah et al., arXiv:2407.08608) from sgl_kernel, over the paged pool as it lies."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from baton.attention.base import AttentionRow
from baton.engine.upload import Upload
from baton.kvcache.pool import KvPool

_HEAD_DIMS = (64, 96, 128, 192, 256)
_DTYPES = (torch.bfloat16, torch.float16)


@dataclass(slots=True)
class Fa3Metadata:
    """What a call needs beside queries and pages; the same for all layers of a step."""

    page_table: torch.Tensor
    """int32 [rows, pages]"""
    lengths: torch.Tensor
    """int32 [rows]: keys of each row's last token."""
    starts: torch.Tensor | None = None
    """int32 [rows + 1]: where each row's tokens start; None: one token a row."""
    max_count: int = 1
    """Tokens of the longest row."""
    num_splits: int = 0
    """Parts that a row's keys are divided into; 0: as the kernel sees fit."""
    schedule: torch.Tensor | None = None
    """Of `Fa3Attention.schedule`: computed once for all layers."""


class Fa3Attention:
    """Reads pages through strided per-layer views [pages, page_size, kv heads, head_dim]."""

    name = "fa3"

    @staticmethod
    def available(
        device: torch.device, dtype: torch.dtype | None = None, head_dim: int | None = None
    ) -> str | None:
        if device.type != "cuda":
            return f"needs an NVIDIA GPU, not {device.type}"
        if not torch.cuda.is_available():
            return "torch sees no CUDA device"
        capability = torch.cuda.get_device_capability(device)
        if capability != (9, 0):
            return f"needs compute capability 9.0 (Hopper), this GPU has {capability[0]}.{capability[1]}"
        if dtype is not None and dtype not in _DTYPES:
            return f"computes bfloat16 and float16, not {str(dtype).removeprefix('torch.')}"
        if head_dim is not None and head_dim not in _HEAD_DIMS:
            return f"has no kernel for heads of {head_dim}, only of {', '.join(map(str, _HEAD_DIMS))}"
        if importlib.util.find_spec("sgl_kernel") is None:
            return "sgl_kernel is not installed; pip install 'baton-serve[gpu]'"
        try:
            import sgl_kernel.flash_attn  # noqa: F401
        except ImportError as error:
            return f"sgl_kernel cannot be loaded: {str(error).splitlines()[0]}"
        return None

    def __init__(self, pool: KvPool, num_heads: int) -> None:
        from sgl_kernel.flash_attn import flash_attn_with_kvcache

        self._attend: Any = flash_attn_with_kvcache
        self._pool = pool
        self._layout = pool.layout
        self._num_heads = num_heads
        self._layers = [pool.layer(index) for index in range(pool.layout.num_layers)]
        self._stride = pool.layout.num_layers * 2 * pool.layout.page_size
        self._entries: torch.Tensor | None = None
        self._metadata: Fa3Metadata | None = None

    def schedule(self, metadata: Fa3Metadata) -> torch.Tensor:
        """How the device divides rows of one token among its multiprocessors: else found anew per layer."""
        layout = self._layout
        rows, pages = metadata.page_table.shape
        return torch.ops.sgl_kernel.get_scheduler_metadata(  # type: ignore[no-any-return]
            rows,
            1,
            pages * layout.page_size,
            self._num_heads,
            layout.num_kv_heads,
            layout.head_dim,
            layout.head_dim,
            layout.dtype,
            metadata.lengths,
            None,
            None,
            None,
            None,
            None,
            layout.page_size,
            0,
            True,
            num_splits=metadata.num_splits,
        )

    def prepare(self, rows: Sequence[AttentionRow]) -> None:
        size = self._layout.page_size
        counts = np.array([row.count for row in rows], np.int32)
        lengths = np.array([row.start + row.count for row in rows], np.int32)
        table = np.zeros((len(rows), -(-int(lengths.max()) // size)), np.int32)
        entries = []
        for at, row in enumerate(rows):
            used = -(-(row.start + row.count) // size)
            table[at, :used] = row.pages[:used]
            positions = np.arange(row.start, row.start + row.count)
            entries.append(table[at, positions // size].astype(np.int64) * self._stride + positions % size)
        upload = Upload()
        upload.add(table)
        upload.add(lengths)
        upload.add(np.concatenate(([0], np.cumsum(counts))).astype(np.int32))
        upload.add(np.concatenate(entries))
        page_table, there, starts, self._entries = upload.send(self._pool.device)
        longest = int(counts.max())
        self._metadata = Fa3Metadata(page_table, there, None if longest == 1 else starts, longest)

    def forward(
        self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor
    ) -> None:
        assert self._entries is not None and self._metadata is not None
        keys = self._entries + layer * 2 * self._layout.page_size
        self._pool.tokens.index_copy_(0, keys, k)
        self._pool.tokens.index_copy_(0, keys + self._layout.page_size, v)
        self.attend(layer, q, out, self._metadata)

    def attend(self, layer: int, q: torch.Tensor, out: torch.Tensor, metadata: Fa3Metadata) -> None:
        """q [tokens, heads, head_dim], whose keys and values are in the pool, into `out` of q's shape; q may
        be a view with other strides but for the last dimension."""
        keys, values = self._layers[layer]
        single = metadata.starts is None
        self._attend(
            q.unsqueeze(1) if single else q,
            keys,
            values,
            cache_seqlens=metadata.lengths,
            page_table=metadata.page_table,
            cu_seqlens_q=metadata.starts,
            max_seqlen_q=metadata.max_count,
            causal=True,
            num_splits=metadata.num_splits,
            scheduler_metadata=metadata.schedule,
            out=out.unsqueeze(1) if single else out,
        )
