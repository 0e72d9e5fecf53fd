"""Connects to the processes of a running deployment and reads their identity, load and health."""

from __future__ import annotations

import asyncio
import dataclasses
import os
from typing import Any

import grpc
import grpc.aio
from grpc_health.v1 import health_pb2, health_pb2_grpc

from baton.cli import local_secret
from baton.cli.options import fields_of
from baton.client.access import Access
from baton.config import NodeConfig
from baton.rpc.authentication import Cluster
from baton.rpc.channel import open_channel
from baton.v1 import node_pb2, node_pb2_grpc

CLUSTER_FIELDS = ("cluster_secret_file", "cluster_cert", "cluster_key", "cluster_ca", "cluster_tls_name")


@dataclasses.dataclass(frozen=True, slots=True)
class Credentials:
    """cluster: the deployment's credentials. access: those of a client of its gateway."""

    cluster: Cluster
    access: Access

    @classmethod
    def to(cls, gateway: str) -> Credentials:
        """For the deployment with this gateway: the secret that `baton up` generated here, else the files
        that the environment names (BATON_CLUSTER_SECRET_FILE and the like). Raises BatonError."""
        variables = {name: fields_of(NodeConfig)[name].variable for name in CLUSTER_FIELDS}
        named: dict[str, Any] = {name: os.environ.get(variable, "") for name, variable in variables.items()}
        secret = local_secret.find(gateway)
        if secret:
            named["cluster_secret_file"] = ""
        in_clear = os.environ.get("BATON_CLUSTER_SECRET_IN_CLEAR", "").lower() in ("1", "true", "yes", "on")
        cluster = Cluster.load(NodeConfig(**named, cluster_secret_in_clear=in_clear))
        return cls(dataclasses.replace(cluster, secret=secret or cluster.secret), Access.of(None, None))

    def gateway(self, address: str) -> grpc.aio.Channel:
        """A channel to the gateway, with the client's and the deployment's credentials."""
        encrypted = self.access.credentials is not None
        metadata = (*self.access.metadata, *self.cluster.metadata(address, encrypted))
        return open_channel(address, credentials=self.access.credentials, metadata=metadata)

    def node(self, address: str) -> grpc.aio.Channel:
        """A channel to any other process."""
        return self.cluster.dial(address)


ORDER = {"gateway": 0, "tokenizer": 1, "prefill": 2, "decode": 3}


@dataclasses.dataclass(frozen=True, slots=True)
class NodeReport:
    """Answer of one process."""

    role: str
    address: str
    info: node_pb2.NodeInfo | None = None
    load: node_pb2.Load | None = None
    health: str = "UNREACHABLE"
    """Of gRPC health ("SERVING", "NOT_SERVING"), or "UNREACHABLE"."""
    error: str = ""


def reachable(address: str) -> str:
    """The address at which a client on this machine reaches a bound address."""
    return address.replace("0.0.0.0", "127.0.0.1").replace("[::]", "[::1]")


def brief(error: grpc.aio.AioRpcError) -> str:
    """Message of a failed call, without gRPC's list of the addresses it tried."""
    details: str = error.details() or error.code().name
    return details.rpartition(": ")[2] if error.code() is grpc.StatusCode.UNAVAILABLE else details


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
    wanted = {gateway: "gateway"}
    while wanted:
        answers = await asyncio.gather(
            *(ask(address, role, credentials, seconds) for address, role in wanted.items())
        )
        reports |= zip(wanted, answers, strict=True)
        peers = [peer for answer in answers if answer.info is not None for peer in answer.info.peers]
        wanted = {peer.address: peer.role for peer in peers if peer.address not in reports}
    # A gateway that shares its port may have answered there and at its own port.
    different = {
        report.info.incarnation if report.info else address: report
        for address, report in reversed(reports.items())
    }
    return sorted(different.values(), key=lambda report: ORDER.get(report.role, len(ORDER)))
