"""`baton bench offline`: many requests at once, through a deployment or the engine alone."""

from __future__ import annotations

import secrets
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from baton.bench.clients import make_target
from baton.bench.summary import ITL_COUNTING, summarize
from baton.bench.workload import Job, Range, Workload
from baton.cli.bench_options import (
    Tokens,
    check_writable,
    count,
    deployment_options,
    engine_config,
    make_plan,
    report_options,
)
from baton.cli.bench_report import about, deployment_facts, save, warnings
from baton.cli.bench_running import measured, open_engine, run_here, run_with_progress
from baton.cli.console import run_command
from baton.cli.deployment import DeploymentPlan
from baton.cli.options import SectionedCommand, config_options, fields_of
from baton.config import NodeConfig, WorkerConfig

if TYPE_CHECKING:
    from baton.bench.engine import EngineBench

WARM_UP = 4
"""Requests ahead of an engine's runs."""


@dataclass(frozen=True, slots=True)
class Measurement:
    """What to do."""

    work: Workload
    repeats: int
    file: Path | None
    commit: str


def sizes(work: Workload, jobs: list[Job]) -> dict[str, Any]:
    """Token counts of a workload; `cut` requests had to be shortened to fit the model's context."""
    whole = work.jobs(2**31, 2**31)
    changed = [
        (len(a.prompt), a.output_tokens) != (len(b.prompt), b.output_tokens)
        for a, b in zip(jobs, whole, strict=True)
    ]
    return {
        "requests": len(jobs),
        "input_tokens": sum(len(job.prompt) for job in jobs),
        "output_tokens": sum(job.output_tokens for job in jobs),
        "cut": sum(changed),
    }


def uncached(work: Workload) -> Workload:
    """The same requests, of whose prompts no deployment has seen a part."""
    return replace(work, namespace=secrets.token_hex(8))


def announce(found: dict[str, Any], context: int, console: Console) -> None:
    cut = f"; {found['cut']} cut to fit the context of {context:,}" if found["cut"] else ""
    console.print(
        f"{found['requests']} requests, {found['input_tokens']:,} input and {found['output_tokens']:,} "
        f"output tokens{cut}",
        highlight=False,
    )


def conclude(report: dict[str, Any], measurement: Measurement, console: Console) -> None:
    """The median run counts."""
    runs = report["runs"]
    rates = sorted(run["output_tokens_per_second"] for run in runs)
    report["output_tokens_per_second"] = median = rates[len(rates) // 2]
    seconds = next(run["seconds"] for run in runs if run["output_tokens_per_second"] == median)
    others = f" (of {', '.join(f'{rate:,.1f}' for rate in rates)})" if len(rates) > 1 else ""
    console.print(f"{median:,.1f} output tokens/s{others}, in {seconds:.2f} s", highlight=False)
    save(report, measurement.file)


async def _deployed(
    server: str,
    plan: DeploymentPlan,
    target: tuple[int, int, float],
    measurement: Measurement,
    console: Console,
) -> int:
    work = measurement.work
    async with measured(server, plan, console) as address:
        asked = await make_target(address, *target)
        workload = sizes(work, work.jobs(asked.vocabulary, asked.context))
        announce(workload, asked.context, console)
        runs = []
        for index in range(measurement.repeats):
            run = await run_with_progress(asked, uncached(work), f"run {index + 1}", console)
            figures = summarize(run.records) | {"client_busy": run.busy}
            runs.append(figures)
            for text in warnings(figures, work):
                console.print(text, style="yellow", highlight=False, markup=False)
        report = about("offline", measurement.commit) | {"deployment": await deployment_facts(address)}
    report |= {
        "workload": workload,
        "engine": None,
        "clients": asked.clients,
        "itl_counting": ITL_COUNTING,
        "runs": runs,
    }
    conclude(report, measurement, console)
    return 0


def _engine(config: WorkerConfig, measurement: Measurement, console: Console) -> None:
    work = measurement.work
    report = about("offline", measurement.commit)
    with open_engine(config, console) as bench:
        jobs = work.jobs(bench.vocabulary, bench.context)
        report["workload"] = sizes(work, jobs)
        announce(report["workload"], bench.context, console)
        bench.run(work.warm_up(WARM_UP, bench.vocabulary, bench.context), work.temperature)
        runs = [run_engine(bench, jobs, work, index, console) for index in range(measurement.repeats)]
        report |= {"engine": bench.facts(), "runs": runs}
    conclude(report, measurement, console)


def run_engine(
    bench: EngineBench, jobs: list[Job], work: Workload, index: int, console: Console
) -> dict[str, Any]:
    """One run's figures."""
    columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.completed:,.0f} tokens"))
    # Drawn once a second by the loop itself: a thread that draws would take its share of the steps' time.
    with Progress(*columns, TimeElapsedColumn(), console=console, auto_refresh=False) as progress:
        bar = progress.add_task(f"run {index + 1}", total=sum(job.output_tokens for job in jobs))

        def told(tokens: int) -> None:
            progress.update(bar, completed=tokens, refresh=True)

        run = bench.run(jobs, work.temperature, told)
        told(run.tokens)
    return {
        "seconds": run.seconds,
        "output_tokens": run.tokens,
        "output_tokens_per_second": run.tokens / run.seconds,
        "first_tokens_ms": run.first_tokens_seconds * 1e3,
    }


