"""`baton health ADDRESS`: one question to one process, for probes."""

from __future__ import annotations

import asyncio

import click
import grpc.aio
from grpc_health.v1 import health_pb2, health_pb2_grpc

from baton.cli.nodes import brief, reachable
from baton.cli.options import fail
from baton.rpc.channel import open_channel


async def check(address: str, service: str, seconds: float) -> str:
    """What the process says of itself: "SERVING" or "NOT_SERVING". Raises grpc.aio.AioRpcError."""
    async with open_channel(reachable(address)) as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        answer = await stub.Check(health_pb2.HealthCheckRequest(service=service), timeout=seconds)
    name: str = health_pb2.HealthCheckResponse.ServingStatus.Name(answer.status)
    return name


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
    answer.

    \b
    Examples:
      baton health 127.0.0.1:50061
      baton health 127.0.0.1:50050 --service baton.v1.Inference
    """
    try:
        said = asyncio.run(check(address, service, seconds))
    except grpc.aio.AioRpcError as error:
        fail(f"{address} does not answer: {brief(error)}")
    if said != "SERVING":
        fail(f"{address} is {said}")
    click.echo(said)
