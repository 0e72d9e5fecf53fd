"""`baton bench serve`: a deployment under load."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import click
from rich.console import Console

from baton.bench.clients import Target, make_target
from baton.bench.plots import NoPlots, plot, require
from baton.bench.summary import ITL_COUNTING, summarize, too_few
from baton.bench.workload import Workload
from baton.cli.bench_options import (
    check_writable,
    count,
    deployment_options,
    make_plan,
    report_options,
)
from baton.cli.bench_report import about, deployment_facts, save, shown, table, warnings
from baton.cli.bench_running import measured, run_with_progress
from baton.cli.bench_workload import take_workload, workload_options
from baton.cli.console import run_command
from baton.cli.deployment import DeploymentPlan
from baton.cli.options import SectionedCommand, config_options, fields_of
from baton.config import NodeConfig, WorkerConfig
from baton.latency import Targets

LATENCIES = {"ttft": "TTFT", "tpot": "TPOT", "itl": "ITL", "e2e": "end to end"}
DEFAULT_RATE = 1.0
DEFAULT_REQUESTS = 32


class Rates(click.ParamType):  # type: ignore[type-arg]
    """Requests per second with commas between; inf: closed loop."""

    name = "X[,X...]"

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> tuple[float, ...]:
        if isinstance(value, tuple):
            return value
        try:
            found = tuple(float(item) for item in value.split(","))
        except ValueError:
            found = (math.nan,)
        if not all(rate > 0 for rate in found):
            self.fail(f"{value!r}: give numbers above 0 with commas between, or inf", param, ctx)
        return found


@dataclass(frozen=True, slots=True)
class Measurement:
    """What to do."""

    runs: tuple[Workload, ...]
    targets: Targets
    clients: int
    warmup: int
    timeout: float
    file: Path | None
    picture: Path | None
    commit: str


def label(work: Workload) -> str:
    """A run's load, in words."""
    if work.rate is not None:
        return f"{work.rate:g}"
    return f"{work.concurrency} at a time" if work.concurrency else "all at once"


def make_runs(
    rates: tuple[float, ...], seconds: float, requests: int | None, concurrency: int, common: Workload
) -> tuple[Workload, ...]:
    """One workload a rate. Raises UsageError for what contradicts itself."""
    finite = [rate for rate in rates if math.isfinite(rate)]
    if finite and concurrency:
        raise click.UsageError("--concurrency is of a closed loop; an open one (--rate) waits for no answer")
    if finite and requests is not None:
        raise click.UsageError("--requests is of a closed loop; --rate and --seconds say how many arrive")
    if not rates and not concurrency and requests is None:
        rates = (DEFAULT_RATE,)
    runs = []
    for index, rate in enumerate(rates or (math.inf,)):
        work = replace(common, run=index, requests=requests or DEFAULT_REQUESTS, concurrency=concurrency)
        if math.isfinite(rate):
            work = replace(common, run=index, rate=rate, seconds=seconds)
        if not work.arrivals():
            raise click.UsageError(
                f"at --rate {rate:g} nothing arrives within {seconds:g} s; raise --seconds"
            )
        runs.append(work)
    return tuple(runs)


def check_context(work: Workload, target: Target) -> None:
    """Raises ClickException: refused by the deployment, every request would fail."""
    if work.longest > target.context:
        raise click.ClickException(
            f"a prompt and its output of {work.longest} tokens exceed the model's context of "
            f"{target.context}; lower --prompt-tokens or --output-tokens"
        )


def few_requests(run: dict[str, Any]) -> Iterator[str]:
    """Whether the run's percentiles of requests tell little."""
    if few := too_few(run["finished"]):
        names = " and ".join(f"p{each}" for each in few)
        yield f"{names} of {run['finished']} requests is little more than the slowest; measure more of them"


def show(measurement: Measurement, runs: list[dict[str, Any]], console: Console) -> None:
    """A row of latencies a run and percentile, and a line of rates a run."""
    figures = table("req/s", "", *(f"{name}, ms" for name in LATENCIES.values()))
    for work, run in zip(measurement.runs, runs, strict=True):
        for index, part in enumerate(("mean", "p50", "p90", "p99")):
            cells = [shown(run[f"{name}_ms"][part]) for name in LATENCIES]
            figures.add_row("" if index else label(work), part, *cells)
    console.print(figures)
    rates = table(
        "req/s", "done", "a second", "tok/s out", "cached", "goodput", "in flight", "late, ms", "client"
    )
    for work, run in zip(measurement.runs, runs, strict=True):
        rates.add_row(
            label(work),
            f"{run['finished']}/{run['requests']}",
            shown(run["requests_per_second"], 2),
            shown(run["output_tokens_per_second"]),
            f"{run['cached_tokens'] / max(1, run['prompt_tokens']):.0%}",
            shown(run["goodput_per_second"], 2),
            shown(run["in_flight"]["mean"]),
            shown(run["lateness_ms"]["p99"]),
            f"{run['client_busy']:.0%}",
        )
    console.print(rates)
    for work, run in zip(measurement.runs, runs, strict=True):
        for text in (*warnings(run, work), *few_requests(run)):
            console.print(f"{label(work)}: {text}", style="yellow", highlight=False, markup=False)


