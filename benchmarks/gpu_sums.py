"""Sums among ranks, on a GPU each: ours, alone and with the norm that follows, NCCL's and sgl_kernel's.

    python benchmarks/gpu_sums.py --ranks 4

Microseconds a sum of rows in bfloat16, back to back in a CUDA graph; the median of seven graphs, on the
slowest rank. Whether the sums are right, tests say (`tests/gpu/test_sums.py`).
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing

from baton.layers.tensor_parallel import Shard
from baton.transport import cuda_runtime
from baton.worker.ranks.communicator import Rendezvous, meet_on_gpus

CALLS = 20
SGL_BYTES = 2**23
"""So much SGLang gives its custom all-reduce at most."""


class SglSum:
    """`sgl_kernel`'s custom all-reduce, as SGLang uses it: into another tensor, and in a CUDA graph straight
    from the other ranks' tensors."""

    def __init__(self, rank: int, device: torch.device) -> None:
        from sgl_kernel import allreduce

        self._ops, self._rank = allreduce, rank
        sizes = allreduce.meta_size() + SGL_BYTES, SGL_BYTES
        self._memory = [torch.zeros(size, dtype=torch.uint8, device=device) for size in (*sizes, SGL_BYTES)]
        torch.cuda.synchronize(device)
        meta, self._buffers = (self._shared(part) for part in self._memory[:2])
        self._sum = allreduce.init_custom_ar(meta, self._memory[2], rank, True)
        allreduce.register_buffer(self._sum, self._buffers)

    def _shared(self, memory: torch.Tensor) -> list[int]:
        """Where each rank's such memory is for this one."""
        handle, offset = cuda_runtime.export_memory(memory.data_ptr())
        theirs = gathered((handle, offset))
        places = [memory.data_ptr()] * len(theirs)
        for rank, (handle, offset) in enumerate(theirs):
            if rank != self._rank:
                places[rank] = cuda_runtime.open_memory(handle) + offset
        return places

    def __call__(self, x: torch.Tensor, out: torch.Tensor) -> None:
        if torch.cuda.is_current_stream_capturing():
            self._ops.all_reduce(self._sum, x, out, 0, 0)
        else:
            self._ops.all_reduce(self._sum, x, out, self._buffers[self._rank], SGL_BYTES)

    def captured(self) -> None:
        """A graph may be replayed after this."""
        told = gathered(self._ops.get_graph_buffer_ipc_meta(self._sum))
        self._ops.register_graph_buffers(self._sum, [handles for handles, _ in told], [at for _, at in told])


def gathered(what: Any) -> list[Any]:
    """What each rank has."""
    all_of_it = [None] * dist.get_world_size()
    dist.all_gather_object(all_of_it, what)
    return all_of_it


def timed(
    call: Callable[[], object], device: torch.device, captured: Callable[[], object] = lambda: None
) -> float:
    """Microseconds a call. `captured`: called between the capture of a graph and its first replay."""
    stream = torch.cuda.Stream(device)
    with torch.cuda.stream(stream):
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        for _ in range(CALLS):
            call()
    captured()
    times = []
    for _ in range(7):
        dist.barrier()
        torch.cuda.synchronize()
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) * 1e3 / CALLS)
    slowest = torch.tensor([sorted(times)[3]], device=device)
    dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
    return slowest.item()


def measure(rank: int, options: argparse.Namespace, folder: Path) -> None:
    device = torch.device("cuda", rank)
    torch.cuda.set_device(device)
    method = f"file://{folder}/nccl"
    dist.init_process_group("nccl", init_method=method, rank=rank, world_size=options.ranks, device_id=device)
    own = meet_on_gpus(Shard(rank, options.ranks), Rendezvous(str(folder / "own")), 30.0, device)
    sgl = SglSum(rank, device)
    norm = torch.ones(options.columns, device=device, dtype=torch.bfloat16)
    for rows in options.rows:
        x = torch.zeros(rows, options.columns, device=device, dtype=torch.bfloat16)
        residual = torch.zeros_like(x)
        found = {
            "sum": timed(lambda x=x: own.all_reduce(x), device),
            "with the norm": timed(lambda x=x, r=residual: own.add_norm(r, x[None], norm, x, 1e-6), device),
            "NCCL's sum": timed(lambda x=x: dist.all_reduce(x), device),
        }
        if x.nbytes <= SGL_BYTES:
            ones, out = torch.ones_like(x), torch.empty_like(x)
            found["sgl_kernel's sum"] = timed(lambda x=ones, y=out: sgl(x, y), device, sgl.captured)
            assert (out == options.ranks).all()
        if rank == 0:
            print(
                f"{rows:6} rows:", ", ".join(f"{name} {us:.1f} us" for name, us in found.items()), flush=True
            )
    own.check()
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ranks", type=int, default=torch.cuda.device_count(), help="on a GPU each")
    parser.add_argument("--columns", type=int, default=4096)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8, 16, 32, 64, 128, 256, 1024, 8192])
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        torch.multiprocessing.spawn(measure, (options, Path(folder)), nprocs=options.ranks)


if __name__ == "__main__":
    main()
