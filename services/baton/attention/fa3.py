"""FlashAttention-3 (Shah et al., arXiv:2407.08608) from sgl_kernel, over the paged pool as it lies."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch

from baton.attention.base import AttentionRows
from baton.attention.paged import PagedAttention, gpu_problem
from baton.kvcache.kv_pool import KvPool
from baton.layers.attention import AttentionOptions

_PAIRS = {"2.11": ("0.4.4",), "2.13": ("0.4.7", "0.4.8"), "2.14": ("0.4.9", "0.4.10")}
"""By torch release; 0.4.4 by trial, the others by what their metadata requires."""


def mismatch(torch_version: str | None = None, kernel_version: str | None = None) -> str | None:
    """One line that says what to install if the two installed (or given) versions do not fit; None if they
    fit, if the torch release is unknown here, or if either is not installed."""
    try:
        torch_version = torch_version or version("torch")
        kernel_version = kernel_version or version("sglang-kernel")
    except PackageNotFoundError:
        return None
    release = ".".join(torch_version.split(".")[:2])
    fitting = _PAIRS.get(release)
    if fitting is None or kernel_version in fitting:
        return None
    return (
        f"sglang-kernel {kernel_version} is not built for torch {torch_version}; "
        f"pip install sglang-kernel=={fitting[-1]}"
    )


_HEAD_DIMS = (64, 96, 128, 192, 256)
MOST_FEW = 8
"""Tokens of a decode row with its drafts, at most."""
_DTYPES = (torch.bfloat16, torch.float16)


class Fa3Attention(PagedAttention):
    """Multiplies values behind a row's end in its last tile by 0; so what is written there is limited to
    numbers (`qkv.limited`), and the pool begins as zeros.

    Over a pool in FP8 it multiplies in FP8: queries and the softmax's weights are rounded, too. On random
    data that adds as much to the error as the rounding of keys and values: 3.6 % of the result's norm.
    """

    name = "fa3"
    features = frozenset({"scale", "window", "sinks", "kv_scales"})

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

    def __init__(
        self, pool: KvPool, num_heads: int, options: Sequence[AttentionOptions] = (), group: int = 0
    ) -> None:
        from sgl_kernel.flash_attn import flash_attn_with_kvcache

        from baton.layers.kernels.rope_kv_write import to_fp8

        super().__init__(pool, num_heads, options, group)
        self._attend: Any = flash_attn_with_kvcache
        self._extra = [_arguments(each) for each in self._options]
        self._to_fp8 = to_fp8

    def plan(self, rows: AttentionRows) -> None:
        """Computes once for all layers without a window how decode rows are split among multiprocessors."""
        if rows.longest > MOST_FEW or all(options.window is not None for options in self._options):
            return
        rows.plans[self._group] = self._divided(rows, rows.starts, rows.longest)

    def _divided(
        self, rows: AttentionRows, starts: torch.Tensor | None = None, longest: int = 1, num_splits: int = 0
    ) -> Any:
        """The kernel's plan; `num_splits` 0: as many as it chooses."""
        layout = self._layout
        count, pages = rows.tables[self._group].shape
        return torch.ops.sgl_kernel.get_scheduler_metadata(
            count,
            longest,
            pages * layout.page_size,
            self._num_heads,
            layout.num_kv_heads,
            layout.head_dim,
            layout.head_dim,
            layout.dtype,
            rows.keys,
            starts,
            None,
            None,
            None,
            None,
            layout.page_size,
            0,
            True,
            num_splits=num_splits,
        )

    def attend(self, layer: int, q: torch.Tensor, out: torch.Tensor, rows: AttentionRows) -> None:
        keys, values = self._layers[layer]
        single = rows.starts is None
        options, extra = self._options[layer], self._extra[layer]
        target = out
        if (scales := options.kv_scales) is not None:
            of_rows = scales[:, None].expand(-1, rows.keys.shape[0], -1)
            extra = {**extra, "k_descale": of_rows[0], "v_descale": of_rows[1]}
            q = self._to_fp8(q)
            if out.dtype != torch.bfloat16:
                target = torch.empty_like(out, dtype=torch.bfloat16)
        self._attend(
            q.unsqueeze(1) if single else q,
            keys,
            values,
            cache_seqlens=rows.keys,
            page_table=rows.tables[self._group],
            cu_seqlens_q=rows.starts,
            max_seqlen_q=rows.longest,
            causal=True,
            scheduler_metadata=None if options.window is not None else rows.plans.get(self._group),
            out=target.unsqueeze(1) if single else target,
            **extra,
        )
        if target is not out:
            out.copy_(target)


def _arguments(options: AttentionOptions) -> dict[str, Any]:
    """Arguments of the kernel, for a layer's options."""
    found: dict[str, Any] = {}
    if options.scale is not None:
        found["softmax_scale"] = options.scale
    if options.window is not None:
        found["window_size"] = (options.window - 1, 0)
    if options.sinks is not None:
        found["sinks"] = options.sinks.to(torch.bfloat16)  # whatever the queries' dtype
    return found


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
    features = frozenset[str]()

    @staticmethod
    def available(
        device: torch.device, dtype: torch.dtype | None = None, head_dim: int | None = None
    ) -> str | None:
        if (problem := Fa3Attention.available(device, dtype, head_dim)) is not None:
            return problem
        if head_dim not in (None, _HEAD_DIM):
            return f"heads of {head_dim} were measured to depend on the batch; those of {_HEAD_DIM} do not"
        return None

    def plan(self, rows: AttentionRows) -> None:
        """Computes once for all layers how chunks are split among multiprocessors."""
        starts = rows.starts_of_all()
        rows.plans[self._group] = starts, self._divided(rows, starts, max(rows.longest, _LEAST), num_splits=1)

    def attend(self, layer: int, q: torch.Tensor, out: torch.Tensor, rows: AttentionRows) -> None:
        keys, values = self._layers[layer]
        starts, metadata = rows.plans[self._group]
        self._attend(
            q,
            keys,
            values,
            cache_seqlens=rows.keys,
            page_table=rows.tables[self._group],
            cu_seqlens_q=starts,
            max_seqlen_q=max(rows.longest, _LEAST),
            causal=True,
            scheduler_metadata=metadata,
            num_splits=1,
            out=out,
        )
