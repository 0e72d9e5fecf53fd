"""Ports of processes that are about to start."""

from __future__ import annotations

import contextlib
import socket

from baton.rpc.address import family_of, join_address


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


def free_ports(count: int) -> list[int]:
    """Different ports of the loopback that nobody uses now."""
    with contextlib.ExitStack() as open_sockets:
        sockets = [open_sockets.enter_context(socket.socket()) for _ in range(count)]
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return [int(each.getsockname()[1]) for each in sockets]
