"""Base of attention backends whose kernels follow page tables on the device."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from baton.attention.base import AttentionRow
from baton.attention.fp8 import quantize
from baton.kvcache.kv_pool import KvPool
from baton.layers.async_copy import Upload
from baton.layers.attention import AttentionOptions
from baton.layers.forward_batch import AttendPages


@dataclass(frozen=True, slots=True)
class HostRows:
    """A step's rows on the host."""

    counts: npt.NDArray[Any]
    """int [rows]: tokens."""
    lengths: npt.NDArray[Any]
    """int [rows]: keys of each row's last token."""


@dataclass(slots=True)
class PagedRows:
    """A step's rows on the device: a kernel's inputs besides queries and pages, the same for all layers."""

    table: torch.Tensor
    """int32 [rows, pages]; entries behind a row's end may name any page."""
    lengths: torch.Tensor
    """int32 [rows]: keys of each row's last token."""
    starts: torch.Tensor | None = None
    """int32 [rows + 1]: where each row's tokens start; None: one token a row."""
    longest: int = 1
    """Tokens of the longest row."""
    host: HostRows | None = None
    """None in a CUDA graph, which is replayed for other rows."""
    plan: Any = None
    """Result of `PagedAttention.plan`."""

    def starts_of_all(self) -> torch.Tensor:
        """`starts`, also of rows of one token each."""
        if self.starts is not None:
            return self.starts
        return torch.arange(self.lengths.shape[0] + 1, dtype=torch.int32, device=self.lengths.device)


def gpu_problem(device: torch.device) -> str | None:
    """Why kernels for NVIDIA GPUs cannot run on the device; None if they can."""
    if device.type != "cuda":
        return f"needs an NVIDIA GPU, not {device.type}"
    return None if torch.cuda.is_available() else "torch sees no CUDA device"


class PagedAttention(ABC):
    """An attention backend (`base.AttentionBackend`) that is a kernel over page tables, bound to one pool.

    `plan` and `attend` enqueue work and never wait for it.
    """

    name: str
    features: frozenset[str] = frozenset()
    graphs = True
    """Whether a CUDA graph can hold `plan` and `attend`; if not, `plan` needs `PagedRows.host`."""

    @staticmethod
    @abstractmethod
    def available(
        device: torch.device, dtype: torch.dtype | None = None, head_dim: int | None = None
    ) -> str | None:
        """None if it works here; else why not."""

    def __init__(self, pool: KvPool, num_heads: int, options: Sequence[AttentionOptions] = ()) -> None:
        self._options = options or [AttentionOptions()] * pool.layout.num_layers
        self._pool = pool
        self._layout = pool.layout
        self._num_heads = num_heads
        self._layers = [pool.layer(index) for index in range(pool.layout.num_layers)]
        """Keys and values: strided views [pages, page_size, kv heads, head_dim]."""
        self._stride = pool.layout.num_layers * pool.layout.parts * pool.layout.page_size
        self._heads = torch.arange(pool.layout.num_kv_heads, device=pool.device) * self._stride
        """In `KvPool.vectors`: where each head of a page begins."""
        self._entries: torch.Tensor | None = None
        self._rows: PagedRows | None = None

    @abstractmethod
    def plan(self, rows: PagedRows) -> None:
        """Computes data shared by all layers into `rows.plan`; called once before their `attend`."""

    @abstractmethod
    def attend(self, layer: int, q: torch.Tensor, out: torch.Tensor, rows: PagedRows) -> None:
        """q [tokens, heads, head_dim], whose keys and values are in the pool, into `out` of q's shape,
        contiguous; q may be a view with another stride between tokens."""

    def prepare(self, rows: Sequence[AttentionRow]) -> None:
        size, page = self._layout.page_size, self._layout.num_kv_heads * self._stride
        counts = np.array([row.count for row in rows], np.int32)
        lengths = np.array([row.start + row.count for row in rows], np.int32)
        table = np.zeros((len(rows), -(-int(lengths.max()) // size)), np.int32)
        entries = []
        for at, row in enumerate(rows):
            used = -(-(row.start + row.count) // size)
            table[at, :used] = row.pages[:used]
            positions = np.arange(row.start, row.start + row.count)
            entries.append(table[at, positions // size].astype(np.int64) * page + positions % size)
        upload = Upload()
        upload.add(table)
        upload.add(lengths)
        upload.add(np.concatenate(([0], np.cumsum(counts))).astype(np.int32))
        upload.add(np.concatenate(entries))
        table_there, lengths_there, starts, tokens = upload.send(self._pool.device)
        self._entries = (tokens[:, None] + self._heads).flatten()
        longest = int(counts.max())
        self._rows = PagedRows(
            table_there, lengths_there, None if longest == 1 else starts, longest, HostRows(counts, lengths)
        )
        self.plan(self._rows)

    def forward(
        self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor
    ) -> None:
        assert self._entries is not None and self._rows is not None
        keys = self._entries + layer * 2 * self._layout.page_size
        vectors, dim = self._pool.vectors, self._layout.head_dim
        scales = self._options[layer].kv_scales
        damage, v = (v - v).sum((1, 2)), v.nan_to_num()  # as `kernels.qkv` does
        if scales is not None:
            k, v, vectors = quantize(k, scales[0]), quantize(v, scales[1]), vectors.view(torch.uint8)
        vectors.index_copy_(0, keys, k.reshape(-1, dim))
        vectors.index_copy_(0, keys + self._layout.page_size, v.reshape(-1, dim))
        self.attend(layer, q, out, self._rows)
        out += damage[:, None, None]


class GroupedAttention:
    """Attention of all layers, by a backend for each KV group."""

    def __init__(self, backends: Sequence[PagedAttention], places: Mapping[int, tuple[int, int]]) -> None:
        """`places`: of each layer its group, and its place in the group (`kvcache.groups.places`)."""
        self._backends, self._places = backends, places

    def over(
        self,
        tables: torch.Tensor,
        lengths: torch.Tensor,
        starts: torch.Tensor | None = None,
        longest: int = 1,
        host: HostRows | None = None,
    ) -> AttendPages:
        """Attends for these rows only; tables: int32 [rows, groups, pages], the rest as in PagedRows."""
        of_groups = [PagedRows(table, lengths, starts, longest, host) for table in tables.unbind(1)]
        for backend, rows in zip(self._backends, of_groups, strict=True):
            backend.plan(rows)

        def attend(layer: int, q: torch.Tensor, out: torch.Tensor) -> None:
            group, place = self._places[layer]
            self._backends[group].attend(place, q, out, of_groups[group])

        return attend
