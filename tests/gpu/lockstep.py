"""Ranks as threads of this process on one GPU, without graphs: what sums of ranks are to give.

torch adds the partial products, in the order of the ranks, each rounded. Nothing is exchanged between
processes or GPUs. Steps have the sizes that they have in CUDA graphs, because kernels differ by size.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch

from rig import CUDA

sys.path.append(str(Path(__file__).parents[1] / "unit"))

from thread_ranks import ThreadCommunicator, ThreadGroup

from baton.engine import step_graphs
from baton.kvcache import KvCacheManager, PageAllocator, PrefixTree
from baton.layers.tensor_parallel import Shard
from baton.worker.engine import Engine
from baton.worker.model import attention_of, kv_layout, load
from baton.worker.pool import gpu_pool
from baton.worker.runners import make_runner


class InOrder(ThreadCommunicator):
    """A `layers.shard.DeviceCommunicator`. All ranks use one stream, which keeps the order."""

    def __init__(self, group: ThreadGroup, rank: int) -> None:
        from baton.layers.kernels.all_reduce import ROWS, TWO_SHOT_ROWS, AllReduce, buffer_bytes

        super().__init__(group, rank)
        self._most_rows = ROWS if group.size == 2 else TWO_SHOT_ROWS[1]
        buffer = torch.zeros(buffer_bytes(1), dtype=torch.uint8, device=CUDA)
        told = torch.zeros(1, dtype=torch.int32, pin_memory=True)
        self._alone = AllReduce(0, buffer, torch.tensor([buffer.data_ptr()], device=CUDA), told, 1.0)
        """For the arithmetic of its norm."""

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        first, *others = self._exchange(x)
        total = first.float() if x.is_floating_point() else first
        for other in others:
            total = total + other
        return x.copy_(total)

    def add_norm(
        self,
        residual: torch.Tensor,
        parts: torch.Tensor,
        weight: torch.Tensor,
        out: torch.Tensor,
        eps: float,
        bias: torch.Tensor | None = None,
    ) -> None:
        own = parts[0].float()
        for part in parts[1:]:
            own = own + part
        if bias is not None:
            own = own + bias
        total = self.all_reduce(own.to(residual.dtype))
        if self._alone.takes(*residual.shape) and len(residual) <= self._most_rows:
            self._alone.sum_norm(residual, total[None], weight, out, eps, None)
        else:
            from baton.layers.kernels.gemm import add_norm

            add_norm(residual, total[None], weight, out, eps)


class Replayed:
    """In place of a CUDA graph: does its work anew."""

    def __init__(self, work: Callable[[Any], None], inputs: Any) -> None:
        self._work, self._inputs = work, inputs

    def replay(self) -> None:
        self._work(self._inputs)


def _capture(work: Callable[[Any], None], inputs: Any, pool: Any, device: torch.device) -> Replayed:
    work(inputs)
    return Replayed(work, inputs)


class Lockstep:
    """A `Runner`, with a cache, of the same sizes as an engine of several ranks."""

    def __init__(self, path: Path, engine: Engine, monkeypatch: Any) -> None:
        config, pages = engine.config, engine.pool.num_pages
        monkeypatch.setattr(step_graphs, "capture", _capture)
        group = ThreadGroup(config.tp)
        self._threads = ThreadPoolExecutor(config.tp)
        dtype = getattr(torch, engine.model_info.dtype)

        def make(rank: int) -> Any:
            shard, communicator = Shard(rank, config.tp, ep=config.ep), InOrder(group, rank)
            context = config.context_length
            model = load(config, path, dtype, CUDA, shard, communicator)
            layout = kv_layout(model, config.page_size, context)
            prefill, decode = attention_of(config, model, CUDA)
            pool = gpu_pool(layout, pages, CUDA, shard)
            return make_runner(config, model, pool, prefill[0], decode[0], context, config.most_drafts), pool

        made = list(self._threads.map(make, range(config.tp)))
        self._runners, self.pools = [each[0] for each in made], [each[1] for each in made]
        self.max_slots = config.max_rows
        tree = PrefixTree(config.page_size, config.eviction, self.pools[0].layout.groups)
        self.cache = KvCacheManager(PageAllocator(pages), tree)

    def launch(self, plan: Any) -> Any:
        first, *_ = list(self._threads.map(lambda runner: runner.launch(plan), self._runners))
        return first

    def read(self, launched_step: Any) -> Any:
        return self._runners[0].read(launched_step)

    def pages(self, page_bytes: int) -> torch.Tensor:
        """uint8 [pages, page_bytes]: whole pages."""
        parts = [pool.raw[: pool.num_pages].cpu() for pool in self.pools]
        # With fewer heads than ranks, that many in a row hold the same.
        copies = len(parts) * parts[0].shape[1] // page_bytes
        assert all(torch.equal(part, parts[rank - rank % copies]) for rank, part in enumerate(parts))
        return torch.cat(parts[::copies], 1)


class Recorded:
    """A `Runner` that keeps what its steps have returned."""

    def __init__(self, runner: Any) -> None:
        self.max_slots, self._runner = runner.max_slots, runner
        self.results: list[Any] = []

    def launch(self, plan: Any) -> Any:
        return self._runner.launch(plan)

    def read(self, launched_step: Any) -> Any:
        self.results.append(self._runner.read(launched_step))
        return self.results[-1]
