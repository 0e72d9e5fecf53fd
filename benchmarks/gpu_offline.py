"""The in-process engine on one GPU, random weights: scheduler and runner, without processes or gRPC.

    python benchmarks/gpu_offline.py --models 0.6b,8b --out DIR

Writes DIR/gpu_offline.json and prints a table. `--profile` adds the kernels of some decode steps.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import itertools
import json
import platform
import random
import statistics
import subprocess
import tempfile
import time
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from baton.engine.cuda_runner import CudaRunner
from baton.engine.request import Request, TokenEvent
from baton.engine.sampling import SamplingParams
from baton.engine.scheduler import Scheduler, SchedulerConfig
from baton.kvcache import KvCache, PageAllocator, PrefixTree
from baton.kvcache.pool import KvLayout, KvPool
from baton.models.loader import load_model

SHAPES: dict[str, dict[str, Any]] = {
    "0.6b": {
        "hidden_size": 1024,
        "intermediate_size": 3072,
        "num_hidden_layers": 28,
        "tie": True,
        "heads": 16,
    },
    "8b": {
        "hidden_size": 4096,
        "intermediate_size": 12288,
        "num_hidden_layers": 36,
        "tie": False,
        "heads": 32,
    },
}
COPY_BANDWIDTH = 4.22e12
"""Bytes a second, read and written, of a device copy on an H200 (measured); the floor of a decode step."""


def config_of(shape: dict[str, Any]) -> dict[str, Any]:
    return {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "vocab_size": 151936,
        "hidden_size": shape["hidden_size"],
        "intermediate_size": shape["intermediate_size"],
        "num_hidden_layers": shape["num_hidden_layers"],
        "num_attention_heads": shape["heads"],
        "num_key_value_heads": 8,
        "head_dim": 128,
        "max_position_embeddings": 40960,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1000000.0,
        "hidden_act": "silu",
        "attention_bias": False,
        "tie_word_embeddings": shape["tie"],
        "torch_dtype": "bfloat16",
    }


class Bench:
    """A model of random weights, its pool and runner."""

    def __init__(self, name: str, options: argparse.Namespace) -> None:
        device = torch.device("cuda")
        self.options = options
        self.facts: dict[str, Any] = {"model": name}
        with tempfile.TemporaryDirectory() as folder:
            (Path(folder) / "config.json").write_text(json.dumps(config_of(SHAPES[name])))
            started = time.monotonic()
            model = load_model(Path(folder), torch.bfloat16, device, "dummy")
            torch.cuda.synchronize()
            self.facts["load_s"] = time.monotonic() - started
        config = model.config
        self.model = model
        self.weight_bytes = 2 * (
            model.num_parameters - (0 if config.tied else model.weights.embedding.numel())
        )
        layout = KvLayout(
            config.num_layers, config.num_kv_heads, config.head_dim, options.page_size, model.dtype
        )
        room = torch.cuda.mem_get_info()[0] - options.reserve * 2**30
        self.num_pages = min(int(room // layout.page_bytes), options.kv_tokens // options.page_size)
        self.pool = KvPool(layout, self.num_pages, device, spare=1)
        self.pool.raw.zero_()
        self.runner = CudaRunner(
            model, self.pool, max_slots=options.max_rows, context_length=config.context_length
        )
        assert self.runner.graphs is not None
        self.facts |= {
            "graphs_s": self.runner.graphs.seconds,
            "graphs_mib": self.runner.graphs.bytes / 2**20,
            "kv_tokens": self.num_pages * options.page_size,
            "floor_ms": self.weight_bytes / COPY_BANDWIDTH * 1e3,
        }

    def run(self, work: list[tuple[list[int], SamplingParams]]) -> dict[str, Any]:
        """Submits all at once and runs to the end; times of steps, and of the host within them."""
        cache = KvCache(PageAllocator(self.num_pages), PrefixTree(self.options.page_size))
        config = SchedulerConfig(
            context_length=40960, token_budget=self.options.budget, max_rows=self.options.max_rows
        )
        scheduler = Scheduler(cache, config)
        for key, (prompt, params) in enumerate(work):
            scheduler.submit(Request(key, tuple(prompt), params))
        torch.cuda.synchronize()
        gc.collect()
        gc.freeze()
        clock = time.perf_counter
        started = clock()
        pending = None
        waiting, firsts, tokens = len(work), 0.0, 0
        seen: set[Any] = set()
        ends: list[tuple[float, int, bool]] = []
        host: list[tuple[float, float, float, float]] = []
        while scheduler.requests:
            t0 = clock()
            step = scheduler.plan()
            t1 = clock()
            launched = (step, self.runner.launch(step.plan)) if step is not None else None
            t2 = clock()
            if pending is not None:
                pending[1].done.synchronize()
                t3 = clock()
                result = self.runner.read(pending[1])
                t4 = clock()
                scheduler.commit(pending[0], result)
                for event in scheduler.take_events():
                    if isinstance(event, TokenEvent):
                        tokens += 1
                        seen.add(event.sequence.request.key)
                now = clock()
                if waiting and len(seen) == len(work):
                    waiting, firsts = 0, now - started
                rows = pending[0].plan.rows
                decode = all(row.tokens is None for row in rows)
                ends.append((now, len(rows), decode))
                if decode and step is not None and len(step.plan.rows) == len(rows):
                    host.append((t1 - t0, t2 - t1, t4 - t3, now - t4))
            pending = launched
        total = clock() - started
        steady = [
            (b[0] - a[0]) * 1e3
            for a, b in itertools.pairwise(ends)
            if a[2] and b[2] and b[1] == len(work) and a[1] == b[1]
        ]
        parts = [statistics.median(part) * 1e3 for part in zip(*host, strict=True)] if host else [0.0] * 4
        return {
            "seconds": total,
            "tokens": tokens,
            "tok_s": tokens / total,
            "all_first_tokens_ms": firsts * 1e3,
            "tpot_ms": statistics.median(steady) if steady else None,
            "tpot_mean_ms": statistics.fmean(steady) if steady else None,
            "host_ms": dict(zip(("plan", "launch", "read", "commit"), parts, strict=True)),
            "host_total_ms": sum(parts),
        }

    def prompts(self, count: int, length: int, seed: int) -> list[list[int]]:
        rng = random.Random(seed)
        return [[rng.randrange(10000) for _ in range(length)] for _ in range(count)]

    def fixed(self, count: int, length: int, output: int, temperature: float = 0.0) -> dict[str, Any]:
        """`count` prompts of `length`, several times; the median run by TPOT."""
        runs = []
        for repeat in range(self.options.repeats + 1):
            work = [
                (p, SamplingParams(temperature=temperature, max_tokens=output, seed=i))
                for i, p in enumerate(self.prompts(count, length, 1000 * repeat + count))
            ]
            runs.append(self.run(work))
        runs = runs[1:]
        chosen = sorted(runs, key=lambda r: r["tpot_ms"] or 0)[len(runs) // 2]
        firsts = statistics.median(r["all_first_tokens_ms"] for r in runs)
        return chosen | {"all_first_tokens_ms": firsts, "runs_tpot_ms": [r["tpot_ms"] for r in runs]}

    def nano(self) -> dict[str, Any]:
        """nano-vllm's workload: 256 requests of 100 to 1024 tokens in and out, seed 0, temperature 0.6."""
        rng = random.Random(0)
        prompts = [[rng.randint(0, 10000) for _ in range(rng.randint(100, 1024))] for _ in range(256)]
        outputs = [rng.randint(100, 1024) for _ in range(256)]
        work = [
            (p, SamplingParams(temperature=0.6, max_tokens=n, seed=i))
            for i, (p, n) in enumerate(zip(prompts, outputs, strict=True))
        ]
        runs = [self.run(work) for _ in range(self.options.nano_repeats)]
        chosen = sorted(runs, key=lambda r: r["tok_s"])[len(runs) // 2]
        return chosen | {"input_tokens": sum(map(len, prompts)), "runs_tok_s": [r["tok_s"] for r in runs]}

    def profile(self, count: int, length: int, out: Path) -> list[tuple[str, float, int]]:
        """Kernels of some decode steps, with microseconds and calls a step."""
        prompts = self.prompts(count, length, 7)
        work = [(p, SamplingParams(temperature=0.6, max_tokens=24, seed=i)) for i, p in enumerate(prompts)]
        self.run(work)
        from torch.profiler import ProfilerActivity, profile

        with profile(activities=[ProfilerActivity.CUDA]) as profiler:
            self.run(work)
        steps = 23
        rows = [
            (e.key[:110], e.device_time_total / steps, e.count / steps)
            for e in sorted(profiler.key_averages(), key=lambda e: -e.device_time_total)
        ]
        text = "\n".join(f"{us:9.1f} us {n:7.1f} x  {name}" for name, us, n in rows[:40])
        (out / f"profile_{self.facts['model']}_{count}.txt").write_text(text + "\n")
        return rows[:16]


def versions() -> dict[str, str]:
    found = {
        "python": platform.python_version(),
        "gpu": torch.cuda.get_device_name(),
        "torch": torch.__version__,
    }
    for name in ("triton", "sglang-kernel"):
        with contextlib.suppress(PackageNotFoundError):
            found[name] = version(name)
    try:
        import sgl_kernel

        found["sgl_kernel"] = sgl_kernel.__version__
    except ImportError:
        pass
    head = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, check=False)
    found["commit"] = head.stdout.strip() or "unknown"
    return found


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--models", default="0.6b,8b")
    parser.add_argument("--parts", default="b1,b64,b256,nano")
    parser.add_argument("--out", type=Path, default=Path())
    parser.add_argument("--page-size", type=int, default=64)
    parser.add_argument("--kv-tokens", type=int, default=400_000)
    parser.add_argument("--reserve", type=float, default=12.0, help="GiB left for graphs and activations")
    parser.add_argument("--max-rows", type=int, default=256)
    parser.add_argument("--budget", type=int, default=8192)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--nano-repeats", type=int, default=3)
    parser.add_argument("--commit", default="")
    parser.add_argument("--profile", action="store_true")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    about = versions() | ({"commit": options.commit} if options.commit else {})
    report: dict[str, Any] = {"versions": about, "models": []}
    print(about, flush=True)
    for name in options.models.split(","):
        bench = Bench(name, options)
        print({k: round(v, 3) if isinstance(v, float) else v for k, v in bench.facts.items()}, flush=True)
        facts = dict(bench.facts)
        report["models"].append(facts)
        parts = {
            "b1": lambda b=bench: b.fixed(1, 128, 256),
            "b64": lambda b=bench: b.fixed(64, 1024, 64),
            "b256": lambda b=bench: b.fixed(256, 128, 48, 0.6),
            "nano": lambda b=bench: b.nano(),
        }
        for part in options.parts.split(","):
            facts[part] = result = parts[part]()
            tpot = f"{result['tpot_ms']:.3f} ms" if result["tpot_ms"] else "-"
            host = " ".join(f"{k} {v:.3f}" for k, v in result["host_ms"].items())
            print(
                f"{name:5} {part:5} TPOT {tpot:10} first tokens {result['all_first_tokens_ms']:8.1f} ms "
                f"{result['tok_s']:9.0f} tok/s  host {result['host_total_ms']:.3f} ms ({host})",
                flush=True,
            )
            (options.out / "gpu_offline.json").write_text(json.dumps(report, indent=1))
        if options.profile:
            for count, length in ((1, 128), (64, 128), (256, 128)):
                print(f"-- {name}, {count} rows of {length}: us and calls a decode step (prompts included)")
                for key, us, calls in bench.profile(count, length, options.out):
                    print(f"{us:9.1f} {calls:7.1f}  {key[:90]}", flush=True)
        bench.runner.graphs = None
        del bench, parts
        gc.unfreeze()
        gc.collect()
        torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
