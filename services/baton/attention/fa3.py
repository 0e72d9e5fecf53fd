"""FlashAttention-3 (Shah et al., arXiv:2407.08608) from sgl_kernel, directly on the paged pool."""

from __future__ import annotations

import importlib.util
from typing import Any

import torch

from baton.attention.kernel_pairs import mismatch
from baton.attention.paged import PagedAttention, PagedRows, gpu_problem
from baton.kvcache.pool import KvPool

_HEAD_DIMS = (64, 96, 128, 192, 256)
_DTYPES = (torch.bfloat16, torch.float16)


class Fa3Attention(PagedAttention):
    """Multiplies entries behind a row's end in its last tile by 0; so the pool must not hold NaN."""

    name = "fa3"

    @staticmethod
    def available(
        device: torch.device, dtype: torch.dtype | None = None, head_dim: int | None = None
    ) -> str | None:
        if (problem := gpu_problem(device)) is not None:
            return problem
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
        except (ImportError, OSError) as error:
            reason = mismatch() or str(error).splitlines()[0]
            return f"sgl_kernel cannot be loaded: {reason}"
        return None

    def __init__(self, pool: KvPool, num_heads: int) -> None:
        from sgl_kernel.flash_attn import flash_attn_with_kvcache

        super().__init__(pool, num_heads)
        self._attend: Any = flash_attn_with_kvcache

    def plan(self, rows: PagedRows) -> None:
        """Computes once for all layers how rows of one token are split among multiprocessors."""
        if rows.starts is not None:
            return
        layout = self._layout
        count, pages = rows.table.shape
        rows.plan = torch.ops.sgl_kernel.get_scheduler_metadata(
            count,
            1,
            pages * layout.page_size,
            self._num_heads,
            layout.num_kv_heads,
            layout.head_dim,
            layout.head_dim,
            layout.dtype,
            rows.lengths,
            None,
            None,
            None,
            None,
            None,
            layout.page_size,
            0,
            True,
            num_splits=0,
        )

    def attend(self, layer: int, q: torch.Tensor, out: torch.Tensor, rows: PagedRows) -> None:
        keys, values = self._layers[layer]
        single = rows.starts is None
        self._attend(
            q.unsqueeze(1) if single else q,
            keys,
            values,
            cache_seqlens=rows.lengths,
            page_table=rows.table,
            cu_seqlens_q=rows.starts,
            max_seqlen_q=rows.longest,
            causal=True,
            scheduler_metadata=rows.plan,
            out=out.unsqueeze(1) if single else out,
        )
