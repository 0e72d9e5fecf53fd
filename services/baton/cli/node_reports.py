"""Connects to the processes of a running deployment and reads their identity, load and health."""

from __future__ import annotations

import asyncio
import dataclasses

import grpc.aio
from grpc_health.v1 import health_pb2, health_pb2_grpc

from baton.cli.credentials import Credentials, brief, reachable
from baton.v1 import node_pb2, node_pb2_grpc

ORDER = {"gateway": 0, "tokenizer": 1, "prefill": 2, "decode": 3, "encode": 4}


@dataclasses.dataclass(frozen=True, slots=True)
class NodeReport:
    """Answer of one process."""

    role: str
    address: str
    info: node_pb2.NodeInfo | None = None
    load: node_pb2.Load | None = None
    health: str = "UNREACHABLE"
    """Status of gRPC health ("SERVING", "NOT_SERVING"), or "UNREACHABLE"."""
    error: str = ""


async def ask(address: str, role: str, credentials: Credentials, seconds: float = 3.0) -> NodeReport:
    """Does not raise if the process does not answer."""
    dial = credentials.gateway if role == "gateway" else credentials.node
    channel = dial(reachable(address))
    node = node_pb2_grpc.NodeStub(channel)
    health = health_pb2_grpc.HealthStub(channel)
    try:
        info, load, check = await asyncio.gather(
            node.GetInfo(node_pb2.GetInfoRequest(), timeout=seconds),
            node.GetLoad(node_pb2.GetLoadRequest(), timeout=seconds),
            health.Check(health_pb2.HealthCheckRequest(), timeout=seconds),
        )
    except grpc.aio.AioRpcError as error:
        return NodeReport(role, address, error=brief(error))
    finally:
        await channel.close()
    status = health_pb2.HealthCheckResponse.ServingStatus.Name(check.status)
    return NodeReport(info.role, address, info, load, status)


async def ask_deployment(gateway: str, seconds: float = 3.0) -> list[NodeReport]:
    """Reports of the gateway, the processes it connects to, and those that they connect to.

    Raises BatonError if files that the environment names cannot be used.
    """
    credentials = Credentials.to(reachable(gateway))
    reports: dict[str, NodeReport] = {}
    roles = {gateway: "gateway"}
    while roles:
        answers = await asyncio.gather(
            *(ask(address, role, credentials, seconds) for address, role in roles.items())
        )
        reports |= zip(roles, answers, strict=True)
        peers = [peer for answer in answers if answer.info is not None for peer in answer.info.peers]
        roles = {peer.address: peer.role for peer in peers if peer.address not in reports}
    # A gateway that shares its port may have answered there and at its own port.
    different = {
        report.info.incarnation if report.info else address: report
        for address, report in reversed(reports.items())
    }
    return sorted(different.values(), key=lambda report: ORDER.get(report.role, len(ORDER)))
