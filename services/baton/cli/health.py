"""`baton health` and `baton probe`: exit codes that say whether a process, or a deployment, serves."""

from __future__ import annotations

import asyncio
import random
import secrets

import click
import grpc
import grpc.aio
from grpc_health.v1 import health_pb2, health_pb2_grpc

from baton.cli.console import explain, milliseconds
from baton.cli.nodes import Credentials, ask_deployment, brief, reachable
from baton.cli.options import SECONDS, fail, option
from baton.cli.status import server_option
from baton.client import BatonError, Client, Completion
from baton.rpc.channel import open_channel


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


PROMPT_TOKENS = 160


def send_probe(server: str, seconds: float) -> Completion:
    """Two tokens for a new random prompt. Raises BatonError."""
    with Client(server) as client:
        model = client.models()[0]
        length = min(PROMPT_TOKENS, model.context_length - 2)
        tokens = [random.randrange(model.vocab_size) for _ in range(length)]
        name = f"baton-probe-{secrets.token_hex(8)}"
        return client.generate(
            token_ids=tokens,
            max_tokens=2,
            temperature=0.0,
            ignore_eos=True,
            timeout=seconds,
            namespace=name,
            hand_off=True,
        )


@click.command()
@server_option
@option("--timeout seconds", click.FloatRange(min=0.1), 10.0, "Time limit of the answer.", "SECONDS")
def probe(server: str, seconds: float) -> None:
    """Send a small request through a running deployment, with a hand-off; exit with 0 if it succeeded.

    The prompt is random and has a prefix-cache namespace of its own, so that it is computed and its pages
    are pulled. Exits with 1 if no answer comes in time, or if there are prefill nodes and none was used. A
    gateway with --probe-every does this by itself.

    \b
    Examples:
      baton probe
      baton probe --server 10.0.0.5:50050 --timeout 2
    """
    try:
        answer = send_probe(server, seconds)
    except BatonError as error:
        fail(explain(error, server))
    stats = answer.stats
    assert stats is not None
    if not stats.pulled_pages and any(node.role == "prefill" for node in asyncio.run(ask_deployment(server))):
        fail(f"the prompt was not handed off: {stats.decode_address} computed it ('baton status' says why)")
    prefill = f"prefill {stats.prefill_address} > " if stats.prefill_address else ""
    pages = f", {stats.pulled_pages} pages by {stats.transport}" if stats.pulled_pages else ""
    times = f"first token {milliseconds(stats.ttft)}, end {milliseconds(stats.total)}"
    click.echo(f"ok: {prefill}decode {stats.decode_address}{pages}; {times}")
