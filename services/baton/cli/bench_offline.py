"""`baton bench offline`: many requests at once, through a deployment or the engine alone."""

from __future__ import annotations

import secrets
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import click
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from baton.bench.load_processes import make_target
from baton.bench.summary import ITL_COUNTING, summarize
from baton.bench.workload import Job, Workload
from baton.cli.bench_options import (
    TIMEOUT_HELP,
    TOKENS,
    Deployed,
    Report,
    deployment_facts,
    deployment_options,
    engine_config,
    make_plan,
    measured,
    open_engine,
    report_options,
    run_here,
    run_with_progress,
    warnings,
)
from baton.cli.console import run_command
from baton.cli.deployment import DeploymentPlan
from baton.cli.options import (
    COUNT,
    FRACTION,
    PROCESS,
    SECONDS,
    SIZE,
    SectionedCommand,
    config_options,
    option,
    options,
    take,
)
from baton.config import WorkerConfig

if TYPE_CHECKING:
    from baton.bench.engine_bench import EngineBench

WARM_UP = 4
"""Requests before an engine's runs."""


def sizes(work: Workload, jobs: list[Job]) -> dict[str, Any]:
    """Token counts of a workload; `cut` requests were shortened to fit the model's context."""
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
    """The requests of `work` in a prefix-cache namespace of their own."""
    return replace(work, namespace=secrets.token_hex(8))


def announce(found: dict[str, Any], context: int, console: Console) -> None:
    cut = f"; {found['cut']} cut to fit the context of {context:,}" if found["cut"] else ""
    console.print(
        f"{found['requests']} requests, {found['input_tokens']:,} input and {found['output_tokens']:,} "
        f"output tokens{cut}",
        highlight=False,
    )


def conclude(report: dict[str, Any], output: Report, console: Console) -> None:
    """Reports the median run."""
    runs = report["runs"]
    rates = sorted(run["output_tokens_per_second"] for run in runs)
    report["output_tokens_per_second"] = median = rates[len(rates) // 2]
    seconds = next(run["seconds"] for run in runs if run["output_tokens_per_second"] == median)
    others = f" (of {', '.join(f'{rate:,.1f}' for rate in rates)})" if len(rates) > 1 else ""
    console.print(f"{median:,.1f} output tokens/s{others}, in {seconds:.2f} s", highlight=False)
    output.save(report)


async def _deployed(
    deployed: Deployed, plan: DeploymentPlan, work: Workload, repeats: int, output: Report, console: Console
) -> int:
    async with measured(deployed.server, plan, console) as address:
        target = await make_target(address, deployed.clients, deployed.warmup, deployed.timeout)
        workload = sizes(work, work.jobs(target.vocabulary, target.context))
        announce(workload, target.context, console)
        runs = []
        for index in range(repeats):
            run = await run_with_progress(target, uncached(work), f"run {index + 1}", console)
            found = summarize(run.records) | {"client_busy": run.busy}
            runs.append(found)
            for text in warnings(found, work):
                console.print(text, style="yellow", highlight=False, markup=False)
        report = output.begin("offline") | {"deployment": await deployment_facts(address)}
    report |= {"workload": workload, "engine": None, "clients": target.clients}
    report |= {"itl_counting": ITL_COUNTING, "runs": runs}
    conclude(report, output, console)
    return 0


def _engine(config: WorkerConfig, work: Workload, repeats: int, output: Report, console: Console) -> None:
    report = output.begin("offline")
    with open_engine(config, console) as bench:
        jobs = work.jobs(bench.vocabulary, bench.context)
        report["workload"] = sizes(work, jobs)
        announce(report["workload"], bench.context, console)
        bench.run(work.warm_up(WARM_UP, bench.vocabulary, bench.context), work.temperature)
        runs = [run_engine(bench, jobs, work, index, console) for index in range(repeats)]
        report |= {"engine": bench.facts(), "runs": runs}
    conclude(report, output, console)


def run_engine(
    bench: EngineBench, jobs: list[Job], work: Workload, index: int, console: Console
) -> dict[str, Any]:
    """One run's results."""
    columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.completed:,.0f} tokens"))
    # Refreshed once a second by the loop itself: a refresh thread would take time from the steps.
    with Progress(*columns, TimeElapsedColumn(), console=console, auto_refresh=False) as progress:
        bar = progress.add_task(f"run {index + 1}", total=sum(job.output_tokens for job in jobs))

        def on_progress(tokens: int) -> None:
            progress.update(bar, completed=tokens, refresh=True)

        run = bench.run(jobs, work.temperature, on_progress)
        on_progress(run.tokens)
    return {
        "seconds": run.seconds,
        "output_tokens": run.tokens,
        "output_tokens_per_second": run.tokens / run.seconds,
        "first_tokens_ms": run.first_tokens_seconds * 1e3,
    }


@click.command(cls=SectionedCommand)
@click.option(
    "--engine", is_flag=True, help="Run the engine in this process, without gRPC or other processes."
)
@options(
    option("--requests", COUNT, 256, "Requests, all sent at once."),
    option("--prompt-tokens", TOKENS, "100-1024", "Tokens of each prompt."),
    option("--output-tokens", TOKENS, "100-1024", "Tokens of each output; the end of sequence is ignored."),
    option("--temperature", FRACTION, 0.6, "Sampling temperature."),
    option("--seed", SIZE, 0, "Seed of lengths and prompts."),
    option("--repeats", COUNT, 1, "Runs; the median is reported. No run finds another's prompts cached."),
    deployment_options,
    option("--timeout", SECONDS, 600.0, TIMEOUT_HELP, "SECONDS"),
    report_options,
    config_options(WorkerConfig, leave_out=PROCESS),
)
def offline(engine: bool, repeats: int, **values: Any) -> None:
    """Measure output tokens per second of many requests at once.

    The workload is that of nano-vllm's bench.py: 256 requests of 100 to 1024 tokens in and out, seed 0
    (142,827 input and 133,966 output tokens), temperature 0.6. Requests that exceed the model's context are
    cut, and their number is printed. Output tokens per second are those of all requests, over the time from
    the start to the last answer.

    \b
    Examples:
      baton bench offline --requests 16                       the demo model, fewer requests
      baton bench offline --server HOST:50050 --clients 4
      baton bench offline --engine --model ./qwen3-8b --load-format dummy --max-rows 256 --token-budget 8192
    """
    output, deployed = take(Report, values), take(Deployed, values)
    output.check_writable()
    if engine and deployed.server:
        raise click.UsageError("--engine and --server: the engine runs in this process; give one of them")
    work = take(Workload, values, nano=True)
    console = Console()
    if engine:
        config = engine_config(values)
        run_here(lambda: _engine(config, work, repeats, output, console))
    if deployed.clients > work.requests:
        raise click.UsageError(f"--clients ({deployed.clients}) must be at most --requests ({work.requests})")
    plan = make_plan(values, deployed)
    run_command(lambda: _deployed(deployed, plan, work, repeats, output, console), server=deployed.server)
