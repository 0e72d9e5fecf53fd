"""`baton status`: every process of a running deployment."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from typing import Any

import click
from google.protobuf.json_format import MessageToDict
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from baton.cli.console import UNLIMITED, no_gateway
from baton.cli.node_reports import NodeReport, ask_deployment
from baton.cli.options import fail, option
from baton.cli.serve import DEFAULT_PORTS
from baton.rpc.address import join_address, loopback
from baton.rpc.errors import BatonError
from baton.v1 import node_pb2

_HEALTH = {"SERVING": "[green]serving[/]", "NOT_SERVING": "[yellow]not serving[/]"}


def default_server() -> str:
    """The address of a gateway that `baton up` has started here without --host and --port."""
    return join_address(loopback(), DEFAULT_PORTS["gateway"][0])


server_option = option(
    "--server",
    str,
    default_server,
    "The gateway's gRPC address.  [default: 127.0.0.1:50050]",
    "HOST:PORT",
    envvar="BATON_SERVER",
    show_envvar=True,
)
"""The gateway; the argument is `server`."""


def wrong(report: NodeReport) -> list[str]:
    """Problems of a process, as text."""
    if report.info is None or report.load is None:
        return [f"unreachable: {report.error}"]
    found = [f"{problem.reason}: {problem.message}" for problem in report.load.problems]
    if report.load.draining:
        found.insert(0, "DRAINING: takes no new requests")
    elif report.health != "SERVING" and not found:
        found = [f"health is {report.health}"]
    return found


def _as_dict(report: NodeReport) -> dict[str, Any]:
    found: dict[str, Any] = {"role": report.role, "address": report.address, "health": report.health}
    found["wrong"] = wrong(report)
    if report.error:
        found["error"] = report.error
    for name, message in (("info", report.info), ("load", report.load)):
        if message is not None:
            found[name] = MessageToDict(message, preserving_proto_field_name=True)
    return found


def _load(report: NodeReport) -> str:
    """The counts that are not zero, as text."""
    load = report.load
    if load is None:
        return ""
    counts = {
        "waiting": load.waiting,
        "prefilling": load.prefilling,
        "handing off": load.handing_off,
        "running": load.running if report.role != "encode" else 0,
        "encoding": load.running if report.role == "encode" else 0,
        "paused": load.paused,
        "pulls": load.pulls,
    }
    words = [f"{count} {word}" for word, count in counts.items() if count]
    if load.drafter and sum(load.drafted_places[:1]):
        length = 1 + load.accepted_drafts / load.drafted_places[0]
        words.append(f"{length:.2f} tokens a row with drafts ({load.drafter})")
    if load.encoded_images:
        size = load.encoded_images / load.encode_batches
        words.append(f"{load.encoded_images} images so far, {size:.1f} a batch")
    if not words:
        words = [f"{load.requests} requests"] if load.requests else ["idle"]
    return ", ".join(["draining", *words] if load.draining else words)


def _leases(report: NodeReport) -> str:
    if report.load is None or not report.load.leases:
        return ""
    return f"{report.load.leases}, oldest {report.load.oldest_lease_ms / 1000:.1f} s"


def _peers(report: NodeReport) -> str:
    """How many peers of the process are connected, as text."""
    info = report.info
    others = ("encode", info.role) if info is not None else ()  # workers connect to encode nodes
    peers = [peer for peer in info.peers if peer.role not in others] if info is not None else []
    return f"{sum(peer.connected for peer in peers)} of {len(peers)}" if peers else ""


def _pages(report: NodeReport) -> str:
    if report.load is None or not report.load.pages.total:
        return ""
    pages = report.load.pages
    text = f"{pages.free} free, {pages.cached} cached of {pages.total}"
    if pages.quarantined:
        text += f", [red]{pages.quarantined} quarantined[/]"
    host = report.load.host_pages
    if host.total:
        text += f"; host {host.cached} cached of {host.total}"
    size = report.load.disk_bytes
    return f"{text}; disk {size / 2**30:.1f} GiB" if size else text


def _default_sampling(gateway: NodeReport) -> str:
    """The sampling parameters that the checkpoint recommends, as text."""
    if gateway.info is None:
        return ""
    values = gateway.info.model.default_sampling.ListFields()
    return ", ".join(f"{field.name} {value:.6g}" for field, value in values)


def _role_change(change: node_pb2.RoleChange) -> str:
    """A line of text."""
    age = change.age_ms // 1000
    return f"{change.address} was made a {change.to} node {age} s ago (--auto-roles): {change.why}"


def _device(info: node_pb2.NodeInfo) -> str:
    """With the number of ranks where there are several, their hosts, and the memory that they occupy."""
    if not info.ranks:
        return info.device
    hosts = len({rank.host for rank in info.ranks})
    where = f" on {hosts} hosts" if hosts > 1 else ""
    memory = ", ".join(f"{rank.resident_bytes / 2**30:.1f}" for rank in info.ranks)
    return f"{info.device} x {len(info.ranks)}{where} ({memory} GiB)"


def status_table(reports: Sequence[NodeReport]) -> Table:
    """A row for each process."""
    table = Table(box=None, pad_edge=False, header_style="bold")
    who = ("role", "address", "pid", "incarnation", "health", "peers", "model", "device")
    for column in (*who, "load", "leases", "pages"):
        table.add_column(column, no_wrap=True)
    for report in reports:
        info = report.info
        if info is None:
            table.add_row(report.role, escape(report.address), "", "", "[red]unreachable[/]")
            continue
        model = f"{info.model.name} {info.model.dtype}".strip()
        table.add_row(
            report.role,
            escape(report.address),
            str(info.pid),
            f"{info.incarnation:016x}"[:8],
            _HEALTH.get(report.health, report.health),
            _peers(report),
            escape(model),
            escape(_device(info)),
            _load(report),
            _leases(report),
            _pages(report),
        )
    return table


def status_lines(reports: Sequence[NodeReport]) -> list[str]:
    """For narrow terminals: two lines for each process, the second one of details."""
    roles = max((len(report.role) for report in reports), default=0)
    addresses = max((len(report.address) for report in reports), default=0)
    found = []
    for report in reports:
        info = report.info
        address = escape(report.address) + " " * (addresses - len(report.address))
        start = f"[bold]{report.role:<{roles}}[/]  {address}"
        if info is None:
            found.append(f"{start}  [red]unreachable[/]")
            continue
        found.append(f"{start}  {_HEALTH.get(report.health, report.health)}, {_load(report)}")
        peers, leases, pages = _peers(report), _leases(report), _pages(report)
        details = (
            f"pid {info.pid}",
            escape(f"{info.model.name} {info.model.dtype} {_device(info)}".strip()),
            f"peers {peers}" if peers else "",
            f"leases {leases}" if leases else "",
            f"pages {pages}" if pages else "",
        )
        found.append(f"{'':<{roles}}  [dim]{', '.join(detail for detail in details if detail)}[/]")
    return found


def print_status(reports: Sequence[NodeReport], console: Console) -> None:
    """A table where it fits, or where nobody says how wide a line may be, as in a pipe."""
    table = status_table(reports)
    if not console.is_terminal:
        console = Console(file=console.file, width=UNLIMITED)
    if console.measure(table, options=console.options.update(width=UNLIMITED)).maximum <= console.width:
        console.print(table, highlight=False)
        return
    for line in status_lines(reports):
        console.print(line, highlight=False, soft_wrap=False)


def print_problems(reports: Sequence[NodeReport], console: Console) -> None:
    """A line each, however long, so that it can be searched for."""
    defaults = _default_sampling(reports[0])
    lines = [f"where requests say nothing: {defaults} (--generation-config)"] if defaults else []
    for report in reports:
        if report.info is not None and report.info.HasField("role_change"):
            lines.append(escape(_role_change(report.info.role_change)))
        who = f"{report.role} {escape(report.address)}"
        lines += [f"[red]{who}[/] {escape(text)}" for text in wrong(report)]
    for line in lines:
        console.print(line, highlight=False, soft_wrap=True)


@click.command()
@server_option
@click.option(
    "--json", "as_json", is_flag=True, help="One JSON array on stdout, with all data of each process."
)
def status(server: str, as_json: bool) -> None:
    """Show every process of a running deployment: health, load, leases, pages and problems.

    The gateway and its decode nodes name the processes that they connect to, and each of these is asked.
    Exits with 1 if one of them has a problem. 'baton probe' sends a request through the deployment.

    \b
    Examples:
      baton status
      baton status --server 10.0.0.5:50050 --json
    """
    try:
        reports = asyncio.run(ask_deployment(server))
    except BatonError as error:
        fail(error.message, code=2)
    if as_json:
        click.echo(json.dumps([_as_dict(report) for report in reports], indent=2))
    elif reports[0].info is None:
        fail(no_gateway(server, reports[0].error))
    else:
        console = Console()
        print_status(reports, console)
        print_problems(reports, console)
    raise SystemExit(1 if any(wrong(report) for report in reports) else 0)
