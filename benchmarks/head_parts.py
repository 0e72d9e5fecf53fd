"""Where a step with a head's drafts spends its time: the parts of one stream's step, on a GPU.

    python benchmarks/head_parts.py --model 8b --rows 1 --drafts 5 --out DIR

The graphs of a decode step, of one that verifies the drafts, of its sampling and of the head's passes are
replayed by themselves: milliseconds of each, its kernels by name, and what of its time no kernel runs. Then
steps of a run: how long one takes, and how much of that the device is idle, as it waits for the host.
Weights are random, drafts an oracle's, and the head is that of draft_speed.py. Writes DIR/head_parts.json.
On a CPU, which has no graphs, only the run is timed.
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
    times: dict[str, list[float]] = defaultdict(list)
    for kernel in kernels:
        times[kernel.name].append(kernel.end - kernel.start)
    milliseconds = begun.elapsed_time(ended) / REPLAYS
    print(f"{name}: {milliseconds:.3f} ms, {len(kernels)} kernels that run {busy(kernels) / 1e3:.3f} ms")
    names = sorted(times.items(), key=lambda each: -sum(each[1]))
    for kernel_name, each in names[:MOST_NAMES]:
        print(f"    {len(each):4} x {statistics.mean(each):8.2f} us = {sum(each):8.1f}  {kernel_name[:90]}")
    return {
        "part": name,
        "ms": milliseconds,
        "kernels": len(kernels),
        "busy_ms": busy(kernels) / 1e3,
        "names": {kernel_name: [len(each), sum(each)] for kernel_name, each in names},
    }


def parts(bench: EngineBench, rows: int, drafts: int) -> list[dict[str, Any]]:
    """Of graphs that a run has filled before."""
    runner, loaded = bench.engine.runner, bench.engine.drafter
    if not isinstance(runner, ModelRunner) or loaded is None:
        return []
    drafter, decode, few = loaded.drafter, runner.graphs, runner.chunk_graphs
    if decode is None or few is None or not isinstance(drafter, HeadDrafter) or drafter._graphs is None:
        return []
    found = [replayed("step without drafts", lambda: decode.replay(rows))]
    shape = min(s for s in few._graphs if s.few and s.rows >= rows and s.longest > drafts)
    found.append(replayed(f"step that verifies, {shape.tokens} tokens", few._graphs[shape].replay))
    found.append(replayed("its sampling", few._choosing[shape].replay))
    head_shape = drafter._graphs.shape(rows, drafts)
    assert head_shape is not None
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
    report["parts"] = parts(bench, options.rows, options.drafts)
    if report["parts"]:
        again, kernels = profiled(run)
        wall = max(each.end for each in kernels) - min(each.start for each in kernels)
        steps = len(again.step_seconds) + 2
        report["profiled"] = {"step_ms": wall / steps / 1e3, "idle_ms": (wall - busy(kernels)) / steps / 1e3}
        print(f"a step under the profiler: {report['profiled']}")
    (options.out / "head_parts.json").write_text(json.dumps(report, indent=1))
    bench.close()


if __name__ == "__main__":
    main()
