"""`baton health ADDRESS`: one question to one process, for probes."""

from __future__ import annotations

import asyncio

import click
import grpc
import grpc.aio
from grpc_health.v1 import health_pb2, health_pb2_grpc

from baton.cli.dialing import Dialing
from baton.cli.nodes import brief, reachable
from baton.cli.options import fail
from baton.rpc.channel import open_channel
from baton.rpc.errors import BatonError


async def check(address: str, service: str, seconds: float) -> str:
    """What the process says of itself: "SERVING" or "NOT_SERVING". Raises grpc.aio.AioRpcError, and BatonError
    for files named by the environment that cannot be used.

    Whether a worker or a gateway is there is not known: asked is as the deployment's processes do, as clients
    do, and without TLS. No secret and no key is sent.
    """
    dialing = Dialing.to(address)
    cluster, public = dialing.cluster.tls, dialing.access.credentials
    ways: list[tuple[grpc.ChannelCredentials | None, str]] = [(None, "")]
    if public is not None:
        ways.insert(0, (public, ""))
    if cluster is not None:
        ways.insert(0, (cluster.channel_credentials(), cluster.name))
    first: grpc.aio.AioRpcError | None = None
    for credentials, name in ways:
        try:
            async with open_channel(reachable(address), credentials=credentials, tls_name=name) as channel:
                stub = health_pb2_grpc.HealthStub(channel)
                answer = await stub.Check(health_pb2.HealthCheckRequest(service=service), timeout=seconds)
        except grpc.aio.AioRpcError as error:
            if error.code() is not grpc.StatusCode.UNAVAILABLE:
                raise
            first = first or error
        else:
            said: str = health_pb2.HealthCheckResponse.ServingStatus.Name(answer.status)
            return said
    assert first is not None
    raise first


@click.command()
@click.argument("address", metavar="HOST:PORT")
@click.option("--service", default="", help="Full name of a gRPC service; default: the process as a whole.")
@click.option(
    "--seconds",
    type=click.FloatRange(0, min_open=True),
    default=3.0,
    show_default=True,
    metavar="X",
    help="How long to wait for the answer.",
)
def health(address: str, service: str, seconds: float) -> None:
    """Ask one process whether it serves (grpc.health.v1), for the probes of containers.

    Exits with 0 when it serves, else with 1 and one line that says why: it loads or drains, or does not
    answer. Where connections are encrypted, BATON_CLUSTER_CERT, BATON_CLUSTER_KEY and BATON_CLUSTER_CA say how
    to ask a worker, BATON_TLS_CA how to ask a gateway.

    \b
    Examples:
      baton health 127.0.0.1:50061
      baton health 127.0.0.1:50050 --service baton.v1.Inference
    """
    try:
        said = asyncio.run(check(address, service, seconds))
    except BatonError as error:
        fail(error.message)
    except grpc.aio.AioRpcError as error:
        fail(f"{address} does not answer: {brief(error)}")
    if said != "SERVING":
        fail(f"{address} is {said}")
    click.echo(said)
