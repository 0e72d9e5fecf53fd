"""Ports of processes that are about to start."""

from __future__ import annotations

import contextlib
import random
import socket

from baton.rpc.address import family_of, join_address

PORTS = range(10_000, 20_000)


class SharedPort:
    """A port that several processes of this user are to listen on (SO_REUSEPORT). Held without listening, so
    that nobody else gets it, until `close`."""

    def __init__(self, host: str, port: int) -> None:
        """port: 0: a free one. Raises OSError."""
        self._socket = socket.socket(family_of(host))
        try:
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
            self._socket.bind((host.strip("[]"), port))
        except OSError:
            self._socket.close()
            raise
        self.address = join_address(host, self._socket.getsockname()[1])
        """host:port as bound."""

    def close(self) -> None:
        self._socket.close()


def free_ports(host: str, count: int) -> list[int]:
    """Different ports of the address that nobody uses now. They are below the range from which the system
    takes ports for connections (ip_local_port_range), so that they are still free when a process binds them.
    Raises OSError when there are not so many."""
    found: list[int] = []
    for port in random.sample(PORTS, len(PORTS)):
        if len(found) == count:
            return found
        with contextlib.suppress(OSError), socket.socket(family_of(host)) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind((host, port))
            found.append(port)
    raise OSError(f"{host} has no {count} free ports from {PORTS.start} to {PORTS.stop - 1}")
