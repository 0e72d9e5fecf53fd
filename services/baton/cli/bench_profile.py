"""`baton bench profile`: what steps, pulls and messages cost here, for `baton plan`."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from baton.bench.clients import BenchError
from baton.cli.bench_options import Numbers, check_writable, engine_config, report_options
from baton.cli.bench_report import about, save, shown, table
from baton.cli.bench_running import open_engine, run_here
from baton.cli.console import run_until_signal
from baton.cli.deployment import Deployment, DeploymentPlan
from baton.cli.options import SectionedCommand, config_options, fields_of
from baton.cli.supervisor import ChildError
from baton.config import NodeConfig, WorkerConfig
from baton.plan.profile import EngineFacts, HostCost, Profile, to_dict

if TYPE_CHECKING:
    from baton.bench.profile import Fitted

INTERRUPTED = 130


@dataclass(frozen=True, slots=True)
class Measurement:
    """What to do."""

    rows: tuple[int, ...]
    contexts: tuple[int, ...]
    chunks: tuple[int, ...]
    seconds: float
    transport: str
    host: bool
    file: Path | None
    commit: str


def _profile(config: WorkerConfig, measurement: Measurement, console: Console) -> None:
    from baton.cli.supervisor import ChildError
    from baton.transport import SegmentError, TransportError

    report = about("profile", measurement.commit)
    # Drawn between measurements only: a thread that draws would take its share of the steps' time.
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with open_engine(config, console) as bench:
        from baton.bench.profile import fitted, grid, measure_all, points, problem

        shapes = grid(measurement.rows, measurement.contexts, measurement.chunks)
        skipped = {str(shape): why for shape in shapes if (why := problem(shape, bench))}
        usable = [shape for shape in shapes if str(shape) not in skipped]
        if not usable:
            raise click.ClickException("nothing can be measured: no step of the grid fits this engine")
        with Progress(*columns, console=console, auto_refresh=False) as progress:
            bar = progress.add_task("steps", total=len(usable), completed=-1)

            def told(shape: object) -> None:
                progress.advance(bar)
                progress.refresh()

            measured = measure_all(bench, usable, measurement.seconds, told)
            progress.update(bar, completed=len(usable), refresh=True)
        found = fitted(measured)
        report |= {"points": points(measured, found), "skipped": skipped, "fit_error": found.summary()}
        report["engine"] = bench.facts()
        engine = _facts(bench)
        layout, device = bench.engine.pool.layout, bench.engine.device

    from baton.bench.transfer import pull_cost

    with console.status("Pulling pages from another process"):
        try:
            pull = _run(lambda: pull_cost(layout, device, measurement.transport))
        except (TransportError, SegmentError, ChildError) as error:
            raise click.ClickException(f"pulls cannot be measured: {error}") from None
    host = _host(console) if measurement.host else None
    missing = () if host is not None else ("host",)
    profile = Profile(found.cost, engine, pull, host or HostCost(), missing)
    known = to_dict(profile)
    report |= known | {"engine": {**report["engine"], **known["engine"]}}
    save(report, measurement.file)
    show(profile, found, report, console)


def _run(main: Callable[[], Any]) -> Any:
    """In an event loop; a signal ends the command."""
    found: list[Any] = []

    async def work() -> int:
        found.append(await main())
        return 0

    if run_until_signal(work):
        raise SystemExit(INTERRUPTED)
    return found[0]


def _host(console: Console) -> HostCost:
    try:
        cost: HostCost = _run(lambda: host_cost(console))
    except (ChildError, BenchError) as error:
        raise click.ClickException(f"the host's part cannot be measured: {error}") from None
    return cost


async def host_cost(console: Console) -> HostCost:
    """Starts a deployment for it. Raises ChildError, BenchError or BatonError."""
    from baton.bench.profile import SPLIT, STEP, measure_host

    with tempfile.TemporaryDirectory(prefix="baton-profile-") as folder:
        profile = Path(folder) / "steps.json"
        profile.write_text(json.dumps({"step": asdict(STEP)}))
        worker = ("--step-profile", str(profile), "--device", "cpu", "--kv-tokens", "16384", "--threads", "1")
        flags = {"prefill": worker, "decode": (*worker, *SPLIT)}
        plan = DeploymentPlan(http_port=None, flags=flags, restart=False)
        async with Deployment(plan, console) as deployment:
            return await measure_host(deployment.address, STEP)


def _facts(bench: Any) -> EngineFacts:
    pool, config = bench.engine.pool, bench.config
    return EngineFacts(
        page_size=pool.layout.page_size,
        kv_tokens=pool.num_pages * pool.layout.page_size,
        context_length=bench.context,
        max_rows=config.max_rows,
        token_budget=config.token_budget,
        page_bytes=pool.layout.page_bytes,
        overlap=bench.engine.overlap,
        device=bench.engine.device.type,
    )


def show(profile: Profile, found: Fitted, report: dict[str, Any], console: Console) -> None:
    cost, pull, host, error = profile.step, profile.pull, profile.host, report["fit_error"]
    rows = table("a step", "ms")
    for name, seconds in (
        ("any", cost.fixed),
        ("each decode row", cost.row),
        ("each 1,000 tokens that they attend to", 1e3 * cost.key),
        ("each 100 prompt tokens", 100 * cost.token),
        ("each million pairs of prompt tokens that attend", 1e6 * cost.pair),
    ):
        rows.add_row(name, shown(1e3 * seconds, 3))
    console.print(rows)
    console.print(
        f"These figures miss half of {len(found.errors)} measured steps by less than {error['median']:.1%}, "
        f"90 % by less than {error['p90']:.1%}, one by {error['worst']:.1%}.",
        highlight=False,
    )
    console.print(
        f"Pulls ({pull.transport}): {pull.latency * 1e3:.2f} ms and {pull.bytes_per_second / 1e9:.1f} GB/s.",
        highlight=False,
    )
    if profile.missing:
        return
    console.print(
        f"Around the steps: {host.turn * 1e3:.2f} ms a step and {host.row * 1e6:.0f} us a row, "
        f"{host.request * 1e3:.1f} ms a request, {host.hop * 1e3:.2f} ms a message of a hand-off.",
        highlight=False,
    )


@click.command(cls=SectionedCommand)
@click.option(
    "--rows", type=Numbers(), default="1,2,4,8,16,32,48", show_default=True, help="Decode rows of a step."
)
@click.option(
    "--contexts",
    type=Numbers(),
    default="64,256,1024,4096,16384",
    show_default=True,
    help="Tokens behind each row, and before a prompt's chunk.",
)
@click.option(
    "--chunks",
    type=Numbers(),
    default="16,64,128,256,512,2048",
    show_default=True,
    help="Prompt tokens of a step.",
)
@click.option(
    "--seconds",
    type=click.FloatRange(min=0, min_open=True),
    default=0.3,
    show_default=True,
    metavar="X",
    help="How long each kind of step is repeated.",
)
@click.option(
    "--transport",
    type=click.Choice(["shm", "cuda_ipc", "grpc"]),
    help="Of the pulls.  [default: shm on a CPU, cuda_ipc on a GPU]",
)
@click.option("--host/--no-host", default=True, help="Whether to start processes and measure messages too.")
@report_options
@config_options(WorkerConfig, leave_out={*fields_of(NodeConfig), "step_profile"})
def profile(
    rows: tuple[int, ...], contexts: tuple[int, ...], chunks: tuple[int, ...], seconds: float,
    transport: str | None, host: bool, file: Path | None, commit: str, **values: Any,
) -> None:  # fmt: skip
    """Measure what steps, pulls and messages cost on this machine, for `baton plan`.

    Steps: the model runs inside this process, over a grid of decode rows, contexts and prompt chunks; a line
    is fitted through their times, and its error told. What does not fit the engine is left out. Pulls: pages
    come from another process. Messages: a deployment is started whose steps take 10 ms and compute nothing
    (demo model, on the CPU), and asked; what its client sees beyond that is the host's.

    Measure with the flags of the workers to be planned (--threads, --max-rows, --dtype, ...), and nothing
    else running. The file is also what `--step-profile` reads.

    \b
    Examples:
      baton bench profile --json profile.json
      baton bench profile --threads 1 --rows 1,8,32 --contexts 128,512 --chunks 64,256 --json profile.json
      baton bench profile --model ./qwen3-8b --load-format dummy --device cuda --json h200.json
    """
    check_writable(file)
    measurement = Measurement(rows, contexts, chunks, seconds, transport or "", host, file, commit)
    console = Console()
    config = engine_config(values)
    run_here(lambda: _profile(config, measurement, console))
