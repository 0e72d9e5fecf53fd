"""The in-process engine on one GPU, random weights: scheduler and runner, without processes or gRPC.

    python benchmarks/gpu_offline.py --models 0.6b,8b --out DIR

Four fixed parts in one go, each model loaded once: TPOT at batch 1, 64 and 256, and the 256-request workload.
`baton bench step` and `baton bench offline --engine` measure the same at other sizes. Writes
DIR/gpu_offline.json and prints a row a part; `--profile` adds the kernels of some decode steps.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch

from baton.bench.engine_bench import EngineBench, EngineRun
from baton.bench.machine import machine, versions
from baton.bench.steps import Point, copy_bandwidth, profile, weight_bytes
from baton.bench.workload import Job, TokenRange, Workload
from baton.config import WorkerConfig
from baton.layers.cache_spec import STATE_ITEMSIZE, State
from baton.models.decoder import LanguageModel
from baton.models.loader import declared
from baton.rpc.logs import configure
from baton.worker.model import DTYPES

sys.path.append(str(Path(__file__).parent.parent / "tools"))

from make_shape import write_shape

NANO = Workload(
    prompt_tokens=TokenRange(100, 1024),
    output_tokens=TokenRange(100, 1024),
    requests=256,
    temperature=0.6,
    nano=True,
)
PARTS = {"b1": (1, 128, 256, 0.0), "b64": (64, 1024, 64, 0.0), "b256": (256, 128, 48, 0.6), "nano": None}
"""Rows, prompt tokens, output tokens, temperature."""


def figures(run: EngineRun) -> dict[str, Any]:
    host = {part: seconds * 1e3 for part, seconds in run.host.items()}
    return {
        "seconds": run.seconds,
        "tokens": run.tokens,
        "tok_s": run.tokens / run.seconds,
        "all_first_tokens_ms": run.first_tokens_seconds * 1e3,
        "tpot_ms": None if run.tpot is None else run.tpot * 1e3,
        "host_ms": host,
        "host_total_ms": sum(host.values()),
    }


def fixed(
    bench: EngineBench, rows: int, length: int, output: int, heat: float, repeats: int
) -> dict[str, Any]:
    """One run to warm up, then `repeats`; the median one by TPOT."""
    runs = []
    for repeat in range(repeats + 1):
        work = Workload(
            prompt_tokens=TokenRange(length, length),
            output_tokens=TokenRange(output, output),
            requests=rows,
            seed=repeat,
        )
        runs.append(figures(bench.run(work.jobs(bench.vocabulary, bench.context), heat)))
    del runs[0]
    chosen = sorted(runs, key=lambda run: run["tpot_ms"] or 0)[len(runs) // 2]
    firsts = statistics.median(run["all_first_tokens_ms"] for run in runs)
    return chosen | {"all_first_tokens_ms": firsts, "runs_tpot_ms": [run["tpot_ms"] for run in runs]}


def nano(bench: EngineBench, repeats: int) -> dict[str, Any]:
    """The median run by tokens per second."""
    jobs: list[Job] = NANO.jobs(bench.vocabulary, bench.context)
    runs = [figures(bench.run(jobs, NANO.temperature)) for _ in range(repeats)]
    chosen = sorted(runs, key=lambda run: run["tok_s"])[len(runs) // 2]
    inputs = sum(len(job.prompt) for job in jobs)
    return chosen | {"input_tokens": inputs, "runs_tok_s": [run["tok_s"] for run in runs]}


def step_bytes(bench: EngineBench, model: LanguageModel, rows: int, tokens: int) -> int:
    """Bytes that a decode step of so many rows moves, of so many tokens each: weights, of experts (16 bits)
    those that are chosen by rows that choose at random; keys and values; states, read and written."""
    total = float(weight_bytes(bench))
    for mixture in model.mixtures:
        experts = mixture.experts
        share = 1 - (1 - mixture.router.routing.top_k / experts.total) ** rows
        total -= (1 - share) * (experts.gate_up.nbytes + experts.down.nbytes)
    itemsize = bench.engine.pool.layout.dtype.itemsize
    for spec in model.caches:
        if isinstance(spec, State):
            total += rows * 2 * spec.numbers * STATE_ITEMSIZE
        else:
            total += rows * tokens * spec.values * itemsize
    return int(total)


def measure(model: str, folder: Path, options: argparse.Namespace, facts: dict[str, Any]) -> None:
    """Fills in `facts` part by part."""
    write_shape(model, folder)
    config = WorkerConfig(
        model=str(folder),
        load_format="dummy",
        device=options.device,
        tp=options.tp,
        ep=options.ep,
        page_size=options.page_size,
        kv_tokens=options.kv_tokens,
        kv_dtype=options.kv_dtype,
        max_rows=options.max_rows,
        token_budget=options.budget,
        batch_invariant=options.batch_invariant,
        prefill_attention=options.prefill_attention,
        decode_attention=options.decode_attention,
        quantization=options.quantization,
        quantize_head=options.quantize_head,
    )
    bench = EngineBench(config)
    weights = weight_bytes(bench)
    layers = declared(bench.path, DTYPES[bench.engine.model_info.dtype])
    bandwidth = copy_bandwidth(bench.engine.device)
    facts |= bench.facts() | {
        "model": model,
        "quantization": options.quantization,
        "quantize_head": options.quantize_head,
        "tp": options.tp,
        "ep": options.ep,
        "floor_ms": weights / options.tp / bandwidth * 1e3,
        "bandwidth": bandwidth,
    }
    print({k: round(v, 3) if isinstance(v, float) else v for k, v in facts.items()}, flush=True)
    for part in options.parts.split(","):
        sizes = PARTS[part]
        result = nano(bench, options.nano_repeats) if sizes is None else fixed(bench, *sizes, options.repeats)
        facts[part] = result
        floor = ""
        if sizes is not None:
            count, prompt, output, _ = sizes
            moved = step_bytes(bench, layers, count, prompt + output // 2)
            result["step_bytes"], result["floor_ms"] = moved, moved / options.tp / bandwidth * 1e3
            floor = f"(floor {result['floor_ms']:.3f})"
        tpot = f"{result['tpot_ms']:.3f} ms" if result["tpot_ms"] else "-"
        host = " ".join(f"{name} {ms:.3f}" for name, ms in result["host_ms"].items())
        print(
            f"{model:5} {part:5} TPOT {tpot:10} {floor} first tokens {result['all_first_tokens_ms']:8.1f} ms "
            f"{result['tok_s']:9.0f} tok/s  host {result['host_total_ms']:.3f} ms ({host})",
            flush=True,
        )
    for rows in [rows for rows in (1, 64, 256) if rows <= options.max_rows] if options.profile else ():
        print(f"-- {model}, {rows} rows of 128: us and calls a decode step (prompts included)")
        for name, us, calls in profile(
            bench, Point(rows, 128), steps=24, temperature=0.6, folder=options.out / model
        )[:16]:
            print(f"{us:9.1f} {calls:7.1f}  {name[:90]}", flush=True)
    bench.close()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--models", default="0.6b,8b")
    parser.add_argument("--parts", default=",".join(PARTS))
    parser.add_argument("--out", type=Path, default=Path())
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--tp", type=int, default=1, help="ranks, on a GPU each")
    parser.add_argument("--ep", action="store_true", help="whole experts on each rank")
    parser.add_argument("--page-size", type=int, default=64)
    parser.add_argument("--kv-tokens", type=int, default=400_000)
    parser.add_argument("--kv-dtype", default="auto", help="auto or fp8_e4m3")
    parser.add_argument("--max-rows", type=int, default=256)
    parser.add_argument("--budget", type=int, default=8192)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--nano-repeats", type=int, default=3)
    parser.add_argument("--prefill-attention", default="auto")
    parser.add_argument("--decode-attention", default="auto")
    parser.add_argument("--commit", default="")
    parser.add_argument("--batch-invariant", action="store_true", help="what that mode costs")
    parser.add_argument("--quantization", default="auto", help="fp8, int8 or int4, while loading")
    parser.add_argument("--quantize-head", action="store_true")
    parser.add_argument("--profile", action="store_true")
    options = parser.parse_args()
    configure("bench", "warning")
    options.out.mkdir(parents=True, exist_ok=True)
    report: dict[str, Any] = {"machine": machine(), "versions": versions(options.commit), "models": []}
    print(report["versions"], flush=True)
    for model in options.models.split(","):
        facts: dict[str, Any] = {}
        report["models"].append(facts)
        with tempfile.TemporaryDirectory() as folder:
            measure(model, Path(folder), options, facts)
        (options.out / "gpu_offline.json").write_text(json.dumps(report, indent=1))
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
