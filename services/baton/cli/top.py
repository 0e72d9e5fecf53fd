"""`baton top`: a deployment in a terminal, live."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass

import click
import grpc.aio
from rich.console import Console, Group
from rich.live import Live
from rich.markup import escape
from rich.text import Text

from baton.cli.console import UNLIMITED, no_gateway
from baton.cli.credentials import brief
from baton.cli.node_reports import NodeReport, ask_deployment
from baton.cli.options import fail, option
from baton.cli.status import server_option, status_lines, wrong
from baton.cli.trace import ask_traces, duration, in_order
from baton.rpc.errors import BatonError
from baton.v1 import trace_pb2


@dataclass(frozen=True, slots=True)
class TopSample:
    at: float
    reports: Sequence[NodeReport]
    traces: Sequence[trace_pb2.Trace]
    """The latest requests, by the gateways' own records."""


async def sample(server: str, requests: int) -> TopSample:
    """Raises BatonError, or AioRpcError of the gateway."""
    reports = await ask_deployment(server)
    question = trace_pb2.GetTracesRequest(limit=requests, gateway_only=True)
    found, _ = await ask_traces(server, question)
    return TopSample(time.monotonic(), reports, in_order(found, question))


def rates(before: TopSample, now: TopSample) -> str:
    """What gateways have finished and the model has computed meanwhile."""
    seconds = max(now.at - before.at, 1e-9)

    old = {report.info.incarnation: report.load for report in before.reports if report.info is not None}

    def grown(roles: tuple[str, ...], counter: str) -> float:
        """A process that has been restarted meanwhile counts from 0."""
        total = 0
        for report in now.reports:
            if report.role in roles and report.info is not None and report.load is not None:
                last = old.get(report.info.incarnation)
                total += getattr(report.load, counter) - (getattr(last, counter) if last is not None else 0)
        return total / seconds

    workers = ("prefill", "decode")
    return (
        f"{grown(('gateway',), 'finished'):.1f} requests/s, "
        f"{grown(('gateway',), 'failed'):.1f} failed/s, "
        f"{grown(('decode',), 'output_tokens'):,.0f} output tokens/s, "
        f"{grown(workers, 'computed_tokens'):,.0f} computed tokens/s"
    )


def request_line(trace: trace_pb2.Trace) -> str:
    colour = {"finished": "green", "failed": "red", "cancelled": "yellow"}.get(trace.outcome, "cyan")
    phase = trace.phases[-1].name if trace.phases and not trace.outcome else ""
    outcome = trace.reason or trace.outcome or f"runs: {phase}"
    first = duration(trace.ttft_us) if trace.HasField("ttft_us") else "-"
    tokens = f"{trace.prompt_tokens} > {trace.output_tokens}"
    times = f"{first:>9} {duration(trace.total_us):>9}"
    return f"{trace.id:<24} {times} {tokens:>14}  [{colour}]{escape(outcome)}[/]"


def frame(before: TopSample, now: TopSample) -> Group:
    lines = [f"[bold]{rates(before, now)}[/]", "", *status_lines(now.reports)]
    lines += [
        f"[red]{report.role} {escape(report.address)} {escape(text)}[/]"
        for report in now.reports
        for text in wrong(report)
    ]
    lines += ["", f"[dim]{'request':<24} {'to first':>9} {'to end':>9} {'tokens':>14}  outcome[/]"]
    lines += [request_line(trace) for trace in now.traces]
    return Group(*(Text.from_markup(line, overflow="ellipsis") for line in lines))


async def watch(server: str, every: float, requests: int, console: Console, once: bool) -> None:
    last = await sample(server, requests)
    if once:
        await asyncio.sleep(every)
        console.print(frame(last, await sample(server, requests)), highlight=False)
        return
    with Live(frame(last, last), console=console, screen=True, auto_refresh=False) as live:
        while True:
            await asyncio.sleep(every)
            now = await sample(server, requests)
            live.update(frame(last, now), refresh=True)
            last = now


@click.command()
@server_option
@option("--every", click.FloatRange(min=0.2), 1.0, "Seconds between two looks.", "SECONDS")
@option("--requests", click.IntRange(0, 100), 12, "Latest requests to list.", "N")
@click.option("--once", is_flag=True, help="Print one look and end; so does output that is no terminal.")
def top(server: str, every: float, requests: int, once: bool) -> None:
    """Watch a running deployment: rates, processes, the latest requests. Ctrl-C ends it.

    \b
    Examples:
      baton top
      baton top --server 10.0.0.5:50050 --every 2
      baton top --once
    """
    console = Console()
    if not console.is_terminal:
        console = Console(width=UNLIMITED)
    try:
        asyncio.run(watch(server, every, requests, console, once or not console.is_terminal))
    except KeyboardInterrupt:
        return
    except BatonError as error:
        fail(error.message, code=2)
    except grpc.aio.AioRpcError as error:
        fail(no_gateway(server, brief(error)))
