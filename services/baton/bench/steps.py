"""Decode steps of the in-process engine by batch size and context, and their floor by memory traffic."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from baton.bench.engine_bench import EngineBench, EngineRun
from baton.bench.workload import Job
from baton.model_path import resolve
from baton.models import loader
from baton.models.config import read_config
from baton.rpc.errors import internal
from baton.worker.model import DTYPES

COPY_BYTES = {"cuda": 2**30, "cpu": 2**28}
"""Bytes of one copy: far more than caches hold."""
COPIES = 12


def copy_bandwidth(device: torch.device) -> float:
    """Bytes read and written per second by a copy within the device's memory; the best of several. Raises
    torch.OutOfMemoryError."""
    source = torch.zeros(COPY_BYTES[device.type], dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    target.copy_(source)
    best = min(_seconds(source, target) for _ in range(COPIES))
    return 2 * source.nbytes / best


def _seconds(source: torch.Tensor, target: torch.Tensor) -> float:
    if source.device.type == "cpu":
        started = time.perf_counter()
        target.copy_(source)
        return time.perf_counter() - started
    with torch.cuda.device(source.device):
        before, after = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        before.record()
        target.copy_(source)
        after.record()
        after.synchronize()
        return float(before.elapsed_time(after)) / 1e3


def weight_bytes(bench: EngineBench) -> int:
    """Bytes of weights that a step reads: all but an embedding that is not also the output projection; of
    that it reads one row per token."""
    config, dtype = bench.config, DTYPES[bench.engine.model_info.dtype]
    held = loader.weight_bytes(
        bench.path,
        dtype,
        config.context_length or None,
        config.model_impl,
        quantization=config.quantization,
        quantize_head=config.quantize_head,
        device=bench.engine.device,
        load_format=config.load_format,
    )
    model = read_config(bench.path)
    read = model.tied and not config.quantize_head
    return held - (0 if read else model.vocab_size * model.hidden_size * dtype.itemsize)


LARGEST_PAGE = 256
"""Pools are large enough for pages of up to this many tokens."""


@dataclass(frozen=True, slots=True)
class Point:
    batch: int
    """Rows."""
    context: int
    """Tokens of each prompt."""

    def __str__(self) -> str:
        return f"batch {self.batch}, context {self.context}"


@dataclass(frozen=True, slots=True)
class MeasuredPoint:
    """Times in milliseconds, of the median run."""

    batch: int
    context: int
    mean_context: float
    """Mean context length of the measured steps; the context grows by one token per step."""
    step_ms: float
    """Median: the TPOT of this batch."""
    runs_step_ms: list[float]
    floor_ms: float
    """Bytes of weights and KV that a step must read, divided by the bandwidth of a copy."""
    kv_bytes: float
    host_ms: dict[str, float]
    """Host time of a step by part; on a CPU `launch` computes."""
    first_tokens_ms: float
    """Until all rows had their first token (median of the runs)."""
    output_tokens_per_second: float
    """Prompts included."""


def outputs(point: Point, steps: int, budget: int) -> int:
    """Output tokens of each row such that all rows decode together for `steps` steps. Rows whose prompts are
    computed first decode while the others' prompts take a token budget per step."""
    room = max(1, budget - point.batch)
    return steps + 4 + -(-5 * point.batch * point.context // (4 * room))


def kv_tokens(point: Point, steps: int, budget: int, page_size: int) -> int:
    """Tokens of KV that it needs, in whole pages."""
    return point.batch * -(-(point.context + outputs(point, steps, budget)) // page_size) * page_size


def largest_pool(model: str, points: Sequence[Point], steps: int, budget: int) -> int:
    """Tokens of KV that suffice for every point within the model's context. Raises CheckpointError or
    ModelError."""
    context = read_config(resolve(model)).context_length
    counts = [
        kv_tokens(point, steps, budget, LARGEST_PAGE)
        for point in points
        if point.context + outputs(point, steps, budget) <= context
    ]
    return max(counts, default=0) + LARGEST_PAGE


def problem(point: Point, steps: int, bench: EngineBench) -> str:
    """Why this engine cannot run the point; empty: it can."""
    size, budget = bench.engine.pool.layout.page_size, bench.config.token_budget
    tokens = point.context + outputs(point, steps, budget)
    if point.batch > bench.config.max_rows:
        return f"more rows than --max-rows {bench.config.max_rows}"
    if tokens > bench.context:
        return f"{tokens} tokens a row exceed the context of {bench.context}"
    if (need := kv_tokens(point, steps, budget, size)) > bench.engine.pool.num_pages * size:
        return f"needs {need} tokens of KV; the pool holds {bench.engine.pool.num_pages * size}"
    return ""


def jobs_of(point: Point, steps: int, bench: EngineBench, seed: int) -> list[Job]:
    """Random prompts, with outputs long enough for `steps` steps of all rows."""
    draw = np.random.default_rng((seed, point.batch, point.context))
    prompts = draw.integers(bench.vocabulary, size=(point.batch, point.context)).tolist()
    count = outputs(point, steps, bench.config.token_budget)
    return [Job(0.0, prompt, count, index) for index, prompt in enumerate(prompts)]


def measure(
    bench: EngineBench,
    point: Point,
    *,
    steps: int,
    repeats: int,
    temperature: float,
    bandwidth: float,
    on_progress: Callable[[int], None] = lambda run: None,
) -> MeasuredPoint:
    """Reports the run with the median step of `repeats`, after one to warm up. `on_progress` is called after
    each run. Raises BatonError, also if no step held all rows."""
    runs: list[EngineRun] = []
    for repeat in range(repeats + 1):
        runs.append(bench.run(jobs_of(point, steps, bench, repeat), temperature))
        on_progress(repeat)
    del runs[0]
    chosen = sorted(runs, key=_step)[len(runs) // 2]
    kv_bytes = chosen.attended * bench.engine.pool.layout.bytes_per_token
    weights = weight_bytes(bench)
    return MeasuredPoint(
        batch=point.batch,
        context=point.context,
        mean_context=chosen.attended / point.batch,
        step_ms=_step(chosen) * 1e3,
        runs_step_ms=[_step(run) * 1e3 for run in runs],
        floor_ms=(weights + kv_bytes) / bandwidth * 1e3,
        kv_bytes=kv_bytes,
        host_ms={name: seconds * 1e3 for name, seconds in chosen.host.items()},
        first_tokens_ms=statistics.median(run.first_tokens_seconds for run in runs) * 1e3,
        output_tokens_per_second=chosen.tokens / chosen.seconds,
    )


def _step(run: EngineRun) -> float:
    if run.tpot is None:
        raise internal("no decode step held all rows; raise --kv-tokens or --token-budget")
    return run.tpot


def profile(
    bench: EngineBench, point: Point, *, steps: int, temperature: float, folder: Path
) -> list[tuple[str, float, float]]:
    """Kernels (on a CPU: operators) of a run with its prompts, longest first: name, microseconds and calls of
    a decode step. Also written to a file in `folder`."""
    from torch.profiler import ProfilerActivity
    from torch.profiler import profile as profiler

    on_gpu = bench.engine.device.type == "cuda"
    bench.run(jobs_of(point, steps, bench, 0), temperature)
    with profiler(activities=[ProfilerActivity.CUDA if on_gpu else ProfilerActivity.CPU]) as profiled:
        bench.run(jobs_of(point, steps, bench, 1), temperature)
    taken = outputs(point, steps, bench.config.token_budget) - 1
    attribute = "self_device_time_total" if on_gpu else "self_cpu_time_total"
    found = [
        (event.key, getattr(event, attribute) / taken, event.count / taken)
        for event in profiled.key_averages()
        if getattr(event, attribute) > 0
    ]
    found.sort(key=lambda row: -row[1])
    folder.mkdir(parents=True, exist_ok=True)
    lines = [f"{us:9.1f} us {calls:7.1f} x  {name[:110]}" for name, us, calls in found]
    (folder / f"profile_{point.batch}x{point.context}.txt").write_text("\n".join(lines) + "\n")
    return found
