"""The share of a steady decode in which the GPU is idle: the in-process engine under torch.profiler.

    python benchmarks/gpu_trace.py --models 0.6b,8b --batches 64,256 --out DIR

Random weights, overlap, CUDA graphs; the last steps of a run in which all rows decode. "idle" is the time in
which no kernel runs, with the microsecond or so between dependent kernels; "long" is the part in gaps of more
than 5 us, in which the device waits for the host. The profiler adds to both. Writes DIR/gpu_trace.json and
prints a row for each batch.
"""

from __future__ import annotations

import argparse
import dataclasses
import gc
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch

from baton.bench.engine_bench import EngineBench
from baton.bench.machine import machine, versions
from baton.bench.steps import Point
from baton.config import WorkerConfig
from baton.rpc.logs import configure

sys.path.append(str(Path(__file__).parent.parent / "tools"))

from gaps import trace_decode
from make_shape import write_shape


def measure(model: str, batches: list[int], options: argparse.Namespace) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        write_shape(model, Path(folder))
        config = WorkerConfig(
            model=folder,
            load_format="dummy",
            device="cuda",
            kv_tokens=options.kv_tokens,
            max_rows=max(batches),
            token_budget=8192,
            batch_invariant=options.batch_invariant,
        )
        bench = EngineBench(config)
        facts: dict[str, Any] = bench.facts() | {"model": model}
        for batch in batches:
            found = trace_decode(bench, Point(batch, options.context), options.steps, options.temperature)
            facts[f"batch {batch}"] = dataclasses.asdict(found)
            print(
                f"{model:5} batch {batch:4} {found.steps} steps of {found.step_us / 1e3:.3f} ms, "
                f"{found.kernels:.0f} kernels: idle {found.idle_share:.2%}, long {found.long_share:.2%}",
                flush=True,
            )
        bench.close()
    return facts


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--models", default="0.6b,8b")
    parser.add_argument("--batches", default="64,256")
    parser.add_argument("--context", type=int, default=128, help="prompt tokens of each row")
    parser.add_argument("--steps", type=int, default=120)
    parser.add_argument("--temperature", type=float, default=0.6)
    parser.add_argument("--kv-tokens", type=int, default=200_000)
    parser.add_argument("--batch-invariant", action="store_true")
    parser.add_argument("--out", type=Path, default=Path())
    parser.add_argument("--commit", default="")
    options = parser.parse_args()
    configure("bench", "warning")
    options.out.mkdir(parents=True, exist_ok=True)
    report: dict[str, Any] = {"machine": machine(), "versions": versions(options.commit), "models": []}
    batches = [int(text) for text in options.batches.split(",")]
    for model in options.models.split(","):
        report["models"].append(measure(model, batches, options))
        (options.out / "gpu_trace.json").write_text(json.dumps(report, indent=1))
        gc.collect()
        torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
