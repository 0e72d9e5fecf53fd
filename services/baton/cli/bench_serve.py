"""`baton bench serve`: a deployment under load."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import click
from rich.console import Console

from baton.bench.load_client import Target
from baton.bench.load_processes import make_target
from baton.bench.plots import NoPlots, plot, require
from baton.bench.summary import ITL_COUNTING, summarize, too_few
from baton.bench.workload import KINDS, Workload
from baton.cli.bench_options import (
    TIMEOUT_HELP,
    TOKENS,
    Deployed,
    Report,
    deployment_facts,
    deployment_options,
    make_plan,
    measured,
    report_options,
    run_with_progress,
    warnings,
)
from baton.cli.console import UNLIMITED, run_command, shown, table
from baton.cli.deployment import DeploymentPlan
from baton.cli.options import (
    COUNT,
    FILE,
    FRACTION,
    PROCESS,
    SECONDS,
    SIZE,
    Parsed,
    SectionedCommand,
    config_options,
    option,
    options,
    take,
)
from baton.config import WorkerConfig
from baton.slo import Targets

LATENCIES = {"ttft": "TTFT", "tpot": "TPOT", "itl": "ITL", "e2e": "end to end"}
DEFAULT_RATE = 1.0
DEFAULT_REQUESTS = 32


def _rates(text: str) -> tuple[float, ...]:
    try:
        found = tuple(float(item) for item in text.split(","))
    except ValueError:
        found = (math.nan,)
    if not all(rate > 0 for rate in found):
        raise ValueError(f"{text!r}: give numbers above 0 with commas between, or inf")
    return found


workload_options = options(
    option(
        "--workload kind",
        click.Choice(KINDS),
        "random",
        "Prompts without common beginnings; conversations of several turns; questions about documents.",
    ),
    option(
        "--prompt-tokens",
        TOKENS,
        "1024",
        "Tokens of each prompt, each turn of a conversation, or each document.",
    ),
    option("--opening-tokens opening", SIZE, 0, "Additional tokens of a conversation's first turn."),
    option("--turns", TOKENS, "3-9", "Turns of a conversation, as far as the context allows."),
    option("--think-seconds think", FRACTION, 2.0, "Mean time from an answer to the next turn."),
    option("--documents", COUNT, 16, "Number of documents."),
    option("--question-tokens", TOKENS, "16-64", "Tokens of a question, after the document."),
    option("--output-tokens", TOKENS, "256", "Tokens of each output; the end of sequence is ignored."),
    option("--shared-prefix", SIZE, 0, "Tokens with which all prompts begin."),
    option("--temperature", FRACTION, 0.0, "Sampling temperature."),
)
"""Fields of a Workload."""


def label(work: Workload) -> str:
    """A run's load, as text."""
    if work.rate is not None:
        return f"{work.rate:g}"
    return f"{work.concurrency} at a time" if work.concurrency else "all at once"


def make_runs(
    rates: tuple[float, ...], seconds: float, requests: int | None, concurrency: int, common: Workload
) -> tuple[Workload, ...]:
    """A workload for each rate. Raises UsageError for contradictory options."""
    finite = [rate for rate in rates if math.isfinite(rate)]
    if finite and concurrency:
        raise click.UsageError(
            "--concurrency is for a closed loop; an open loop (--rate) does not wait for answers"
        )
    if finite and requests is not None:
        raise click.UsageError(
            "--requests is for a closed loop; with --rate their number follows from --seconds"
        )
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
    """Raises ClickException if the deployment would refuse every request."""
    if work.longest > target.context:
        raise click.ClickException(
            f"a prompt and its output of {work.longest} tokens exceed the model's context of "
            f"{target.context}; lower --prompt-tokens or --output-tokens"
        )


def few_requests(run: dict[str, Any]) -> Iterator[str]:
    """Warns if the run has too few requests for its percentiles."""
    if few := too_few(run["finished"]):
        names = " and ".join(f"p{each}" for each in few)
        yield f"{names} of {run['finished']} requests is close to the slowest request; measure more requests"


def show(workloads: Sequence[Workload], runs: list[dict[str, Any]], console: Console) -> None:
    """Latencies by run and percentile, then rates by run."""
    if not console.is_terminal:  # a pipe: nothing is wrapped or cut
        console = Console(file=console.file, width=UNLIMITED)
    results = table("req/s", "", *(f"{name}, ms" for name in LATENCIES.values()))
    for work, run in zip(workloads, runs, strict=True):
        for index, part in enumerate(("mean", "p50", "p90", "p99")):
            cells = [shown(run[f"{name}_ms"][part]) for name in LATENCIES]
            results.add_row("" if index else label(work), part, *cells)
    console.print(results)
    rates = table("req/s", "done", "a second", "tok/s", "cached", "goodput", "running", "late, ms", "client")
    for work, run in zip(workloads, runs, strict=True):
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
    for work, run in zip(workloads, runs, strict=True):
        for text in (*warnings(run, work), *few_requests(run)):
            console.print(f"{label(work)}: {text}", style="yellow", highlight=False, markup=False)