async def _serve(server: str, plan: DeploymentPlan, measurement: Measurement, console: Console) -> int:
    runs: list[dict[str, Any]] = []
    async with measured(server, plan, console) as address:
        target = await make_target(address, measurement.clients, measurement.warmup, measurement.timeout)
        check_context(measurement.runs[0], target)
        for work in measurement.runs:
            name = f"{label(work)} req/s" if work.rate is not None else label(work)
            run = await run_with_progress(target, work, name, console)
            figures = summarize(run.records, measurement.targets, work.seconds)
            figures |= {"load": label(work), "workload": work.to_dict(), "client_busy": run.busy}
            figures["offered_per_second"] = len(run.records) / work.seconds if work.rate is not None else None
            runs.append(figures)
        # Afterwards: by now decode nodes have met the prefill nodes that the gateway names.
        report = about("serve", measurement.commit) | {"deployment": await deployment_facts(address)}
    show(measurement, runs, console)
    targets = {"ttft_ms": measurement.targets.ttft_ms, "itl_ms": measurement.targets.itl_ms}
    report |= {"clients": target.clients, "itl_counting": ITL_COUNTING, "targets": targets, "runs": runs}
    save(report, measurement.file)
    if measurement.picture is not None:
        plot(report, measurement.picture)
    return 0


@click.command(cls=SectionedCommand)
@click.option(
    "--rate",
    "rates",
    type=Rates(),
    default=(),
    metavar="X[,X...]",
    help="Requests per second, one run each (open loop, Poisson arrivals); inf: closed loop.  [default: 1]",
)
@click.option(
    "--seconds",
    type=click.FloatRange(min=0, min_open=True),
    default=25.0,
    show_default=True,
    metavar="X",
    help="How long requests arrive.",
)
@count("--concurrency", None, "Closed loop: requests at a time.  [default: all at once]")
@count("--requests", None, f"Closed loop: how many.  [default: {DEFAULT_REQUESTS}]")
@workload_options
@count(
    "--seed", 0, "Of arrivals and prompts. A deployment asked twice with one seed has them cached.", least=0
)
@click.option(
    "--ttft-target-ms", type=click.FloatRange(0), metavar="X", help="Goodput: TTFT of a request at most."
)
@click.option(
    "--itl-target-ms",
    type=click.FloatRange(0),
    metavar="X",
    help="Goodput: ITL of a request at most, at its own p99.",
)
@deployment_options(timeout=120.0)
@report_options
@click.option(
    "--plot",
    "picture",
    type=click.Path(dir_okay=False, path_type=Path),
    metavar="FILE.png",
    help="Draw percentiles over rate, and distributions.",
)
@config_options(WorkerConfig, leave_out=fields_of(NodeConfig))
def serve(
    rates: tuple[float, ...], seconds: float, concurrency: int | None, requests: int | None,
    seed: int, ttft_target_ms: float | None, itl_target_ms: float | None, server: str, prefill: int,
    decode: int, clients: int, warmup: int, timeout: float, file: Path | None, commit: str,
    picture: Path | None, **values: Any,
) -> None:  # fmt: skip
    """Measure a deployment under load: TTFT, TPOT, ITL, end to end, tokens per second, goodput.

    Open loop (--rate): requests arrive as a Poisson process and wait for nobody. Closed loop (--concurrency,
    --requests): one is sent when another has ended. Everything is measured at the client, from the moment of
    sending; "late" is how far behind their times the client itself sent (p99), "client" the part of a core
    that it used.

    TTFT: to the first token. TPOT: mean per output token, the first excluded. ITL: between tokens; the pause
    before a message is divided evenly over its tokens (as SGLang's bench_serving does). e2e: to the end.
    Cached: the part of all prompt tokens that was found in a prefix cache. Goodput: requests per second that
    met both targets.

    Conversations (--workload conversation) are many users at once: each sends its next turn a while after the
    answer to the last, with all that was said before; --rate still counts turns. No session is named.

    \b
    Examples:
      baton bench serve                                              start the demo model, 1 request/s
      baton bench serve --server HOST:50050 --rate 8,16,24,32 --clients 4 --json load.json --plot load.png
      baton bench serve --requests 200 --concurrency 32 --prompt-tokens 100-1024
      baton bench serve --workload conversation --rate 4 --prompt-tokens 64-128 --shared-prefix 128
      baton bench serve --workload documents --documents 20 --prompt-tokens 1500 --rate 6
      baton bench serve --rate 4 --ttft-target-ms 300 --itl-target-ms 20
      baton bench serve --model ./my-model --load-format dummy       random weights
    """
    check_writable(file, picture)
    if picture is not None:
        try:
            require()
        except NoPlots as error:
            raise click.ClickException(str(error)) from None
    common = Workload(**take_workload(values), seed=seed)
    runs = make_runs(rates, seconds, requests, concurrency or 0, common)
    if concurrency and clients > concurrency:
        raise click.UsageError(f"--clients ({clients}) must be at most --concurrency ({concurrency})")
    plan = make_plan(values, prefill, decode)
    targets = Targets(ttft_target_ms, itl_target_ms)
    measurement = Measurement(runs, targets, clients, warmup, timeout, file, picture, commit)
    console = Console()
    run_command(lambda: _serve(server, plan, measurement, console), server=server)
