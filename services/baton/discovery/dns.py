"""All addresses of a DNS name, resolved repeatedly: a service of compose, or a headless one of Kubernetes."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable
from dataclasses import dataclass

from baton.rpc.address import join_address
from baton.rpc.errors import invalid
from baton.rpc.logs import get_logger

PREFIX = "dns:"
REFRESH_SECONDS = 3.0
ANSWER_SECONDS = 5.0
HOLD_SECONDS = 10.0
"""A node that is missing in the answers is dropped after this time."""

_log = get_logger()


@dataclass(frozen=True, slots=True)
class DnsName:
    """`dns:host:port`: all A and AAAA records of the name, each with this port."""

    host: str
    port: int

    def __str__(self) -> str:
        return f"{PREFIX}{self.host}:{self.port}"


def parse_name(text: str, field: str) -> DnsName:
    """From "dns:host:port". Raises BatonError that names the field."""
    host, _, port = text.removeprefix(PREFIX).rpartition(":")
    if not host or not port.isascii() or not port.isdigit() or not 0 < int(port) < 65536:
        raise invalid(field, f"{text!r} is no DNS name with a port; write {PREFIX}HOST:PORT")
    return DnsName(host, int(port))


async def resolve(name: DnsName) -> list[str]:
    """host:port of all nodes, sorted. Raises OSError (socket.gaierror, TimeoutError)."""
    async with asyncio.timeout(ANSWER_SECONDS):
        answers = await asyncio.get_running_loop().getaddrinfo(name.host, name.port, type=socket.SOCK_STREAM)
    return sorted({join_address(str(where[0]), name.port) for *_, where in answers})


async def watch(name: DnsName, changed: Callable[[list[str]], None]) -> None:
    """Resolves the name every REFRESH_SECONDS and calls `changed` with each answer, until cancelled. If the
    name cannot be resolved nothing changes, so that a resolver that is down does not remove the nodes."""
    failing = False
    while True:
        try:
            addresses = await resolve(name)
        except OSError as error:
            if not failing:
                why = error.strerror or f"no answer in {ANSWER_SECONDS:g} s"
                _log.warning("name not resolved", name=str(name), error=why)
            failing = True
        else:
            failing = False
            changed(addresses)
        await asyncio.sleep(REFRESH_SECONDS)
