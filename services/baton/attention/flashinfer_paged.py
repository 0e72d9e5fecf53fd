"""FlashInfer's paged attention (Ye et al., arXiv:2501.01005), directly on the paged pool."""

from __future__ import annotations

import importlib.util
import itertools
import os
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from baton.attention.base import AttentionRows
from baton.attention.paged import PagedAttention, gpu_problem
from baton.kvcache.kv_pool import KvPool
from baton.layers.async_copy import to_device
from baton.layers.attention import AttentionOptions

_HEAD_DIMS = (64, 128, 256)
_DTYPES = (torch.bfloat16, torch.float16)
_LEAST_CAPABILITY = (8, 0)
_TILE, _BLOCKS = 128, 2
"""FlashInfer's: rows of a tile of queries at most, blocks of a multiprocessor."""
_PLANS = 2
"""Steps in flight at a time, including the one being launched."""


@dataclass(slots=True)
class _Planner:
    wrapper: Any
    uploaded: torch.cuda.Event
    """Occurs when the last plan has left the pinned memory, which the next plan overwrites."""


class FlashInferAttention(PagedAttention):
    """Plans on the host before each step. No CUDA graph can hold that, so steps are launched kernel by
    kernel. The kernels are compiled at first use."""

    name = "flashinfer"
    graphs = False

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
            return f"computes bfloat16 and float16, not {str(dtype).removeprefix('torch.')}"
        if head_dim is not None and head_dim not in _HEAD_DIMS:
            return f"has no kernel for heads of {head_dim}, only of {', '.join(map(str, _HEAD_DIMS))}"
        if importlib.util.find_spec("flashinfer") is None:
            return "flashinfer is not installed; pip install 'baton-serve[flashinfer]'"
        try:
            import flashinfer  # noqa: F401
        except (ImportError, OSError) as error:
            return f"flashinfer cannot be loaded: {str(error).splitlines()[0]}"
        return None if importlib.util.find_spec("flashinfer_jit_cache") is not None else _no_compiler()

    def __init__(
        self, pool: KvPool, num_heads: int, options: Sequence[AttentionOptions] = (), group: int = 0
    ) -> None:
        from flashinfer import BatchPrefillWithPagedKVCacheWrapper

        super().__init__(pool, num_heads, options, group)
        processors = torch.cuda.get_device_properties(pool.device).multi_processor_count
        size = workspace_bytes(num_heads, pool.layout.num_kv_heads, pool.layout.head_dim, processors)
        workspace = torch.empty(size, dtype=torch.uint8, device=pool.device)
        planners = [
            _Planner(
                BatchPrefillWithPagedKVCacheWrapper(workspace, "NHD", backend="fa2"),
                torch.cuda.Event(),  # type: ignore[no-untyped-call]
            )
            for _ in range(_PLANS)
        ]
        self._planners = itertools.cycle(planners)

    def plan(self, rows: AttentionRows) -> None:
        assert rows.host is not None
        counts = np.array([row.count for row in rows.host])
        lengths = counts + [row.start for row in rows.host]
        size, width = self._layout.page_size, rows.tables[self._group].shape[1]
        pages = -(-lengths // size)
        indptr = _indptr(pages)
        # Entries of each row's pages in the table: its first entry and the following ones.
        first = np.repeat(np.arange(len(pages)) * width - indptr[:-1], pages)
        entries = to_device(first + np.arange(indptr[-1]), self._pool.device)
        planner = next(self._planners)
        # Usually the earlier step has ended; this waits only for the copy of its plan.
        planner.uploaded.synchronize()
        planner.wrapper.plan(
            _pinned(_indptr(counts)),
            _pinned(indptr),
            rows.tables[self._group].reshape(-1).index_select(0, entries),
            _pinned(lengths - (pages - 1) * size),
            self._num_heads,
            self._layout.num_kv_heads,
            self._layout.head_dim,
            size,
            causal=True,
            q_data_type=self._layout.dtype,
            kv_data_type=self._layout.dtype,
            max_token_per_sequence=int(counts.max()),
        )
        planner.uploaded.record()
        rows.plans[self._group] = planner.wrapper

    def attend(self, layer: int, q: torch.Tensor, out: torch.Tensor, rows: AttentionRows) -> None:
        rows.plans[self._group].run(q, self._layers[layer], out=out, enable_pdl=False)


def workspace_bytes(heads: int, kv_heads: int, head_dim: int, processors: int) -> int:
    """Most memory of a plan for the parts of rows whose keys are split: results and their scales in
    float32, for as many tiles as run at a time (`PrefillPlan` in its scheduler.cuh)."""
    tiles = -(-_BLOCKS * processors // kv_heads)
    aligned = 1024  # for where each of the two begins
    return heads * tiles * _TILE * (head_dim + 1) * 4 + aligned


def _no_compiler() -> str | None:
    """Why its kernels cannot be compiled; None: they can."""
    home = os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH") or "/usr/local/cuda"
    if shutil.which("nvcc") is None and not Path(home, "bin", "nvcc").exists():
        return "its kernels are compiled, and no nvcc is in PATH or CUDA_HOME: install CUDA's compiler"
    if shutil.which("ninja") is None:
        return "its kernels are compiled, and no ninja is in PATH: activate its environment, or install it"
    return None


def _indptr(counts: npt.NDArray[Any]) -> npt.NDArray[np.int64]:
    """[rows + 1]: where each row's entries start."""
    return np.concatenate(([0], np.cumsum(counts)))


def _pinned(values: npt.NDArray[Any]) -> torch.Tensor:
    """int32, as FlashInfer takes in what it plans by."""
    return torch.from_numpy(values.astype(np.int32)).pin_memory()
