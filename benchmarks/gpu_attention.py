"""Attention backends on one GPU: microseconds a layer, back to back in a CUDA graph, keys differ by layer.

    python benchmarks/gpu_attention.py --out DIR

Decode rows of equal length, then prompt chunks, for the heads of Qwen3-0.6B (16) and 8B (32), 8 KV heads of
128. "Floor": bytes of the rows' keys and values over the copy bandwidth. Writes DIR/gpu_attention.json.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from baton.attention.base import AttentionRows
from baton.attention.fa3 import Fa3Attention
from baton.attention.flashinfer_paged import FlashInferAttention
from baton.attention.paged import PagedAttention
from baton.attention.triton_paged import TritonAttention
from baton.bench.machine import versions
from baton.bench.steps import copy_bandwidth
from baton.engine.plan import PlanRow
from baton.kvcache.kv_pool import KvLayout, KvPool

LAYERS, KV_HEADS, DIM, PAGE = 28, 8, 128, 64
CUDA = torch.device("cuda")
BACKENDS: tuple[type[PagedAttention], ...] = (Fa3Attention, TritonAttention, FlashInferAttention)
"""Those that are installed are measured."""


def microseconds(work: Callable[[], None], calls: int) -> float:
    """Of one of the calls in `work`: the best of three series of ten replays."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        work()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        work()
    graph.replay()
    series = []
    for _ in range(3):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        for _ in range(10):
            graph.replay()
        end.record()
        torch.cuda.synchronize()
        series.append(begin.elapsed_time(end) / 10 / calls * 1e3)
    return min(series)


def measure(pool: KvPool, heads: int, rows: int, keys: int, count: int) -> dict[str, float]:
    """Each backend's time for rows of `count` tokens that end at `keys`."""
    width = -(-keys // PAGE)
    table = torch.randperm(pool.num_pages, device=CUDA)[: rows * width].to(torch.int32).view(rows, width)
    lengths = torch.full((rows,), keys, device=CUDA, dtype=torch.int32)
    starts = None if count == 1 else torch.arange(0, rows + 1, device=CUDA, dtype=torch.int32) * count
    q = torch.randn(rows * count, heads + 2 * KV_HEADS, DIM, device=CUDA, dtype=torch.bfloat16)[:, :heads]
    out = torch.empty(rows * count, heads, DIM, device=CUDA, dtype=torch.bfloat16)
    found = {}
    host = [PlanRow(row, (0,) * count, keys - count, ((),)) for row in range(rows)]
    for kind in BACKENDS:
        if kind.available(CUDA) is not None:
            continue
        backend = kind(pool, heads)
        paged = AttentionRows(host, 0, rows * count, (table,), lengths, starts, count)
        backend.plan(paged)

        def work(backend: PagedAttention = backend, paged: AttentionRows = paged) -> None:
            for layer in range(LAYERS):
                backend.attend(layer, q, out, paged)

        found[kind.name] = microseconds(work, LAYERS)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, default=Path())
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    pool = KvPool(KvLayout(LAYERS, KV_HEADS, DIM, PAGE, torch.bfloat16), 8 * 512, CUDA)
    pool.pages.normal_()
    bandwidth = copy_bandwidth(CUDA)
    report: dict[str, Any] = {"versions": versions(), "decode": [], "chunks": []}
    print(report["versions"], flush=True)
    decode = [(rows, keys, 1) for rows in (1, 2, 4, 8) for keys in (128, 1024, 4096, 16384, 32768)]
    chunks = [(1, 2048, 2048), (1, 4096, 2048), (8, 1024, 1024), (4, 4096, 128)]
    with torch.inference_mode():
        for heads in (16, 32):
            for rows, keys, count in (*decode, *chunks):
                found = measure(pool, heads, rows, keys, count)
                floor = rows * keys * 2 * KV_HEADS * DIM * 2 / bandwidth * 1e6
                facts = {"heads": heads, "rows": rows, "keys": keys, "tokens": count, "floor": floor, **found}
                report["decode" if count == 1 else "chunks"].append(facts)
                times = "  ".join(f"{name} {value:7.2f}" for name, value in found.items())
                print(
                    f"heads {heads:2} rows {rows} keys {keys:5} tokens {count:4}  floor {floor:6.1f}  {times}"
                )
    (options.out / "gpu_attention.json").write_text(json.dumps(report, indent=1))


if __name__ == "__main__":
    main()
