"""Products of quantized weights beside 16 bits, for the projections of an 8B model, on one GPU.

    python benchmarks/gpu_quantized.py --rows 1,16,64,256,4096

Microseconds a product, back to back in a CUDA graph, over copies of the weight that no cache holds.
Activations are quantized before. `--tiles` tries others for one row: ROWSxPIECESxWARPS, comma-separated.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Iterator

import torch
import torch.nn.functional as F

from baton.layers.kernels import gemm, quantized_gemm, quantized_gemv
from baton.layers.kernels.quantized_linear import quantize_for
from baton.layers.kernels.scaled_mm import scaled_product
from baton.layers.linear import Linear
from baton.layers.quantization.weight_method import QuantizedWeight, WeightMethod

SHAPES = {"gate-up": (24576, 4096), "down": (4096, 12288), "qkv": (6144, 4096), "output": (4096, 4096)}
KINDS = {
    "fp8": WeightMethod(8, floating=True),
    "blocks": WeightMethod(8, 128, floating=True, rows=128),
    "int8": WeightMethod(8),
    "int4": WeightMethod(4, 64),
}
COPIES_BYTES = 200e6
CUDA = torch.device("cuda")
Block = tuple[int, int, int]
Calls = list[Callable[[], object]]


def made(method: WeightMethod, rows: int, columns: int) -> QuantizedWeight:
    """Of random codes and scales, at once on the device."""
    weight = QuantizedWeight(method, rows, columns, CUDA)
    raw = torch.randint(0, 256, weight.codes.shape, device=CUDA, dtype=torch.uint8)
    if method.floating:
        raw = torch.where((raw & 127) == 127, 0, raw)  # not a number
    weight.codes.copy_(raw.view(weight.codes.dtype))
    weight.scale.uniform_(0.5, 1.5).div_((1.0 if method.bits == 4 else 100.0) * math.sqrt(columns))
    if weight.zero is not None:
        weight.zero.uniform_(5, 11).round_()
    return weight


def timed(calls: Calls) -> float:
    """Microseconds a call."""
    for call in calls[:2]:
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    times = []
    for _ in range(5):
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) * 1e3 / len(calls))
    return sorted(times)[len(times) // 2]


def products(
    weight: QuantizedWeight, name: str, rows: int, blocks: list[Block]
) -> Iterator[tuple[str, Calls]]:
    """Those that compute so many rows, each as a list of one call."""
    gated, linear = name == "gate-up", Linear(weight)
    x = torch.randn(rows, weight.shape[1], device=CUDA).bfloat16()
    if rows == 1:
        out = torch.zeros(1, weight.shape[0] // (2 if gated else 1), device=CUDA, dtype=torch.bfloat16)
        norm = x[0] if name in ("gate-up", "qkv") else None
        for block in blocks or [None]:
            label = "x".join(map(str, block)) if block else "one row"
            yield (
                label,
                [
                    lambda b=block: quantized_gemv.gemv(
                        x, weight, out, norm=norm, eps=1e-6, gated=gated, add=not gated, block=b
                    )
                ],
            )
        return
    if rows <= gemm.MOST_ROWS:
        few = quantized_gemm.gated if gated else quantized_gemm.project_parts
        yield "16 bits", [lambda: few(x, weight)]
    if weight.bits == 4:
        return
    q = quantize_for(weight, x)
    yield "sgl_kernel", [lambda: scaled_product(q, weight, x.dtype)]
    if rows <= gemm.MOST_ROWS:
        yield (
            "8 bits",
            [lambda: gemm.gated(q, linear, x.dtype) if gated else gemm.project_parts(q, linear)],
        )


@torch.inference_mode()
def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rows", default="1,16,64,256,4096")
    parser.add_argument("--shapes", default=",".join(SHAPES))
    parser.add_argument("--kinds", default=",".join(KINDS))
    parser.add_argument("--tiles", default="")
    options = parser.parse_args()
    blocks: list[Block] = []
    for text in filter(None, options.tiles.split(",")):
        height, pieces, warps = map(int, text.split("x"))
        blocks.append((height, pieces, warps))
    for rows in map(int, options.rows.split(",")):
        for name in options.shapes.split(","):
            columns, inner = SHAPES[name]
            count = max(2, round(COPIES_BYTES / (columns * inner)))
            x = torch.randn(rows, inner, device=CUDA).bfloat16()
            plain = [torch.randn(columns, inner, device=CUDA).bfloat16() for _ in range(max(2, count // 2))]
            found = [f"bf16 {timed([lambda w=w, x=x: F.linear(x, w) for w in plain]):.1f}"]
            del plain
            for kind in options.kinds.split(","):
                weights = [made(KINDS[kind], columns, inner) for _ in range(count)]
                lists = [list(products(weight, name, rows, blocks)) for weight in weights]
                for each in zip(*lists, strict=True):
                    us = timed([call for _, calls in each for call in calls])
                    found.append(f"{kind} {each[0][0]} {us:.1f}")
            print(f"{name:8} {rows:5} rows  {'  '.join(found)}", flush=True)


if __name__ == "__main__":
    main()
