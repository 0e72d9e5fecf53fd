"""Options, deployments and reports that the commands of `baton bench` share."""

from __future__ import annotations

import contextlib
import dataclasses
import json
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import click
from rich.console import Console
from rich.progress import TextColumn

from baton.bench.load_client import Target
from baton.bench.load_processes import LoadRun, run_clients
from baton.bench.machine import machine, versions
from baton.bench.processes import BenchError
from baton.bench.workload import TokenRange, Workload
from baton.cli.config_fields import explicit_fields, fields_of
from baton.cli.console import explain, progress_bar
from baton.cli.deployment import Deployment, DeploymentPlan
from baton.cli.node_reports import ask_deployment
from baton.cli.options import COUNT, FILE, SIZE, Parsed, fail, option, options
from baton.cli.up import check_workers, fetch_model, settings_by_role
from baton.client import BatonError
from baton.config import WorkerConfig

if TYPE_CHECKING:
    from baton.bench.engine_bench import EngineBench


def _numbers(text: str) -> tuple[int, ...]:
    try:
        found = tuple(int(item) for item in text.split(","))
    except ValueError:
        found = ()
    if not found or min(found) < 1:
        raise ValueError(f"{text!r}: give whole numbers of 1 or more with commas between")
    return found


TOKENS = Parsed("N|A-B", TokenRange.parse)
NUMBERS = Parsed("N[,N...]", _numbers)
TIMEOUT_HELP = "Time limit of a request; after it the request counts as failed. The gateway has a limit too."


@dataclasses.dataclass(frozen=True, slots=True)
class Deployed:
    """The deployment to measure, and its clients."""

    server: str
    prefill: int
    decode: int
    clients: int
    warmup: int
    timeout: float


deployment_options = options(
    option(
        "--server",
        str,
        "",
        "Gateway of a running deployment; without it a deployment is started for the measurement.",
        "HOST:PORT",
        envvar="BATON_SERVER",
    ),
    option("--prefill", SIZE, 1, "Prefill nodes of the started deployment; 0: aggregated."),
    option("--decode", COUNT, 1, "Decode nodes of the started deployment."),
    option("--clients", COUNT, 1, "Client processes."),
    option("--warmup", SIZE, 4, "Requests before the measured ones, with the same prompt lengths."),
)
"""The fields of Deployed except the timeout, whose default differs."""


@dataclasses.dataclass(frozen=True, slots=True)
class Report:
    """The file of results."""

    file: Path | None
    commit: str

    def check_writable(self, *others: Path | None) -> None:
        """Called before anything is measured. Raises UsageError."""
        for file in (self.file, *others):
            if file is not None and not file.absolute().parent.is_dir():
                raise click.UsageError(f"there is no folder {file.absolute().parent} to write {file.name} to")

    def begin(self, measurement: str) -> dict[str, Any]:
        """The first part of a report: measurement, machine, versions."""
        return {"measurement": measurement, "machine": machine(), "versions": versions(self.commit)}

    def save(self, results: dict[str, Any]) -> None:
        """Writes JSON, if a file was named; to stdout if that fails, and ends the command then."""
        if self.file is not None:
            text = json.dumps(results, indent=2) + "\n"
            try:
                self.file.write_text(text)
            except OSError as error:
                click.echo(text)
                fail(f"cannot write {self.file}: {error.strerror}; the results are on stdout instead")


report_options = options(
    option("--json file", FILE, None, "Write all results to this file."),
    option("--commit", str, "", "Noted in the results.  [default: the checkout's]", "TEXT"),
)
"""The fields of Report."""


def make_plan(values: dict[str, Any], deployed: Deployed) -> DeploymentPlan:
    """A plan with the engine's flags. Ends the command with one line if workers would refuse them, or if some
    are given although a running deployment is measured."""
    ctx = click.get_current_context()
    for name in ("prefill", "decode", *fields_of(WorkerConfig)):
        if deployed.server and ctx.get_parameter_source(name) is click.core.ParameterSource.COMMANDLINE:
            flag = "--" + name.replace("_", "-")
            raise click.UsageError(
                f"{flag} is for a deployment that is started; --server names one that runs"
            )
    settings = settings_by_role(values)
    check_workers(settings, deployed.prefill)
    return DeploymentPlan(
        prefill=deployed.prefill, decode=deployed.decode, http_port=None, settings=settings, restart=False
    )


