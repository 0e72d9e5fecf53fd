"""`baton scale`: changes how many workers of each role a running `baton up --ray` has."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import Self

import click

from baton.cli.console import run_command
from baton.cli.local_secret import scale_socket
from baton.cli.options import SECONDS, fail, option
from baton.cli.status import server_option
from baton.rpc.errors import BatonError

LEAST = {"prefill": 0, "decode": 1, "encode": 0}
MOST = 64
REQUEST_SECONDS = 5.0


class ScaleServer:
    """Hears commands at a socket that only this user can connect to: a line of JSON, role -> count. Answers
    with a line: {"done": text} or {"error": text}."""

    def __init__(self, path: Path, server: asyncio.Server) -> None:
        self._path = path
        self._server = server

    @classmethod
    async def start(cls, gateway: str, scale: Callable[[Mapping[str, int]], Awaitable[str]]) -> Self:
        """gateway: host:port of the deployment's. scale: makes the change, and says what it was."""

        async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            with contextlib.suppress(OSError, TimeoutError, ValueError):
                async with asyncio.timeout(REQUEST_SECONDS):
                    nodes = json.loads(await reader.readline())
                try:
                    answer = {"done": await scale(nodes)}
                except BatonError as error:
                    answer = {"error": error.message}
                writer.write(json.dumps(answer).encode() + b"\n")
                await writer.drain()
            writer.close()

        path = scale_socket(gateway)
        path.unlink(
            missing_ok=True
        )  # of a deployment that was killed: the secret's lock says that none lives
        return cls(path, await asyncio.start_unix_server(serve, path))

    async def close(self) -> None:
        self._server.close()
        self._path.unlink(missing_ok=True)


def parse_counts(texts: tuple[str, ...]) -> dict[str, int]:
    """From "prefill=3", "decode=2". Raises click.UsageError."""
    nodes: dict[str, int] = {}
    for text in texts:
        role, _, count = text.partition("=")
        if role not in LEAST or role in nodes or not count.isdecimal():
            raise click.UsageError(f"{text!r}: write prefill=N, decode=N or encode=N, each at most once")
        if not LEAST[role] <= int(count) <= MOST:
            raise click.UsageError(f"{text!r}: {role} nodes are from {LEAST[role]} to {MOST}")
        nodes[role] = int(count)
    return nodes


async def _ask(gateway: str, nodes: Mapping[str, int], seconds: float) -> int:
    try:
        async with asyncio.timeout(seconds):
            reader, writer = await asyncio.open_unix_connection(scale_socket(gateway))
            writer.write(json.dumps(nodes).encode() + b"\n")
            answer = json.loads(await reader.readline() or b'{"error": "the deployment has ended"}')
            writer.close()
    except TimeoutError:
        fail(f"not done after {seconds:.0f} s, and still under way: 'baton status' shows how far it is")
    except OSError:
        fail(f"no 'baton up --ray' of this user has the gateway {gateway} on this machine: give --server")
    if "error" in answer:
        fail(answer["error"])
    click.echo(answer["done"])
    return 0


@click.command()
@click.argument("counts", nargs=-1, required=True, metavar="ROLE=N...")
@server_option
@option("--seconds", SECONDS, 900.0, "The longest time to wait.")
def scale(counts: tuple[str, ...], server: str, seconds: float) -> None:
    """Change how many workers a running `baton up --ray` has, while it serves.

    New ones are started before the command returns. Those that are too many take no more requests, end what
    they have or hand it to others, and stop. Run it on the machine and as the user of `baton up --ray`.

    \b
    Examples:
      baton scale prefill=3
      baton scale prefill=2 decode=6 --server 127.0.0.1:50150
    """
    nodes = parse_counts(counts)
    run_command(lambda: _ask(server, nodes, seconds), server=server)
