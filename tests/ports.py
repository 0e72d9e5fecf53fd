"""Ports for servers that are told theirs beforehand, or start again where they were."""

from __future__ import annotations

import functools
import itertools
import os
import socket
from collections.abc import Iterator

import lanes

FIRST = 20_000
"""Below those that the system gives out by itself (ip_local_port_range), to connections too: one of them may
be taken before the server that was told of it is there."""
COUNT = 500
"""For each lane, which do not share any."""


@functools.cache
def _ports(lane: int) -> Iterator[int]:
    first, skipped = FIRST + COUNT * (lane % 20), os.getpid() % COUNT  # another run has the same lanes
    return itertools.islice(itertools.cycle(range(first, first + COUNT)), skipped, None)


def free_port() -> int:
    """Of the loopback. The next ones are others."""
    for port in itertools.islice(_ports(lanes.number), COUNT):
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
            return port
    raise AssertionError(f"no port is free from {FIRST} on")
