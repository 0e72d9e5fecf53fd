"""Ports for servers that are told theirs beforehand."""

from __future__ import annotations

import itertools
import os
import socket

FIRST = 20_000
"""Below those that the system gives out by itself (ip_local_port_range), to connections too: one of them may
be taken before the server that was told of it is there."""
COUNT = 500
"""For each of pytest-xdist's workers, which do not share any."""

_worker = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw"))
_next = itertools.cycle(range(FIRST + COUNT * _worker, FIRST + COUNT * (_worker + 1)))


def free_port() -> int:
    """Of the loopback. The next ones are others."""
    for port in itertools.islice(_next, COUNT):
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
            return port
    raise AssertionError(f"no port is free from {FIRST} on")
