"""Binding ports, with errors that say what to do."""

from __future__ import annotations

import errno
import socket
from typing import Any

import grpc
import grpc.aio

from baton.authentication.cluster import ClusterAuthentication, check_address
from baton.rpc.address import join_address, split_address
from baton.rpc.errors import BatonError, failed_precondition, invalid, unavailable
from baton.rpc.http_server import listen


def bind_grpc(
    server: grpc.aio.Server,
    host: str,
    port: int,
    authentication: ClusterAuthentication,
    insecure: bool,
    *,
    shared: bool = False,
    flag: str = "--port",
) -> str:
    """Binds the server; returns host:port as bound.

    flag: that sets the port, for errors. shared: other processes of this user may bind the port as well; the
    server's options must say so (grpc.so_reuseport). Raises BatonError: UNAVAILABLE (CANNOT_BIND), or
    FAILED_PRECONDITION when callers would not be authenticated (INSECURE) or the certificate cannot be used.
    """
    flag = "--shared" if shared else flag
    problem = None if shared else bind_problem(host, port, flag)
    if problem is not None:
        raise problem
    check_address(host, authentication, insecure)
    address, credentials = join_address(host, port), authentication.credentials()
    try:
        if credentials is None:
            bound = server.add_insecure_port(address)
        else:
            bound = server.add_secure_port(address, credentials)
    except RuntimeError as error:
        if shared:
            why = "another process has it, and does not share it"
        elif credentials is not None:
            # The address is free, and gRPC does not say what is wrong with PEM files.
            text = "certificate and key cannot be used: both must be PEM, and belong to each other"
            raise failed_precondition(text, "BAD_CERTIFICATE") from error
        else:
            why = "the system refuses it"
        raise _cannot(host, port, why, f"choose another with {flag}") from error
    return join_address(host, bound)


def host_and_port(address: str, flag: str) -> tuple[str, int]:
    """Host and port of an address that `flag` gives. Raises BatonError."""
    try:
        return split_address(address)
    except ValueError as error:
        raise invalid(flag.strip("-").replace("-", "_"), f"{flag}: {error}") from None


def bind_http(host: str, port: int, flag: str = "--http-port", **how: Any) -> socket.socket:
    """Like http_server.listen, but raises BatonError naming the flag."""
    try:
        return listen(host, port, **how)
    except (OSError, OverflowError) as error:
        raise _explain(host, port, error, flag) from error


def bind_problem(host: str, port: int, flag: str = "--port") -> BatonError | None:
    """Why host:port cannot be bound now, or None; gRPC does not say. `flag` sets the port."""
    if not 0 <= port <= 65535:
        return _cannot(host, port, "there is no such port", f"choose one up to 65535 with {flag}")
    try:
        family, kind, protocol, _, where = socket.getaddrinfo(
            host.strip("[]"), port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as gRPC does
            probe.bind(where)
            # Another listener may be noticed only by listen().
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