@click.command(cls=SectionedCommand)
@click.option("--engine", is_flag=True, help="The engine inside this process: no gRPC, no other processes.")
@count("--requests", 256, "All are sent at once.")
@click.option("--prompt-tokens", type=Tokens(), default="100-1024", show_default=True, help="Of each prompt.")
@click.option(
    "--output-tokens",
    type=Tokens(),
    default="100-1024",
    show_default=True,
    help="Of each output; the model's end of sequence is ignored.",
)
@click.option(
    "--temperature",
    type=click.FloatRange(0),
    default=0.6,
    show_default=True,
    metavar="X",
    help="Of sampling.",
)
@count("--seed", 0, "Of lengths and prompts.", least=0)
@count("--repeats", 1, "Runs; the median one is reported. None finds another's prompts in a cache.")
@deployment_options(timeout=600.0)
@report_options
@config_options(WorkerConfig, leave_out=fields_of(NodeConfig))
def offline(
    engine: bool, requests: int, prompt_tokens: Range, output_tokens: Range, temperature: float, seed: int,
    repeats: int, server: str, prefill: int, decode: int, clients: int, warmup: int, timeout: float,
    file: Path | None, commit: str, **values: Any,
) -> None:  # fmt: skip
    """Measure output tokens per second of many requests at once.

    The workload is that of nano-vllm's bench.py: 256 requests of 100 to 1024 tokens in and out, seed 0
    (142,827 input and 133,966 output tokens), temperature 0.6. Requests that the model's context does not
    hold are cut, which is said. Output tokens per second: of all requests, over the time from the start to
    the last answer.

    \b
    Examples:
      baton bench offline --requests 16                       the demo model, a small part of it
      baton bench offline --server HOST:50050 --clients 4
      baton bench offline --engine --model ./qwen3-8b --load-format dummy --max-rows 256 --token-budget 8192
    """
    check_writable(file)
    if engine and server:
        raise click.UsageError("--engine and --server: the engine runs in this process; give one of them")
    work = Workload(
        prompt_tokens=prompt_tokens,
        output_tokens=output_tokens,
        requests=requests,
        temperature=temperature,
        seed=seed,
        nano=True,
    )
    measurement = Measurement(work, repeats, file, commit)
    console = Console()
    if engine:
        config = engine_config(values)
        run_here(lambda: _engine(config, measurement, console))
    if clients > requests:
        raise click.UsageError(f"--clients ({clients}) must be at most --requests ({requests})")
    plan = make_plan(values, prefill, decode)
    target = (clients, warmup, timeout)
    run_command(lambda: _deployed(server, plan, target, measurement, console), server=server)
