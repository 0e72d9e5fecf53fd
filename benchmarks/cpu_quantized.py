"""Quantized weights on a CPU against float32: tokens per second of one stream, and of 16, in one run.

    python benchmarks/cpu_quantized.py --model smollm2 --json benchmarks/results/cpu_quantized.json
    python benchmarks/cpu_quantized.py --products    single products of `int8` and of float32, by rows

The engine alone, greedy, in this process, by the processor's time divided by the number of threads. All ways
of holding the weights are in memory at the same time and take turns, a few steps each, so that a busy machine
disturbs all; medians. "8x512" is a random Qwen3 of 8 layers and 512 hidden. With xllamacpp installed (it is
llama.cpp), that computes the same GGUF file with as many threads, one stream: its whole step, sampling and
text too.
"""

from __future__ import annotations

import os

# Threads spin little while they wait: what `baton up` sets for its workers (cli/supervisor.py).
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
os.environ.setdefault("GOMP_SPINCOUNT", "1000")

import gc
import importlib.util
import statistics
import tempfile
import time
import timeit
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from cpu_vs_transformers import make_random_model
from rich.console import Console
from rich.table import Table
from shared import make_parser, save_results

from baton.attention.registry import resolve as resolve_attention
from baton.cli.console import table
from baton.engine.model_runner import ModelRunner
from baton.engine.plan import PlanRow, SlotInit, StepPlan
from baton.engine.sampling_params import SamplingParams
from baton.kvcache.kv_pool import PagePool, PoolLayout
from baton.layers.quantization.int8_cpu import MOST_ROWS, Int8Matrix
from baton.model_path import resolve
from baton.models.loader import load_model, weight_bytes

PAGE, ROWS, CONTEXT, TURN = 16, 16, 512, 4
GREEDY = SamplingParams(temperature=0.0)


class Engine:
    """A runner with one way of holding the weights, and `ROWS` sequences of a few tokens."""

    def __init__(self, path: Path, options: dict[str, Any]) -> None:
        self.options = options
        self.mib = weight_bytes(path, torch.float32, CONTEXT, **options) / 2**20
        model = load_model(path, torch.float32, context_length=CONTEXT, **options)
        layout = PoolLayout.of(model.caches, PAGE, model.dtype)
        each = CONTEXT // PAGE
        pool = PagePool(layout, ROWS * each)
        pool.raw.zero_()
        backend, _ = resolve_attention("auto", torch.device("cpu"))
        self.runner = ModelRunner(
            model, pool, max_slots=ROWS, prefill_attention=backend, decode_attention=backend
        )
        self.pages = [tuple(range(slot * each, (slot + 1) * each)) for slot in range(ROWS)]
        self.number, self.at = 0, 16
        rows = [PlanRow(slot, tuple(range(16)), 0, (self.pages[slot],), (slot,)) for slot in range(ROWS)]
        inits = [SlotInit(slot, GREEDY, 0, tuple(range(16)), ()) for slot in range(ROWS)]
        self._run(rows, inits)

    def _run(self, rows: list[PlanRow], inits: list[SlotInit] | None = None) -> float:
        self.number += 1
        started = time.process_time()
        self.runner.read(self.runner.launch(StepPlan(self.number, tuple(rows), tuple(inits or ()))))
        return time.process_time() - started

    def steps(self, rows: int, count: int) -> list[float]:
        """Seconds of each of so many decode steps."""
        found = []
        for _ in range(count):
            plan = [PlanRow(slot, None, self.at, (self.pages[slot],), (slot,)) for slot in range(rows)]
            found.append(self._run(plan))
        return found


def llama_cpp(path: Path, threads: int) -> Callable[[int], list[float]] | None:
    """Seconds a token of a run of so many tokens by llama.cpp; None where it is not installed."""
    if path.suffix != ".gguf" or importlib.util.find_spec("xllamacpp") is None:
        return None
    import xllamacpp

    params = xllamacpp.CommonParams()
    params.model.path, params.n_ctx, params.n_parallel = str(path), CONTEXT, 1
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = threads
    server = xllamacpp.Server(params)

    def steps(count: int) -> list[float]:
        # The prompt's one token is computed as the others are.
        request = {"prompt": [1], "n_predict": count, "temperature": 0, "ignore_eos": True}
        started = time.process_time()
        answer = server.handle_completions({**request, "cache_prompt": False})
        spent = time.process_time() - started
        made = answer["timings"]["predicted_n"]
        if made != count:
            raise SystemExit(f"llama.cpp made {made} tokens instead of {count}")
        return [spent / count]

    return steps


