"""Binding ports, with errors that say what to do."""

from __future__ import annotations

import errno
import socket
from collections.abc import Callable

import grpc.aio
from prometheus_client import CollectorRegistry

from baton.rpc.errors import BatonError, unavailable
from baton.rpc.metrics import Health, serve_metrics


def join_address(host: str, port: int) -> str:
    """host:port, with an IPv6 host in brackets."""
    return f"[{host}]:{port}" if ":" in host and not host.startswith("[") else f"{host}:{port}"


def bind_grpc(server: grpc.aio.Server, host: str, port: int) -> str:
    """Binds the server; returns host:port as bound. Raises BatonError (UNAVAILABLE, CANNOT_BIND)."""
    problem = bind_problem(host, port, "--port")
    if problem is not None:
        raise problem
    try:
        bound = server.add_insecure_port(join_address(host, port))
    except RuntimeError as error:
        raise _cannot(host, port, "the system refuses it", "choose another with --port") from error
    return join_address(host, bound)


def bind_metrics(
    registry: CollectorRegistry, host: str, port: int, health: Health
) -> tuple[str, Callable[[], None]]:
    """Serves metrics and health; returns host:port as bound and what closes the server. Raises BatonError."""
    try:
        bound, close = serve_metrics(registry, host, port, health)
    except OSError as error:
        raise _explain(host, port, error, "--http-port") from error
    return join_address(host, bound), close


def bind_problem(host: str, port: int, flag: str = "--port") -> BatonError | None:
    """Why host:port cannot be bound now, or None; gRPC itself does not tell. `flag` sets the port."""
    if not 0 <= port <= 65535:
        return _cannot(host, port, "there is no such port", f"choose one up to 65535 with {flag}")
    try:
        family, kind, protocol, _, where = socket.getaddrinfo(
            host.strip("[]"), port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as gRPC does
            probe.bind(where)
            # A listener elsewhere may only be noticed when one listens.
            probe.listen(1)
    except (OSError, OverflowError) as error:
        return _explain(host, port, error, flag)
    return None


def _explain(host: str, port: int, error: Exception, flag: str) -> BatonError:
    if isinstance(error, socket.gaierror):
        return _cannot(host, port, "the host name is unknown", "give an address of this machine with --host")
    code = error.errno if isinstance(error, OSError) else None
    if code == errno.EADDRINUSE:
        return _cannot(host, port, "the port is in use", f"choose another with {flag}")
    if code in (errno.EACCES, errno.EPERM):
        return _cannot(host, port, "not permitted", f"choose a port from 1024 up with {flag}")
    if code == errno.EADDRNOTAVAIL:
        return _cannot(
            host, port, "no interface of this machine has that address", "choose another with --host"
        )
    return _cannot(host, port, str(error), f"choose another with --host or {flag}")


def _cannot(host: str, port: int, why: str, remedy: str) -> BatonError:
    return unavailable(f"cannot bind {join_address(host, port)}: {why}; {remedy}", "CANNOT_BIND")
