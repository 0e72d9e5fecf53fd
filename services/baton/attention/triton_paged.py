"""Baton's own Triton kernels, directly on the paged pool."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence

import torch

from baton.attention.base import AttentionRows
from baton.attention.paged import PagedAttention, gpu_problem
from baton.kvcache.kv_pool import KvPool
from baton.layers.attention import AttentionOptions

_HEAD_DIMS = (64, 128, 256)
_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_LEAST_CAPABILITY = (8, 0)
_PROGRAMS = 2
"""Programs per multiprocessor among which a few rows' keys are split."""


class TritonAttention(PagedAttention):
    """One launch for rows of one token, one for chunks. Reads nothing behind a row's end."""

    name = "triton"
    features = frozenset(
        {"scale", "window", "softcap", "sinks", "kv_scales", "sinks and kv_scales", "states"}
    )

    @staticmethod
    def available(
        device: torch.device, dtype: torch.dtype | None = None, head_dim: int | None = None
    ) -> str | None:
        if (problem := gpu_problem(device)) is not None:
            return problem
        capability = torch.cuda.get_device_capability(device)
        if capability < _LEAST_CAPABILITY:
            return f"needs compute capability 8.0 or more, this GPU has {capability[0]}.{capability[1]}"
        if dtype is not None and dtype not in _DTYPES:
            return f"does not compute {str(dtype).removeprefix('torch.')}"
        if head_dim is not None and head_dim not in _HEAD_DIMS:
            return f"has no kernel for heads of {head_dim}, only of {', '.join(map(str, _HEAD_DIMS))}"
        if importlib.util.find_spec("triton") is None:
            return "triton is not installed; torch for CUDA brings it"
        return None

    def __init__(
        self, pool: KvPool, num_heads: int, options: Sequence[AttentionOptions] = (), group: int = 0
    ) -> None:
        from baton.layers.kernels.decode_attention import decode_attention, most_splits, whole
        from baton.layers.kernels.prefill_attention import chunk_attention

        super().__init__(pool, num_heads, options, group)
        self._chunks, self._singles, self._whole = chunk_attention, decode_attention, whole
        self._most = most_splits(num_heads // pool.layout.num_kv_heads, pool.layout.head_dim)
        processors = torch.cuda.get_device_properties(pool.device).multi_processor_count
        self._programs = _PROGRAMS * processors
        # Zero between any two launches. Above this many rows nothing is split, so nothing is counted.
        self._counters = torch.zeros(self._programs, dtype=torch.int32, device=pool.device)
        self._pdl = torch.cuda.get_device_capability(pool.device) >= (9, 0)

    def streams(self, rows: int) -> bool:
        """Whether so many rows of one token over FP8 pages occupy the GPU without dividing their keys, by a
        kernel made for that."""
        page_size, heads = self._layout.page_size, self._layout.num_kv_heads
        made = all(self._whole(self._layout.head_dim, page_size, options) for options in self._options)
        return made and rows * heads >= self._programs

    def plan(self, rows: AttentionRows) -> None:
        """Scratch for the parts of rows of one token."""
        if rows.starts is not None:
            return
        layout = self._layout
        pairs = rows.keys.shape[0] * layout.num_kv_heads
        splits = max(1, min(self._most, self._programs // pairs))
        parts = pairs * splits * (self._num_heads // layout.num_kv_heads) if splits > 1 else 0
        rows.plans[self._group] = (
            splits,
            torch.empty(parts * (layout.head_dim + 1), dtype=torch.float32, device=self._pool.device),
        )

    def attend(self, layer: int, q: torch.Tensor, out: torch.Tensor, rows: AttentionRows) -> None:
        keys, values = self._layers[layer]
        options = self._options[layer]
        if rows.starts is not None:
            self._chunks(q, keys, values, rows.tables[self._group], rows.keys, rows.starts, out, options)
        else:
            splits, scratch = rows.plans[self._group]
            where = rows.tables[self._group], rows.keys, out, scratch, self._counters, splits, self._pdl
            self._singles(q, keys, values, *where, options)


class FixedTritonAttention(TritonAttention):
    """A row's keys are not split among programs, and rows of one token are chunks of one: a token's result
    depends only on its own query and keys, in blocks from its sequence's first key on. Few rows with long
    contexts are slower."""

    name = "triton-fixed"

    def plan(self, rows: AttentionRows) -> None:
        rows.plans[self._group] = rows.starts_of_all()

    def attend(self, layer: int, q: torch.Tensor, out: torch.Tensor, rows: AttentionRows) -> None:
        keys, values = self._layers[layer]
        self._chunks(
            q,
            keys,
            values,
            rows.tables[self._group],
            rows.keys,
            rows.plans[self._group],
            out,
            self._options[layer],
            invariant=True,
        )
