"""`baton bench profile`: the costs of steps, pulls and messages on this machine, for `baton plan`."""

from __future__ import annotations

import asyncio
import json
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from rich.console import Console

from baton.bench.processes import BenchError
from baton.cli.bench_options import NUMBERS, Report, engine_config, open_engine, report_options, run_here
from baton.cli.console import progress_bar, shown, table
from baton.cli.deployment import Deployment, DeploymentPlan
from baton.cli.options import (
    PROCESS,
    SECONDS,
    SectionedCommand,
    config_options,
    option,
    options,
    take,
)
from baton.cli.supervisor import ChildError
from baton.config import WorkerConfig
from baton.sizing.profile import EngineFacts, HostCost, Profile, to_dict

if TYPE_CHECKING:
    from baton.bench.profile import Fitted


@dataclass(frozen=True, slots=True)
class ProfileOptions:
    """The command's options."""

    rows: tuple[int, ...]
    contexts: tuple[int, ...]
    chunks: tuple[int, ...]
    seconds: float
    transport: str | None
    host: bool


def _profile(config: WorkerConfig, asked: ProfileOptions, output: Report, console: Console) -> None:
    report = output.begin("profile")
    # Refreshed between measurements only: a refresh thread would take time from the steps.
    with open_engine(config, console) as bench:
        from baton.bench.profile import fitted, grid, measure_all, points, problem

        shapes = grid(asked.rows, asked.contexts, asked.chunks)
        skipped = {str(shape): why for shape in shapes if (why := problem(shape, bench))}
        usable = [shape for shape in shapes if str(shape) not in skipped]
        if not usable:
            raise click.ClickException("nothing can be measured: this engine can run no step of the grid")
        with progress_bar(console, auto_refresh=False) as progress:
            bar = progress.add_task("steps", total=len(usable), completed=-1)

            def on_progress(shape: object) -> None:
                progress.advance(bar)
                progress.refresh()

            measured = measure_all(bench, usable, asked.seconds, on_progress)
            progress.update(bar, completed=len(usable), refresh=True)
        found = fitted(measured)
        report |= {"points": points(measured, found), "skipped": skipped, "fit_error": found.summary()}
        report["engine"] = bench.facts()
        engine = _facts(bench)
        layout, device = bench.engine.pool.layout, bench.engine.device

    from baton.bench.kv_transfer import pull_cost
    from baton.transport import SegmentError, TransportError

    with console.status("Pulling pages from another process"):
        try:
            pull = asyncio.run(pull_cost(layout, device, asked.transport or ""))
        except (TransportError, SegmentError, BenchError) as error:
            raise click.ClickException(f"pulls cannot be measured: {error}") from None
    host = None
    if asked.host:
        try:
            host = asyncio.run(host_cost(console))
        except (ChildError, BenchError) as error:
            raise click.ClickException(f"the host's cost cannot be measured: {error}") from None
    profile = Profile(found.cost, engine, pull, host or HostCost(), () if host is not None else ("host",))
    known = to_dict(profile)
    report |= known | {"engine": {**report["engine"], **known["engine"]}}
    output.save(report)
    show(profile, found, report, console)


async def host_cost(console: Console) -> HostCost:
    """Measured with a deployment of its own. Raises ChildError, BenchError or BatonError."""
    from baton.bench.profile import SPLIT, STEP, measure_host

    with tempfile.TemporaryDirectory(prefix="baton-profile-") as folder:
        profile = Path(folder) / "steps.json"
        profile.write_text(json.dumps({"step": asdict(STEP)}))
        worker = {"step_profile": str(profile), "device": "cpu", "kv_tokens": 16384, "threads": 1}
        settings = {"prefill": worker, "decode": {**worker, **SPLIT}}
        plan = DeploymentPlan(http_port=None, settings=settings, restart=False)
        async with Deployment(plan, console) as deployment:
            return await measure_host(deployment.address, STEP)


