"""`baton bench step`: decode steps of the engine in this process."""

from __future__ import annotations

import itertools
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from rich.console import Console

from baton.cli.bench_options import NUMBERS, Report, engine_config, open_engine, report_options, run_here
from baton.cli.console import progress_bar, shown, table
from baton.cli.options import (
    COUNT,
    FRACTION,
    PROCESS,
    SectionedCommand,
    config_options,
    option,
    options,
    take,
)
from baton.config import WorkerConfig

if TYPE_CHECKING:
    from baton.bench.engine_bench import EngineBench
    from baton.bench.steps import MeasuredPoint, Point

TOKEN_BUDGET = 8192
"""Large chunks, so that all rows decode together early."""
SHOWN_KERNELS = 16


@dataclass(frozen=True, slots=True)
class StepOptions:
    """The command's options."""

    batches: tuple[int, ...]
    contexts: tuple[int, ...]
    steps: int
    repeats: int
    temperature: float
    profile: Path | None

    def points(self) -> list[Point]:
        from baton.bench.steps import Point

        return [Point(*pair) for pair in itertools.product(self.batches, self.contexts)]


def measure_all(
    bench: EngineBench, asked: StepOptions, bandwidth: float, console: Console
) -> tuple[list[MeasuredPoint], dict[str, str]]:
    """Results, and the reason for each point that was not measured."""
    from baton.bench.steps import measure, problem

    points = asked.points()
    skipped = {str(point): why for point in points if (why := problem(point, asked.steps, bench))}
    usable = [point for point in points if str(point) not in skipped]
    found = []
    # Refreshed between runs only: a refresh thread would take time from the steps.
    with progress_bar(console, auto_refresh=False) as progress:
        bar = progress.add_task("", total=len(usable) * (asked.repeats + 1))

        def on_progress(_run: int) -> None:
            progress.advance(bar)
            progress.refresh()

        for point in usable:
            progress.update(bar, description=str(point), refresh=True)
            found.append(
                measure(
                    bench,
                    point,
                    steps=asked.steps,
                    repeats=asked.repeats,
                    temperature=asked.temperature,
                    bandwidth=bandwidth,
                    on_progress=on_progress,
                )
            )
    return found, skipped


def show(report: dict[str, Any], results: list[MeasuredPoint], console: Console) -> None:
    """A line about engine and floor, then a row for each point."""
    engine, bandwidth, weights = (
        report["engine"],
        report["bandwidth_bytes_per_second"],
        report["weight_bytes"],
    )
    console.print(
        f"{engine['model']}, {engine['dtype']} on {engine['device']}, attention {engine['attention']}. "
        f"A copy reads and writes {bandwidth / 1e9:,.1f} GB/s; the weights' {weights / 2**20:,.1f} MiB "
        f"take {weights / bandwidth * 1e3:.3f} ms.",
        highlight=False,
    )
    rows = table(
        "batch", "context", "step, ms", "floor, ms", "ratio", "host, ms", "first tokens, ms", "tok/s"
    )
    for found in results:
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
    bench: EngineBench, asked: StepOptions, results: list[MeasuredPoint], folder: Path, console: Console
) -> None:
    """The longest kernels of each measured point."""
    from baton.bench.steps import Point, profile

    for found in results:
        point = Point(found.batch, found.context)
        console.print(f"\n{point}: microseconds and calls a decode step, prompts included", highlight=False)
        rows = profile(bench, point, steps=asked.steps, temperature=asked.temperature, folder=folder)
        for name, us, calls in rows[:SHOWN_KERNELS]:
            console.print(f"{us:9.1f} {calls:7.1f}  {name[:90]}", highlight=False, markup=False)


def _step(config: WorkerConfig, asked: StepOptions, output: Report, console: Console) -> None:
    from baton.bench.steps import copy_bandwidth, weight_bytes

    report = output.begin("step")
    with open_engine(config, console) as bench:
        bandwidth = copy_bandwidth(bench.engine.device)
        weights = weight_bytes(bench)
        found, skipped = measure_all(bench, asked, bandwidth, console)
        report |= {"engine": bench.facts(), "bandwidth_bytes_per_second": bandwidth, "weight_bytes": weights}
        report |= {"steps": asked.steps, "temperature": asked.temperature}
        report |= {"points": [asdict(each) for each in found], "skipped": skipped}
        show(report, found, console)
        output.save(report)
        if asked.profile is not None:
            show_profiles(bench, asked, found, asked.profile, console)
    if not found:
        raise click.ClickException("nothing was measured: this engine can run no point")


def _defaults(values: dict[str, Any], asked: StepOptions) -> dict[str, Any]:
    """Sizes of an engine that is just large enough for all points."""
    from baton.bench.steps import largest_pool

    rows = max(asked.batches)
    budget = values.get("token_budget") or max(TOKEN_BUDGET, rows)
    tokens = largest_pool(values.get("model") or "demo", asked.points(), asked.steps, budget)
    return {"max_rows": rows, "token_budget": budget, "kv_tokens": tokens}


@click.command(cls=SectionedCommand)
@options(
    option("--batch batches", NUMBERS, "1,8,32", "Rows in the batch."),
    option("--context contexts", NUMBERS, "128,1024", "Tokens of each prompt."),
    option("--steps", COUNT, 48, "Decode steps of a run with all rows."),
    option(
        "--repeats",
        COUNT,
        3,
        "Runs of each point, after one to warm up; the run with the median step is reported.",
    ),
    option("--temperature", FRACTION, 0.0, "Sampling temperature."),
    option(
        "--profile",
        click.Path(file_okay=False, path_type=Path),
        None,
        "Also print each point's longest kernels, and write all kernels to this folder.",
        "FOLDER",
    ),
    report_options,
    config_options(WorkerConfig, leave_out=PROCESS | {"step_cost"}, defaults={"token_budget": TOKEN_BUDGET}),
)
def step(**values: Any) -> None:
    """Measure decode steps of the engine by batch size and context, against their floor.

    Runs scheduler and model in this process, without gRPC or other processes. Step: median time between
    decode steps with all rows, their TPOT. Floor: bytes that must be read (weights, and KV of all rows)
    divided by the bandwidth of a copy, measured here; a model that fits into a CPU's cache can be faster.
    Host: host time of a step for scheduling and launching; on a CPU, where launching computes, without the
    launch. First tokens: time until all prompts are computed. Rows, KV pool and token budget are made large
    enough unless given.

    \b
    Examples:
      baton bench step
      baton bench step --batch 1,64,256 --context 128,1024 --json step.json
      baton bench step --model ./qwen3-8b --load-format dummy --device cuda --profile kernels
    """
    output, asked = take(Report, values), take(StepOptions, values)
    output.check_writable()
    console = Console()
    config = engine_config(values, lambda explicit: _defaults(explicit, asked))
    run_here(lambda: _step(config, asked, output, console))