async def _serve(
    deployed: Deployed,
    plan: DeploymentPlan,
    workloads: Sequence[Workload],
    targets: Targets,
    output: Report,
    picture: Path | None,
    console: Console,
) -> int:
    runs: list[dict[str, Any]] = []
    async with measured(deployed.server, plan, console) as address:
        target = await make_target(address, deployed.clients, deployed.warmup, deployed.timeout)
        check_context(workloads[0], target)
        for work in workloads:
            name = f"{label(work)} req/s" if work.rate is not None else label(work)
            run = await run_with_progress(target, work, name, console)
            found = summarize(run.records, targets, work.seconds)
            found |= {"load": label(work), "workload": work.to_dict(), "client_busy": run.busy}
            found["offered_per_second"] = len(run.records) / work.seconds if work.rate is not None else None
            runs.append(found)
        # After the runs: by now decode nodes are connected to the prefill nodes that the gateway names.
        report = output.begin("serve") | {"deployment": await deployment_facts(address)}
    show(workloads, runs, console)
    limits = {"ttft_ms": targets.ttft_ms, "itl_ms": targets.itl_ms}
    report |= {"clients": target.clients, "itl_counting": ITL_COUNTING, "targets": limits, "runs": runs}
    output.save(report)
    if picture is not None:
        plot(report, picture)
    return 0


@click.command(cls=SectionedCommand)
@options(
    option(
        "--rate rates",
        Parsed("X[,X...]", _rates),
        (),
        "Requests per second, a run for each (open loop, Poisson arrivals); inf: closed loop.  [default: 1]",
        "X[,X...]",
    ),
    option("--seconds", SECONDS, 25.0, "Time in which requests arrive."),
    option("--concurrency", COUNT, None, "Closed loop: requests at a time.  [default: all at once]"),
    option("--requests", COUNT, None, f"Closed loop: number of requests.  [default: {DEFAULT_REQUESTS}]"),
    workload_options,
    option(
        "--seed", SIZE, 0, "Seed of arrivals and prompts. With the same seed again, prompts are found cached."
    ),
    option("--ttft-target-ms ttft_ms", FRACTION, None, "Goodput: largest TTFT of a request."),
    option("--itl-target-ms itl_ms", FRACTION, None, "Goodput: largest ITL of a request, at its own p99."),
    deployment_options,
    option("--timeout", SECONDS, 120.0, TIMEOUT_HELP, "SECONDS"),
    report_options,
    option("--plot picture", FILE, None, "Plot percentiles over rate, and distributions.", "FILE.png"),
    config_options(WorkerConfig, leave_out=PROCESS),
)
def serve(
    rates: tuple[float, ...],
    seconds: float,
    concurrency: int | None,
    requests: int | None,
    picture: Path | None,
    **values: Any,
) -> None:
    """Measure a deployment under load: TTFT, TPOT, ITL, end to end, tokens per second, goodput.

    Open loop (--rate): requests arrive as a Poisson process, independent of answers. Closed loop
    (--concurrency, --requests): a request is sent when another has ended. Times are measured at the client,
    from sending. "late" is how far behind schedule the client sent (p99), "client" the part of a core that
    it used.

    TTFT: time to the first token. TPOT: mean time per output token, the first excluded. ITL: time between
    tokens; the pause before a message is divided evenly over its tokens, as in SGLang's bench_serving. e2e:
    time to the end. Cached: part of the prompt tokens found in a prefix cache. Goodput: requests per second
    that met both targets.

    Conversations (--workload conversation) are many users at once. Each sends its next turn some time after
    the last answer, with all earlier turns. --rate counts turns. No sessions are used.

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
    output = take(Report, values)
    output.check_writable(picture)
    if picture is not None:
        try:
            require()
        except NoPlots as error:
            raise click.ClickException(str(error)) from None
    workloads = make_runs(rates, seconds, requests, concurrency or 0, take(Workload, values))
    deployed, targets = take(Deployed, values), take(Targets, values)
    if concurrency and deployed.clients > concurrency:
        raise click.UsageError(
            f"--clients ({deployed.clients}) must be at most --concurrency ({concurrency})"
        )
    plan = make_plan(values, deployed)
    console = Console()
    run_command(
        lambda: _serve(deployed, plan, workloads, targets, output, picture, console), server=deployed.server
    )
