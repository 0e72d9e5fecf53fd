"""What is measured: a running deployment, one that is started for it, or an engine in this process."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Callable, Iterator
from typing import TYPE_CHECKING, NoReturn

import click
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from baton.bench.clients import BenchError, Run, Target, run_clients
from baton.bench.workload import Workload
from baton.cli.console import explain
from baton.cli.deployment import Deployment, DeploymentPlan
from baton.cli.options import fail
from baton.client import BatonError
from baton.config import WorkerConfig

if TYPE_CHECKING:
    from baton.bench.engine import EngineBench


@contextlib.asynccontextmanager
async def measured(server: str, plan: DeploymentPlan, console: Console) -> AsyncIterator[str]:
    """The gateway's address: of the running deployment, or of one that is started for the block."""
    if server:
        yield server
    else:
        async with Deployment(plan, console) as deployment:
            yield deployment.address


def run_here(work: Callable[[], None]) -> NoReturn:
    """Runs what needs no event loop, so that Ctrl-C ends it at once; exits with 0. A BatonError is a line on
    stderr and 1."""
    try:
        work()
    except BatonError as error:
        fail(explain(error, ""))
    raise SystemExit(0)


@contextlib.contextmanager
def open_engine(config: WorkerConfig, console: Console) -> Iterator[EngineBench]:
    """An engine in this process. Raises BatonError when it cannot be made."""
    with console.status("Loading torch and the model"):
        from baton.bench.engine import EngineBench
        from baton.rpc.logs import configure

        configure("bench", "warning")
        bench = EngineBench(config)
    try:
        yield bench
    finally:
        bench.close()


async def run_with_progress(target: Target, work: Workload, name: str, console: Console) -> Run:
    """Raises ClickException when nothing could be measured, or every request failed."""
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("{task.fields[state]}"),
    )
    with Progress(*columns, console=console, refresh_per_second=2) as progress:
        bar = progress.add_task(
            name, total=len(work.jobs(target.vocabulary, target.context)), state="warming up"
        )

        def show(ended: int, failed: int, running: int) -> None:
            state = f"{running} under way" + (f", {failed} failed" if failed else "")
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
