"""`baton bench step`: decode steps of the engine inside this process."""

from __future__ import annotations

import itertools
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from baton.cli.bench_options import (
    Numbers,
    check_writable,
    count,
    engine_config,
    report_options,
)
from baton.cli.bench_report import about, save, shown, table
from baton.cli.bench_running import open_engine, run_here
from baton.cli.options import SectionedCommand, config_options, fields_of
from baton.config import NodeConfig, WorkerConfig

if TYPE_CHECKING:
    from baton.bench.engine import EngineBench
    from baton.bench.steps import Point, StepFigures

TOKEN_BUDGET = 8192
"""Large chunks, so that all rows soon decode together."""
SHOWN_KERNELS = 16


@dataclass(frozen=True, slots=True)
class Measurement:
    """What to do."""

    batches: tuple[int, ...]
    contexts: tuple[int, ...]
    steps: int
    repeats: int
    temperature: float
    profile: Path | None
    file: Path | None
    commit: str

    def points(self) -> list[Point]:
        from baton.bench.steps import Point

        return [Point(*pair) for pair in itertools.product(self.batches, self.contexts)]


def measure_all(
    bench: EngineBench, measurement: Measurement, bandwidth: float, console: Console
) -> tuple[list[StepFigures], dict[str, str]]:
    """The figures, and why each of the other points could not be measured."""
    from baton.bench.steps import measure, problem

    points = measurement.points()
    skipped = {point: why for point in points if (why := problem(point, measurement.steps, bench))}
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    total = (len(points) - len(skipped)) * (measurement.repeats + 1)
    figures = []
    # Drawn between runs only: a thread that draws meanwhile would take its share of the steps' time.
    with Progress(*columns, console=console, auto_refresh=False) as progress:
        bar = progress.add_task("", total=total)

        def told(_run: int) -> None:
            progress.advance(bar)
            progress.refresh()

        for point in points:
            if point not in skipped:
                progress.update(bar, description=str(point), refresh=True)
                figures.append(
                    measure(
                        bench,
                        point,
                        steps=measurement.steps,
                        repeats=measurement.repeats,
                        temperature=measurement.temperature,
                        bandwidth=bandwidth,
                        told=told,
                    )
                )
    return figures, {str(point): why for point, why in skipped.items()}


def show(report: dict[str, Any], figures: list[StepFigures], console: Console) -> None:
    """A line about engine and floor, a row a point."""
    engine, bandwidth, weights = (
        report["engine"],
        report["bandwidth_bytes_per_second"],
        report["weight_bytes"],
    )
    console.print(
        f"{engine['model']}, {engine['dtype']} on {engine['device']}, attention {engine['attention']}. "
        f"Copies move {bandwidth / 1e9:,.1f} GB/s, read and written; the weights' {weights / 2**20:,.1f} MiB "
        f"take {weights / bandwidth * 1e3:.3f} ms.",
        highlight=False,
    )
    rows = table(
        "batch", "context", "step, ms", "floor, ms", "ratio", "host, ms", "first tokens, ms", "tok/s"
    )
    for found in figures:
        host = [ms for part, ms in found.host_ms.items() if engine["device"] != "cpu" or part != "launch"]
        rows.add_row(
            str(found.batch),
            str(found.context),
            shown(found.step_ms, 3),
            shown(found.floor_ms, 3),
            shown(found.step_ms / found.floor_ms, 2),
            shown(sum(host), 3),
            shown(found.first_tokens_ms),
            shown(found.output_tokens_per_second, 0),
        )
    console.print(rows)
    for name, why in report["skipped"].items():
        console.print(f"{name}: not measured, {why}", style="yellow", highlight=False, markup=False)


def show_profiles(
    bench: EngineBench, measurement: Measurement, figures: list[StepFigures], folder: Path, console: Console
) -> None:
    """The kernels that take longest, of each point that was measured."""
    from baton.bench.steps import Point, profile

    for found in figures:
        point = Point(found.batch, found.context)
        console.print(f"\n{point}: microseconds and calls a decode step, prompts included", highlight=False)
        rows = profile(
            bench, point, steps=measurement.steps, temperature=measurement.temperature, folder=folder
        )
        for name, us, calls in rows[:SHOWN_KERNELS]:
            console.print(f"{us:9.1f} {calls:7.1f}  {name[:90]}", highlight=False, markup=False)


