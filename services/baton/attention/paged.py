"""Base of attention backends whose kernels follow page tables on the device."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

import numpy as np
import torch

from baton.attention.base import AttentionRows
from baton.attention.fp8 import quantize
from baton.kvcache.kv_pool import KvPool
from baton.layers.async_copy import to_device
from baton.layers.attention import AttentionOptions


def gpu_problem(device: torch.device) -> str | None:
    """Why kernels for NVIDIA GPUs cannot run on the device; None if they can."""
    if device.type != "cuda":
        return f"needs an NVIDIA GPU, not {device.type}"
    return None if torch.cuda.is_available() else "torch sees no CUDA device"


class PagedAttention(ABC):
    """An attention backend (`base.AttentionBackend`) that is a kernel over page tables, bound to one pool.

    `plan` and `attend` enqueue work and never wait for it. `forward` is for models that do not write keys and
    values by kernels of their own.
    """

    name: str
    features: frozenset[str] = frozenset()
    graphs = True
    """Whether a CUDA graph can hold `plan` and `attend`; if not, `plan` needs `AttentionRows.host`."""

    @staticmethod
    @abstractmethod
    def available(
        device: torch.device, dtype: torch.dtype | None = None, head_dim: int | None = None
    ) -> str | None:
        """None if it works here; else why not."""

    def __init__(
        self, pool: KvPool, num_heads: int, options: Sequence[AttentionOptions] = (), group: int = 0
    ) -> None:
        self._options = options or [AttentionOptions()] * pool.layout.num_layers
        self._pool = pool
        self._layout = pool.layout
        self._num_heads = num_heads
        self._group = group
        self._layers = [pool.layer(index) for index in range(pool.layout.num_layers)]
        """Keys and values: strided views [pages, page_size, kv heads, head_dim]."""
        self._stride = pool.layout.num_layers * pool.layout.parts * pool.layout.page_size
        self._heads = torch.arange(pool.layout.num_kv_heads, device=pool.device) * self._stride
        """In `KvPool.vectors`: where each head of a page begins."""
        self._entries: tuple[AttentionRows, torch.Tensor] | None = None
        """The rows that `forward` was last called with, and where they write."""

    @abstractmethod
    def plan(self, rows: AttentionRows) -> None:
        """Computes data shared by all layers into `rows.plans`; called once before their `attend`."""

    @abstractmethod
    def attend(self, layer: int, q: torch.Tensor, out: torch.Tensor, rows: AttentionRows) -> None:
        """q [tokens, heads, head_dim], whose keys and values are in the pool, into `out` of q's shape,
        contiguous; q may be a view with another stride between tokens."""

    def forward(
        self,
        layer: int,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        out: torch.Tensor,
        rows: AttentionRows,
    ) -> None:
        self.write(layer, k, v, rows)
        self.attend(layer, q, out, rows)
        # As `kernels.rope_kv_write`, which marks the slot: here the token alone gets the mark.
        out += (v - v).sum((1, 2))[:, None, None]

    def write(self, layer: int, k: torch.Tensor, v: torch.Tensor, rows: AttentionRows) -> None:
        """What `forward` does to the pool."""
        keys = self._written(rows) + layer * 2 * self._layout.page_size
        vectors, dim = self._pool.vectors, self._layout.head_dim
        scales = self._options[layer].kv_scales
        v = v.nan_to_num()
        if scales is not None:
            k, v, vectors = quantize(k, scales[0]), quantize(v, scales[1]), vectors.view(torch.uint8)
        vectors.index_copy_(0, keys, k.reshape(-1, dim))
        vectors.index_copy_(0, keys + self._layout.page_size, v.reshape(-1, dim))

    def _written(self, rows: AttentionRows) -> torch.Tensor:
        """Entries of `KvPool.vectors` in the first layer that the rows' tokens write, [tokens * kv heads]."""
        if self._entries is None or self._entries[0] is not rows:
            size, page = self._layout.page_size, self._layout.num_kv_heads * self._stride
            if rows.targets:
                there = rows.targets[self._group]
                there = there // size * page + there % size
                self._entries = rows, (there[:, None] + self._heads).flatten()
                return self._entries[1]
            assert rows.host is not None
            entries = []
            for row in rows.host:
                positions = np.arange(row.start, row.start + row.count)
                pages = np.array(row.tables[self._group], np.int64)[positions // size]
                entries.append(pages * page + positions % size)
            there = to_device(np.concatenate(entries), self._pool.device)
            self._entries = rows, (there[:, None] + self._heads).flatten()
        return self._entries[1]