def _facts(bench: Any) -> EngineFacts:
    pool, config = bench.engine.pool, bench.config
    return EngineFacts(
        page_size=pool.layout.page_size,
        kv_tokens=pool.num_pages // len(pool.layout.groups) * pool.layout.page_size,
        context_length=bench.context,
        max_rows=config.max_rows,
        token_budget=config.token_budget,
        page_bytes=pool.layout.page_bytes,
        overlap=bench.engine.overlap,
        device=bench.engine.device.type,
        ranks=config.tp,
        windows=tuple(group.spec.window or 0 for group in pool.layout.groups),
    )


def show(profile: Profile, found: Fitted, report: dict[str, Any], console: Console) -> None:
    cost, pull, host, error = profile.step, profile.pull, profile.host, report["fit_error"]
    rows = table("a step", "ms")
    for name, seconds in (
        ("fixed", cost.fixed),
        ("each decode row", cost.row),
        ("each 1,000 context tokens of decode rows", 1e3 * cost.key),
        ("each 100 prompt tokens", 100 * cost.token),
        ("each million attention pairs of prompts", 1e6 * cost.pair),
    ):
        rows.add_row(name, shown(1e3 * seconds, 3))
    console.print(rows)
    console.print(
        f"Error of the fit over {len(found.errors)} measured steps: median {error['median']:.1%}, "
        f"p90 {error['p90']:.1%}, largest {error['worst']:.1%}.",
        highlight=False,
    )
    console.print(
        f"Pulls ({pull.transport}): {pull.latency * 1e3:.2f} ms and {pull.bytes_per_second / 1e9:.1f} GB/s.",
        highlight=False,
    )
    if profile.missing:
        return
    console.print(
        f"Host: {host.turn * 1e3:.2f} ms a step and {host.row * 1e6:.0f} us a row, "
        f"{host.request * 1e3:.1f} ms a request, {host.hop * 1e3:.2f} ms a message of a hand-off.",
        highlight=False,
    )


@click.command(cls=SectionedCommand)
@options(
    option("--rows", NUMBERS, "1,2,4,8,16,32,48", "Decode rows of a step."),
    option(
        "--contexts", NUMBERS, "64,256,1024,4096,16384", "Tokens before each row and before a prompt's chunk."
    ),
    option("--chunks", NUMBERS, "16,64,128,256,512,2048", "Prompt tokens of a step."),
    option("--seconds", SECONDS, 0.3, "Time for which each kind of step is repeated."),
    option(
        "--transport",
        click.Choice(["shm", "cuda_ipc", "grpc"]),
        None,
        "Transport of the pulls.  [default: shm on a CPU, cuda_ipc on a GPU]",
    ),
    click.option("--host/--no-host", default=True, help="Start processes and measure their messages."),
    report_options,
    config_options(WorkerConfig, leave_out=PROCESS | {"step_profile", "step_cost"}),
)
def profile(**values: Any) -> None:
    """Measure what steps, pulls and messages cost on this machine, for `baton plan`.

    Steps: the model runs in this process, over a grid of decode rows, contexts and prompt chunks. A linear
    cost is fitted to their times, and its error is printed. Steps that exceed the engine's limits are left
    out. Pulls: pages come from another process. Messages: a deployment is started whose steps take 10 ms and
    compute nothing (demo model, on the CPU); the rest of its latency is the host's cost.

    Measure with the flags of the workers to be planned (--threads, --max-rows, --dtype, ...), and with
    nothing else running. `--step-profile` reads the file too.

    \b
    Examples:
      baton bench profile --json profile.json
      baton bench profile --threads 1 --rows 1,8,32 --contexts 128,512 --chunks 64,256 --json profile.json
      baton bench profile --model ./qwen3-8b --load-format dummy --device cuda --json h200.json
    """
    output, asked = take(Report, values), take(ProfileOptions, values)
    output.check_writable()
    console = Console()
    config = engine_config(values)
    run_here(lambda: _profile(config, asked, output, console))