def _step(config: WorkerConfig, measurement: Measurement, console: Console) -> None:
    from baton.bench.steps import copy_bandwidth, weight_bytes

    report = about("step", measurement.commit)
    with open_engine(config, console) as bench:
        bandwidth = copy_bandwidth(bench.engine.device)
        info, layout = bench.engine.model_info, bench.engine.pool.layout
        weights = weight_bytes(bench.path, info.parameters, layout.dtype)
        figures, skipped = measure_all(bench, measurement, bandwidth, console)
        report |= {"engine": bench.facts(), "bandwidth_bytes_per_second": bandwidth, "weight_bytes": weights}
        report |= {"steps": measurement.steps, "temperature": measurement.temperature}
        report |= {"points": [asdict(found) for found in figures], "skipped": skipped}
        show(report, figures, console)
        save(report, measurement.file)
        if measurement.profile is not None:
            show_profiles(bench, measurement, figures, measurement.profile, console)
    if not figures:
        raise click.ClickException("nothing was measured: no point fits this engine")


def _defaults(values: dict[str, Any], measurement: Measurement) -> dict[str, Any]:
    """An engine that is just large enough for all points."""
    from baton.bench.steps import largest_pool

    rows = max(measurement.batches)
    budget = values.get("token_budget") or max(TOKEN_BUDGET, rows)
    tokens = largest_pool(values.get("model") or "demo", measurement.points(), measurement.steps, budget)
    return {"max_rows": rows, "token_budget": budget, "kv_tokens": tokens}


@click.command(cls=SectionedCommand)
@click.option(
    "--batch", "batches", type=Numbers(), default="1,8,32", show_default=True, help="Rows in the batch."
)
@click.option(
    "--context",
    "contexts",
    type=Numbers(),
    default="128,1024",
    show_default=True,
    help="Tokens of each prompt.",
)
@count("--steps", 48, "Decode steps of a run with all rows in them.")
@count("--repeats", 3, "Runs of each point after one to warm up; the one with the median step is reported.")
@click.option(
    "--temperature",
    type=click.FloatRange(0),
    default=0.0,
    show_default=True,
    metavar="X",
    help="Of sampling.",
)
@click.option(
    "--profile",
    type=click.Path(file_okay=False, path_type=Path),
    metavar="FOLDER",
    help="Also print each point's longest kernels and write all of them there.",
)
@report_options
@config_options(WorkerConfig, leave_out=fields_of(NodeConfig), defaults={"token_budget": TOKEN_BUDGET})
def step(
    batches: tuple[int, ...], contexts: tuple[int, ...], steps: int, repeats: int, temperature: float,
    profile: Path | None, file: Path | None, commit: str, **values: Any,
) -> None:  # fmt: skip
    """Measure decode steps of the engine by batch size and context, against their floor.

    Runs scheduler and model inside this process: no gRPC, no other processes. Step: the median time between
    decode steps that hold all rows, their TPOT. Floor: what must be read (weights, and KV of all rows) over
    the bandwidth of a copy, measured here (a model that fits a CPU's cache can be faster). Host: what
    scheduler and launching take of a step on the host; on a CPU, where launching computes, without that.
    First tokens: until all prompts are done. Rows, KV pool and token budget are made to fit, unless given.

    \b
    Examples:
      baton bench step
      baton bench step --batch 1,64,256 --context 128,1024 --json step.json
      baton bench step --model ./qwen3-8b --load-format dummy --device cuda --profile kernels
    """
    check_writable(file)
    measurement = Measurement(batches, contexts, steps, repeats, temperature, profile, file, commit)
    console = Console()
    config = engine_config(values, lambda given: _defaults(given, measurement))
    run_here(lambda: _step(config, measurement, console))
