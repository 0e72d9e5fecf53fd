"""Idle time of the device during steady decode steps, from a profiler's trace."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from baton.bench.engine_bench import EngineBench
from baton.bench.steps import Point, jobs_of

LAST_OF_STEP = "_choose"
"""The kernel that ends a step."""
LONG_US = 5.0
"""Kernels inside a graph start within a few microseconds of each other; a longer gap is a wait."""
SPARE = 8
"""Steps at the end of a run that are not counted."""


@dataclass(frozen=True, slots=True)
class Kernel:
    name: str
    start: float
    """Microseconds."""
    end: float


@dataclass(frozen=True, slots=True)
class Gaps:
    """Over successive decode steps of all rows."""

    steps: int
    step_us: float
    """Mean."""
    kernels: float
    """Mean number per step."""
    idle_share: float
    """Part of the time in which no kernel ran."""
    long_share: float
    """Part of the time in gaps longer than LONG_US."""


def gaps(kernels: Iterable[Kernel], steps: int) -> Gaps:
    """Of the last `steps` steps before the SPARE ones. Raises ValueError for too few steps."""
    found = sorted(kernels, key=lambda kernel: kernel.start)
    ends = [index for index, kernel in enumerate(found) if kernel.name == LAST_OF_STEP]
    if len(ends) < steps + SPARE + 1:
        raise ValueError(f"the trace has {len(ends)} steps, of which {steps} are wanted; raise --steps")
    first, last = ends[-SPARE - steps - 1], ends[-SPARE - 1]
    time = found[last].end - found[first].end
    busy_until = max(kernel.end for kernel in found[: first + 1])
    idle = []
    for kernel in found[first + 1 : last + 1]:
        idle.append(max(0.0, kernel.start - busy_until))
        busy_until = max(busy_until, kernel.end)
    return Gaps(
        steps=steps,
        step_us=time / steps,
        kernels=(last - first) / steps,
        idle_share=sum(idle) / time,
        long_share=sum(gap for gap in idle if gap > LONG_US) / time,
    )


def kernels_of(trace: Sequence[dict[str, Any]]) -> list[Kernel]:
    """From the events of a trace in Chrome's format."""
    return [
        Kernel(event["name"], float(event["ts"]), float(event["ts"]) + float(event["dur"]))
        for event in trace
        if event.get("cat") == "kernel"
    ]


def trace_decode(bench: EngineBench, point: Point, steps: int, temperature: float) -> Gaps:
    """Runs a batch to its end under torch.profiler, which slows the host down."""
    from torch.profiler import ProfilerActivity, profile

    bench.run(jobs_of(point, steps, bench, 0), temperature)
    with profile(activities=[ProfilerActivity.CUDA]) as profiled:
        bench.run(jobs_of(point, steps + 2 * SPARE, bench, 1), temperature)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        profiled.export_chrome_trace(str(path))
        events = json.loads(path.read_text())["traceEvents"]
    return gaps(kernels_of(events), steps)
