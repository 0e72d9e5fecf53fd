"""Addresses, and the random names of processes."""

from __future__ import annotations

import ipaddress
import secrets
import socket
from collections.abc import Collection
from urllib.parse import unquote


def join_address(host: str, port: int) -> str:
    """host:port, with an IPv6 host in brackets."""
    return f"[{host}]:{port}" if ":" in host and not host.startswith("[") else f"{host}:{port}"


def split_address(address: str) -> tuple[str, int]:
    """The inverse of join_address. Raises ValueError."""
    host, _, port = address.rpartition(":")
    if not host or not port.isdecimal():
        raise ValueError(f"{address!r} is not host:port")
    return host.strip("[]"), int(port)


def family_of(host: str) -> socket.AddressFamily:
    """Address family of sockets that bind `host`."""
    return socket.AF_INET6 if ":" in host else socket.AF_INET


def loopback() -> str:
    """127.0.0.1, or ::1 on a machine that has no IPv4."""
    with socket.socket() as probe:
        try:
            probe.bind(("127.0.0.1", 0))
        except OSError:
            return "::1"
    return "127.0.0.1"


def peer_host(peer: str) -> str:
    """The address in what gRPC calls the peer of a call: ipv4:127.0.0.1:53210, ipv6:%5B::1%5D:53210."""
    kind, _, rest = peer.partition(":")
    return unquote(rest).rpartition(":")[0].strip("[]") if kind in ("ipv4", "ipv6") else kind


def is_own_host(host: str, allowed: Collection[str] = ()) -> bool:
    """Whether this `Host` header, with or without a port, is an IP address, localhost or one of `allowed`;
    "*" among them is any. A browser sends another name if somebody's DNS points it here, and lets the scripts
    of that name read the answer (DNS rebinding). Probes may have no header, browsers always do."""
    if not host:
        return True
    name = (host[1:].partition("]")[0] if host.startswith("[") else host.partition(":")[0]).lower()
    if name == "localhost" or "*" in allowed or name in map(str.lower, allowed):
        return True
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True


def is_loopback_address(address: str) -> bool:
    """Whether host:port names this machine by "localhost" or a number. Other names are not looked up."""
    host = address.rpartition(":")[0].strip("[]")
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach the address; a name counts by all its addresses."""
    try:
        found = socket.getaddrinfo(host.strip("[]"), None, type=socket.SOCK_STREAM) if host else []
    except OSError:
        return False
    return bool(found) and all(ipaddress.ip_address(str(each[4][0])).is_loopback for each in found)


def new_incarnation() -> int:
    """Draws a process's name for its lifetime: 1 <= x < 2**64, never 0."""
    return secrets.randbelow(2**64 - 1) + 1