def engine_config(
    values: dict[str, Any], defaults: Callable[[dict[str, Any]], dict[str, Any]] = lambda explicit: {}
) -> WorkerConfig:
    """A configuration of the engine's flags. `defaults` returns defaults that replace the configuration's
    own. Ends the command with one line if there is no such model."""
    from baton.model_path import CheckpointError
    from baton.models.config import ModelError

    found = explicit_fields(WorkerConfig, values)
    fetch_model(found.get("model", "demo"))
    try:
        return WorkerConfig(**{**defaults(found), **found})
    except (CheckpointError, ModelError) as error:
        raise click.ClickException(str(error)) from None


@contextlib.asynccontextmanager
async def measured(server: str, plan: DeploymentPlan, console: Console) -> AsyncIterator[str]:
    """The address of the running gateway, or of a deployment that is started for the block."""
    if server:
        yield server
    else:
        async with Deployment(plan, console) as deployment:
            yield deployment.address


def run_here(work: Callable[[], None]) -> NoReturn:
    """Runs `work` without an event loop, so that Ctrl-C ends it at once, and exits with 0. After a BatonError
    exits with 1 and a line on stderr."""
    try:
        work()
    except BatonError as error:
        fail(explain(error, ""))
    raise SystemExit(0)


@contextlib.contextmanager
def open_engine(config: WorkerConfig, console: Console) -> Iterator[EngineBench]:
    """An engine in this process. Raises BatonError."""
    with console.status("Loading torch and the model"):
        from baton.bench.engine_bench import EngineBench
        from baton.rpc.logs import configure

        configure("bench", "warning")
        bench = EngineBench(config)
    try:
        yield bench
    finally:
        bench.close()


async def run_with_progress(target: Target, work: Workload, name: str, console: Console) -> LoadRun:
    """Raises ClickException if a process or every request failed."""
    with progress_bar(console, TextColumn("{task.fields[state]}"), refresh_per_second=2) as progress:
        total = len(work.jobs(target.vocabulary, target.context))
        bar = progress.add_task(name, total=total, state="warming up")

        def show(ended: int, failed: int, running: int) -> None:
            state = f"{running} running" + (f", {failed} failed" if failed else "")
            progress.update(bar, completed=ended, state=state)

        try:
            run = await run_clients(target, work, show)
        except BenchError as error:
            raise click.ClickException(str(error)) from None
        progress.update(bar, completed=len(run.records), state="")
    if run.records and all(record.error for record in run.records):
        first = run.records[0]
        raise click.ClickException(f"every request failed; the first: {first.message} ({first.error})")
    return run


async def deployment_facts(server: str) -> dict[str, Any]:
    """Facts about the processes of a deployment that answer."""
    processes = []
    for report in await ask_deployment(server):
        info = report.info
        if info is None:
            continue
        facts: dict[str, Any] = {"role": report.role, "address": report.address}
        facts |= {name: getattr(info, name) for name in ("version", "device", "attention")}
        if info.HasField("layout"):
            facts["page_size"] = info.layout.page_size
            facts["transports"] = [endpoint.WhichOneof("kind") for endpoint in info.endpoints]
        if info.HasField("model"):
            names = ("name", "architecture", "context_length", "dtype", "parameters", "fingerprint")
            facts["model"] = {name: getattr(info.model, name) for name in names}
        if report.load is not None:
            facts["pages"] = report.load.pages.total
        processes.append(facts)
    return {"server": server, "processes": processes}


def warnings(run: dict[str, Any], work: Workload) -> Iterator[str]:
    """Warnings about a run's results."""
    for reason, failures in run["failures"].items():
        yield f"{failures} of {run['requests']} requests failed: {reason}"
    if run["client_busy"] > 0.8:
        busy = f"{run['client_busy']:.0%}"
        yield f"a client used {busy} of a core and may have limited the result; raise --clients"
    alone = work.kind == "random" and not work.shared_prefix
    if alone and run["cached_tokens"] > 0.05 * run["prompt_tokens"]:
        part = run["cached_tokens"] / run["prompt_tokens"]
        yield f"{part:.0%} of the prompt tokens were cached, as if sent before: choose another --seed"
    if run["retractions"]:
        yield f"{run['retractions']} requests were retracted and recomputed: the KV pool was full"