def measure(name: str, path: Path, threads: int, turns: int) -> dict[str, Any]:
    torch.set_num_threads(threads)
    ways: dict[str, dict[str, Any]] = {
        "float32": {"quantization": "none"},
        **({"as stored": {}} if path.is_file() else {}),
        "int8": {"quantization": "int8"},
        "int8 with head": {"quantization": "int8", "quantize_head": True},
        "int4": {"quantization": "int4"},
        "int4 with head": {"quantization": "int4", "quantize_head": True},
    }
    engines = {way: Engine(path, options) for way, options in ways.items()}
    other = llama_cpp(path, threads)
    gc.collect()
    times: dict[str, dict[int, list[float]]] = {way: {1: [], ROWS: []} for way in [*engines, "llama.cpp"]}
    for turn in range(turns + 1):
        for way, engine in engines.items():
            for rows in (1, ROWS):
                found = engine.steps(rows, TURN if rows == 1 else 1)
                if turn:  # the first turn warms up
                    times[way][rows] += found
        if other is not None and turn:
            times["llama.cpp"][1] += other(4 * TURN)
    results: dict[str, Any] = {}
    for way, by_rows in times.items():
        if by_rows[1]:
            rates = {rows: threads * rows / statistics.median(own) for rows, own in by_rows.items() if own}
            results[way] = {
                "tokens_per_second": rates,
                "ratio": {
                    n: rate / results.get("float32", {"tokens_per_second": rates})["tokens_per_second"][n]
                    for n, rate in rates.items()
                },
                "mib": engines[way].mib if way in engines else path.stat().st_size / 2**20,
            }
    return {"model": name, "threads": threads, "ways": results}


def product_times(threads: int) -> Table:
    """Least milliseconds of single products."""
    torch.set_num_threads(threads)
    shown = table("outputs x inputs", "rows", "int8, ms", "float32, ms")
    for shape in ((4096, 4096), (2048, 512)):
        codes = torch.randint(-127, 128, shape, dtype=torch.int8)
        matrix, weights = Int8Matrix(codes, torch.rand(shape[0])), codes.float().t()
        for rows in (1, 4, ROWS, MOST_ROWS, 256):
            x = torch.randn(rows, shape[1])

            def least(product: Callable[[torch.Tensor], object], x: torch.Tensor = x) -> str:
                return f"{min(timeit.repeat(lambda: product(x), number=1, repeat=30)) * 1e3:.3g}"

            shown.add_row(
                f"{shape[0]} x {shape[1]}",
                str(rows),
                least(matrix.multiply),
                least(lambda x, w=weights: x @ w),
            )
    return shown


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--model", action="append", help="8x512, or what `baton up --model` takes")
    parser.add_argument("--threads", type=int, default=1, help="of tensor operations")
    parser.add_argument("--turns", type=int, default=12)
    parser.add_argument("--products", action="store_true", help="time single products instead")
    args = parser.parse_args()
    if args.products:
        Console().print(product_times(args.threads))
        return
    results = []
    with tempfile.TemporaryDirectory() as folder:
        for name in args.model or ["smollm2", "8x512"]:
            if name == "8x512":
                make_random_model(Path(folder))
            path = Path(folder) if name == "8x512" else resolve(name)
            result = measure(name, path, args.threads, args.turns)
            results.append(result)
            shown = table(name, "MiB", "tok/s, 1 row", f"{ROWS} rows", "ratio, 1 row", f"{ROWS} rows")
            for way, found in result["ways"].items():
                rates, ratios = found["tokens_per_second"], found["ratio"]
                shown.add_row(
                    *(way, f"{found['mib']:.0f}"),
                    *(f"{rates[n]:.1f}" if n in rates else "-" for n in (1, ROWS)),
                    *(f"{ratios[n]:.2f}" if n in ratios else "-" for n in (1, ROWS)),
                )
            Console().print(shown)
    save_results(args, {"results": results})


if __name__ == "__main__":
    main()
