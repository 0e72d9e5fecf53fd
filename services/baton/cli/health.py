"""`baton health`: whether one process serves, as an exit code.

Containers run it every few seconds: it imports little.
"""

from __future__ import annotations

import asyncio

import click
import grpc
import grpc.aio
from grpc_health.v1 import health_pb2, health_pb2_grpc

from baton.cli.credentials import Credentials, brief, reachable
from baton.cli.options import SECONDS, fail, option
from baton.rpc.channel import open_channel
from baton.rpc.errors import BatonError


async def check(address: str, service: str, seconds: float) -> str:
    """The process's health: "SERVING" or "NOT_SERVING". Raises AioRpcError, and BatonError if files that the
    environment names cannot be used.

    The address may be a worker's or a gateway's. So three connections are tried: as the deployment's
    processes connect, as clients do, and without TLS. No secret and no key is sent.
    """
    known = Credentials.to(address)
    cluster, public = known.cluster.tls, known.access.credentials
    attempts: list[tuple[grpc.ChannelCredentials | None, str]] = [(None, "")]
    if public is not None:
        attempts.insert(0, (public, ""))
    if cluster is not None:
        attempts.insert(0, (cluster.channel_credentials(), cluster.name))
    first: grpc.aio.AioRpcError | None = None
    for credentials, name in attempts:
        try:
            async with open_channel(reachable(address), credentials=credentials, tls_name=name) as channel:
                stub = health_pb2_grpc.HealthStub(channel)
                answer = await stub.Check(health_pb2.HealthCheckRequest(service=service), timeout=seconds)
        except grpc.aio.AioRpcError as error:
            if error.code() is not grpc.StatusCode.UNAVAILABLE:
                raise
            first = first or error
        else:
            status: str = health_pb2.HealthCheckResponse.ServingStatus.Name(answer.status)
            return status
    assert first is not None
    raise first


@click.command()
@click.argument("address", metavar="HOST:PORT")
@click.option("--service", default="", help="Full name of a gRPC service; default: the process as a whole.")
@option("--seconds", SECONDS, 3.0, "How long to wait for the answer.")
def health(address: str, service: str, seconds: float) -> None:
    """Ask one process whether it serves (grpc.health.v1), for the probes of containers.

    Exits with 0 if it serves, else with 1 and one line that says why: it loads, drains or does not answer.
    With TLS, BATON_CLUSTER_CERT, BATON_CLUSTER_KEY and BATON_CLUSTER_CA are needed for a worker,
    BATON_TLS_CA for a gateway.

    \b
    Examples:
      baton health 127.0.0.1:50061
      baton health 127.0.0.1:50050 --service baton.v1.Inference
    """
    try:
        status = asyncio.run(check(address, service, seconds))
    except BatonError as error:
        fail(error.message)
    except grpc.aio.AioRpcError as error:
        fail(f"{address} does not answer: {brief(error)}")
    if status != "SERVING":
        fail(f"{address} is {status}")
    click.echo(status)
