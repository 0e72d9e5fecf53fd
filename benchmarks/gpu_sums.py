"""Sums among ranks, on a GPU each: ours, alone and with the norm that follows, beside NCCL's.

    python benchmarks/gpu_sums.py --ranks 4

Microseconds a sum of rows in bfloat16, back to back in a CUDA graph; the median of seven graphs, on the
slowest rank. Whether the sums are right, tests say (`tests/gpu/test_sums.py`).
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing

from baton.layers.shard import Shard
from baton.ranks.communicator import Rendezvous, meet_on_gpus

CALLS = 20


def timed(call: Callable[[], object], device: torch.device) -> float:
    """Microseconds a call."""
    stream = torch.cuda.Stream(device)
    with torch.cuda.stream(stream):
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        for _ in range(CALLS):
            call()
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
    dist.init_process_group("nccl", init_method=f"file://{folder}/nccl", rank=rank, world_size=options.ranks)
    own = meet_on_gpus(Shard(rank, options.ranks), Rendezvous(folder / "own"), 30.0, device)
    norm = torch.ones(options.columns, device=device, dtype=torch.bfloat16)
    for rows in options.rows:
        x = torch.zeros(rows, options.columns, device=device, dtype=torch.bfloat16)
        residual = torch.zeros_like(x)
        found = {
            "sum": timed(lambda x=x: own.all_reduce(x), device),
            "with the norm": timed(lambda x=x, r=residual: own.add_norm(r, x[None], norm, x, 1e-6), device),
            "NCCL's sum": timed(lambda x=x: dist.all_reduce(x), device),
        }
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
