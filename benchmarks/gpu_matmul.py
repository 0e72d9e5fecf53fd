"""Matrix products of the batch-invariant mode beside cuBLAS, for the projections of Qwen3-0.6B and 8B.

    python benchmarks/gpu_matmul.py --rows 1,16,64,128,256,2048

Microseconds a product, back to back in a CUDA graph, over copies of the weight that no cache holds. `--tiles`
tries others than the one in use: ROWSxCOLUMNSxINNERxWARPSxSTAGES[p], p for persistent, comma-separated.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable

import torch

from baton.layers.kernels.batch_invariant_matmul import MatmulTile, matmul, tile_for
from baton.layers.linear import Linear

SHAPES = {
    "8b qkv": (6144, 4096),
    "8b output": (4096, 4096),
    "8b gate-up": (24576, 4096),
    "8b down": (4096, 12288),
    "0.6b qkv": (4096, 1024),
    "0.6b output": (1024, 2048),
    "0.6b gate-up": (6144, 1024),
    "0.6b down": (1024, 3072),
    "0.6b head": (151936, 1024),
}
COPIES_BYTES = 300e6


def timed(call: Callable[[Linear], object], linears: list[Linear]) -> float:
    """Microseconds a call."""
    for linear in linears[:2]:
        call(linear)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for linear in linears:
            call(linear)
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    times = []
    for _ in range(5):
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) * 1e3 / len(linears))
    return sorted(times)[len(times) // 2]


def tile(text: str) -> MatmulTile:
    return MatmulTile(*map(int, text.rstrip("p").split("x")), persistent=text.endswith("p"))


@torch.inference_mode()
def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rows", default="1,16,64,128,256,2048")
    parser.add_argument("--shapes", default=",".join(SHAPES))
    parser.add_argument("--tiles", default="")
    options = parser.parse_args()
    for name in options.shapes.split(","):
        columns, inner = SHAPES[name]
        count = max(2, min(24, round(COPIES_BYTES / (columns * inner * 2))))
        linears = [Linear(torch.randn(columns, inner, device="cuda").bfloat16()) for _ in range(count)]
        for rows in map(int, options.rows.split(",")):
            x = torch.randn(rows, inner, device="cuda").bfloat16()
            library = timed(lambda linear, x=x: linear(x), linears)
            tiles = [tile(text) for text in options.tiles.split(",") if text] or [tile_for(rows, columns)]
            found = []
            for each in tiles:
                try:
                    us = timed(lambda linear, x=x, each=each: matmul(x, linear, tile=each), linears)
                except Exception as error:  # A tile that the device has no room for.
                    found.append(f"{each}: {str(error)[:60]}")
                    continue
                size = f"{each.rows}x{each.columns}x{each.inner}x{each.warps}x{each.stages}"
                found.append(f"{us:.1f} ({size}{'p' if each.persistent else ''})")
            print(f"{name:13} {rows:5} rows  cuBLAS {library:7.1f}  {'  '.join(found)}", flush=True)


if __name__ == "__main__":
    main()
