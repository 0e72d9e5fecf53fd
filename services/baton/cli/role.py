"""`baton role`: makes a prefill node a decode node, or the other way round, while it serves."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import click
import grpc.aio

from baton.cli.console import no_gateway
from baton.cli.credentials import Credentials, brief, reachable
from baton.cli.node_reports import NodeReport, ask_deployment
from baton.cli.options import SIZE, fail, option
from baton.cli.status import server_option
from baton.rpc.errors import BatonError, failed_precondition, from_rpc_error, unavailable
from baton.v1 import node_pb2, node_pb2_grpc

WORKERS = ("prefill", "decode")
MARGIN_SECONDS = 20.0
"""What a change may take beyond the time that requests have: see worker.process."""


def check_change(reports: Sequence[NodeReport], node: str, role: str, force: bool) -> None:
    """Raises BatonError when the node is no worker of the deployment, and without `force` when it is the last
    of its role, or would decode and holds less than the deployment accepts now."""
    workers = {each.address: each for each in reports if each.role in WORKERS}
    report = workers.get(node)
    if report is None:
        known = ", ".join(f"{each.address} ({each.role})" for each in workers.values()) or "none"
        raise failed_precondition(f"{node} is no worker of this deployment; there are: {known}")
    others = [each for each in workers.values() if each.role == report.role and each.health == "SERVING"]
    if report.role != role and not force and all(each is report for each in others):
        text = f"{node} is the last {report.role} node that serves; --force makes it a {role} node anyway"
        raise failed_precondition(text)
    decode = [each for each in workers.values() if each.role == "decode" and each.info is not None]
    accepted = min((_context(each) for each in decode), default=0)
    if report.role != role == "decode" and not force and _context(report) < accepted:
        text = f"{node} holds at most {_context(report)} tokens of prompt and output, {accepted} are accepted"
        text += " now; --force makes it a decode node anyway, and longer requests are refused"
        raise failed_precondition(text)


def _context(report: NodeReport) -> int:
    """What the gateway accepts is the least of its decode nodes'."""
    return report.info.model.context_length if report.info is not None else 0


async def set_role(
    credentials: Credentials, node: str, role: str, seconds: float
) -> node_pb2.SetRoleResponse:
    """Changes the node's role, whatever others there are. Raises BatonError."""
    request = node_pb2.SetRoleRequest(role=role, timeout_ms=round(1000 * seconds))
    async with credentials.node(reachable(node)) as channel:
        ask = node_pb2_grpc.NodeStub(channel).SetRole
        try:
            answer: node_pb2.SetRoleResponse = await ask(request, timeout=seconds + MARGIN_SECONDS)
        except grpc.aio.AioRpcError as error:
            if error.code() is grpc.StatusCode.UNAVAILABLE:
                raise unavailable(f"{node} does not answer: {brief(error)}") from error
            raise from_rpc_error(error) from error
    return answer


async def _change(server: str, node: str, role: str, seconds: float, force: bool) -> node_pb2.SetRoleResponse:
    reports = await ask_deployment(server)
    if reports[0].info is None:
        raise unavailable(no_gateway(server, reports[0].error))
    check_change(reports, node, role, force)
    return await set_role(Credentials.to(reachable(server)), node, role, seconds)


@click.command()
@click.argument("node", metavar="HOST:PORT")
@click.argument("role", type=click.Choice(WORKERS))
@server_option
@option("--seconds", SIZE, 5, "How long what runs there may go on, before it is handed back.")
@click.option(
    "--force", is_flag=True, help="Also the last one of its role, or one that shrinks what is accepted."
)
def role(node: str, role: str, server: str, seconds: int, force: bool) -> None:
    """Make a prefill node a decode node, or a decode node a prefill node, while it serves.

    It refuses new work at once. What runs there may end within --seconds; the rest goes on at other nodes,
    without a lost or repeated token. Weights and cached pages stay. 'baton status' shows nodes and their
    roles. Needs the deployment's secret or certificates, as draining does. After a restart of its process a
    node has the role that the process was started with.

    \b
    Examples:
      baton role 127.0.0.1:12345 prefill
      baton role 10.0.0.5:50071 prefill --server 10.0.0.4:50050 --seconds 30
    """
    try:
        answer = asyncio.run(_change(server, node, role, seconds, force))
    except BatonError as error:
        fail(error.message)
    click.echo(
        f"{node} is a {role} node: {answer.handed_back} requests were handed back, "
        f"and it served nobody for {answer.pause_ms} ms"
    )
