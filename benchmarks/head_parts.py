"""Where a step with a head's drafts spends its time: the parts of one stream's step, on a GPU.

    python benchmarks/head_parts.py --model 8b --rows 1 --drafts 5 --out DIR

Steps of a run: how long one takes, its kernels by name, and how much of it the device is idle, as it waits
for the host. Then the graphs of a decode step without drafts and of the head's passes, replayed by
themselves. Weights are random, drafts an oracle's, and the head is that of draft_speed.py. Writes
DIR/head_parts.json. On a CPU, which has no graphs, only the run is timed.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
from collections import defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from draft_speed import TEMPERATURE, Known, Told, write_head
from gaps import Kernel, kernels_of

from baton.bench.engine_bench import EngineBench, EngineRun
from baton.bench.machine import machine, versions
from baton.bench.workload import TokenRange, Workload
from baton.config import DecodeConfig
from baton.engine.draft.heads import HeadDrafter
from baton.engine.draft.oracle import prompt_digest
from baton.engine.model_runner import ModelRunner
from baton.rpc.logs import configure

sys.path.append(str(Path(__file__).parent.parent / "tools"))

from make_shape import write_shape

REPLAYS = 100
MOST_NAMES = 25


def profiled(work: Callable[[], Any]) -> tuple[Any, list[Kernel]]:
    """What `work` returns, and its kernels."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA]) as trace:
        result = work()
        torch.cuda.synchronize()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        trace.export_chrome_trace(str(path))
        return result, kernels_of(json.loads(path.read_text())["traceEvents"])


def busy(kernels: Sequence[Kernel]) -> float:
    """Microseconds in which any runs."""
    total, until = 0.0, float("-inf")
    for kernel in sorted(kernels, key=lambda each: each.start):
        total += max(0.0, kernel.end - max(kernel.start, until))
        until = max(until, kernel.end)
    return total


def by_name(kernels: Sequence[Kernel], steps: int) -> dict[str, tuple[float, float]]:
    """How many of each a step has, and their microseconds; prints those that take most."""
    times: dict[str, list[float]] = defaultdict(list)
    for kernel in kernels:
        times[kernel.name].append(kernel.end - kernel.start)
    names = sorted(times.items(), key=lambda each: -sum(each[1]))
    for name, each in names[:MOST_NAMES]:
        mean, whole = statistics.mean(each), sum(each) / steps
        print(f"    {len(each) / steps:6.1f} x {mean:8.2f} us = {whole:8.1f}  {name[:90]}")
    return {name: (len(each) / steps, sum(each) / steps) for name, each in names}


def replayed(name: str, replay: Callable[[], Any]) -> dict[str, Any]:
    for _ in range(10):
        replay()
    begun, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begun.record()
    for _ in range(REPLAYS):
        replay()
    ended.record()
    torch.cuda.synchronize()
    _, kernels = profiled(replay)
    milliseconds = begun.elapsed_time(ended) / REPLAYS
    print(f"{name}: {milliseconds:.3f} ms, {len(kernels)} kernels that run {busy(kernels) / 1e3:.3f} ms")
    found = {"part": name, "ms": milliseconds, "kernels": len(kernels), "busy_ms": busy(kernels) / 1e3}
    return found | {"names": by_name(kernels, 1)}


def parts(bench: EngineBench, rows: int, drafts: int) -> list[dict[str, Any]]:
    """Of graphs that a run has filled before."""
    runner, loaded = bench.engine.runner, bench.engine.drafter
    if not isinstance(runner, ModelRunner) or loaded is None:
        return []
    drafter, decode = loaded.drafter, runner.graphs
    if decode is None or not isinstance(drafter, HeadDrafter) or drafter._graphs is None:
        return []
    found = [replayed("step without drafts", lambda: decode.replay(rows))]
    head_shape = drafter._graphs.shape(rows, drafts)
    assert head_shape is not None
    drafter._graphs._fill(head_shape, ())  # what the run's last steps have left may be of another shape
    found.append(replayed(f"head, {head_shape.drafts} drafts", drafter._graphs._graphs[head_shape].replay))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="8b", help="a shape of tools/make_shape.py, or a checkpoint")
    parser.add_argument("--rows", type=int, default=1)
    parser.add_argument("--drafts", type=int, default=5)
    parser.add_argument("--prompt", type=int, default=128)
    parser.add_argument("--output", type=int, default=256)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--kv-tokens", type=int, default=50_000)
    parser.add_argument("--max-rows", type=int, default=8)
    parser.add_argument("--budget", type=int, default=2048)
    parser.add_argument("--out", type=Path, default=Path())
    options = parser.parse_args()
    configure("bench", "warning")
    options.out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        model, load = options.model, "auto"
        if not Path(model).exists():
            model, load = str(Path(folder) / "model"), "dummy"
            write_shape(options.model, Path(model))
        write_head(Path(model), Path(folder) / "head")
        bench = EngineBench(
            DecodeConfig(
                draft=str(Path(folder) / "head"),
                draft_tokens=options.drafts,
                model=model,
                load_format=load,
                device=options.device,
                kv_tokens=options.kv_tokens,
                max_rows=options.max_rows,
                token_budget=options.budget,
            )
        )
    work = Workload(
        prompt_tokens=TokenRange(options.prompt, options.prompt),
        output_tokens=TokenRange(options.output, options.output),
        requests=options.rows,
        seed=1,
    )
    jobs = work.jobs(bench.vocabulary, bench.context)
    loaded, outputs = bench.engine.drafter, dict[str, tuple[int, ...]]()
    assert loaded is not None

    def run() -> EngineRun:
        told = Told(loaded.drafter, Known(outputs, 1.0))
        done = bench.run(jobs, TEMPERATURE, drafter=told, draft_tokens=options.drafts)
        for each in told.seen:
            outputs[prompt_digest(each.request.prompt)] = tuple(each.tokens[len(each.request.prompt) :])
        return done

    for _ in range(3):
        timed = run()
    report: dict[str, Any] = {"machine": machine(), "versions": versions(""), "facts": bench.facts()}
    report |= {"step_ms": 1e3 * (timed.tpot or 0.0), "host_ms": {k: 1e3 * v for k, v in timed.host.items()}}
    report["a_step"] = timed.step_tokens / max(1, len(timed.step_seconds)) / options.rows
    print(", ".join(f"{name} {report[name]}" for name in ("step_ms", "a_step", "host_ms")))
    if options.device.startswith("cuda"):
        again, kernels = profiled(run)
        wall = max(each.end for each in kernels) - min(each.start for each in kernels)
        steps = len(again.step_seconds) + 2
        report["profiled"] = {"step_ms": wall / steps / 1e3, "idle_ms": (wall - busy(kernels)) / steps / 1e3}
        print(f"a step under the profiler: {report['profiled']}")
        report["profiled"]["names"] = by_name(kernels, steps)
    with torch.inference_mode():
        report["parts"] = parts(bench, options.rows, options.drafts)
    (options.out / "head_parts.json").write_text(json.dumps(report, indent=1))
    bench.close()


if __name__ == "__main__":
    main()
