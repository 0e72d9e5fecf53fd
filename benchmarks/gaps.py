"""When the device computes nothing during steady decode steps, from a profiler's trace."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from baton.bench.engine import EngineBench
from baton.bench.steps import Point, jobs_of

LAST_OF_STEP = "_choose"
"""The kernel that ends a step."""
LONG_US = 5.0
"""Kernels that follow one another inside a graph start within a few microseconds; what takes longer has
waited for something."""
_SPARE = 8
"""Steps at the end of a run that are left out."""


@dataclass(frozen=True, slots=True)
class Kernel:
    name: str
    start: float
    """Microseconds."""
    end: float


@dataclass(frozen=True, slots=True)
class Gaps:
    """Over some successive decode steps of all rows."""

    steps: int
    step_us: float
    """Mean."""
    kernels: float
    """Of a step, mean."""
    idle_share: float
    """Of the time, how much no kernel ran in."""
    long_share: float
    """Of the time, how much lay in gaps longer than LONG_US."""
    between_us: float
    """Mean gap behind the last kernel of a step."""
    largest_us: float
    largest_behind: str
    """The kernel before the largest gap."""


def gaps(kernels: Iterable[Kernel], steps: int) -> Gaps:
    """Of the last `steps` steps but a few. Raises ValueError for too few steps."""
    found = sorted(kernels, key=lambda kernel: kernel.start)
    ends = [index for index, kernel in enumerate(found) if kernel.name == LAST_OF_STEP]
    if len(ends) < steps + _SPARE + 1:
        raise ValueError(f"the trace has {len(ends)} steps, of which {steps} are wanted; raise --steps")
    first, last = ends[-_SPARE - steps - 1], ends[-_SPARE - 1]
    taken = found[first : last + 1]
    time = taken[-1].end - taken[0].end
    idle: list[tuple[float, str]] = []
    between = 0.0
    busy_until, behind = max((kernel.end, kernel.name) for kernel in found[: first + 1])
    for kernel in taken[1:]:
        if kernel.start > busy_until:
            idle.append((kernel.start - busy_until, behind))
            if behind == LAST_OF_STEP:
                between += kernel.start - busy_until
        if kernel.end > busy_until:
            busy_until, behind = kernel.end, kernel.name
    largest, name = max(idle, default=(0.0, ""))
    return Gaps(
        steps=steps,
        step_us=time / steps,
        kernels=(len(taken) - 1) / steps,
        idle_share=sum(length for length, _ in idle) / time,
        long_share=sum(length for length, _ in idle if length > LONG_US) / time,
        between_us=between / steps,
        largest_us=largest,
        largest_behind=name[:80],
    )


def kernels_of(trace: Sequence[dict[str, Any]]) -> list[Kernel]:
    """From the events of a trace in Chrome's format."""
    return [
        Kernel(event["name"], float(event["ts"]), float(event["ts"]) + float(event["dur"]))
        for event in trace
        if event.get("cat") == "kernel"
    ]


def trace_decode(bench: EngineBench, point: Point, steps: int, temperature: float) -> Gaps:
    """Runs a batch to its end under torch.profiler, which slows the host down; the trace is not kept."""
    from torch.profiler import ProfilerActivity, profile

    bench.run(jobs_of(point, steps, bench, 0), temperature)
    with profile(activities=[ProfilerActivity.CUDA]) as profiled:
        bench.run(jobs_of(point, steps + 2 * _SPARE, bench, 1), temperature)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        profiled.export_chrome_trace(str(path))
        events = json.loads(path.read_text())["traceEvents"]
    return gaps(kernels_of(events), steps)
