"""Ports for servers that are told theirs beforehand, or start again where they were."""

from __future__ import annotations

import contextlib
from collections import deque

from baton.cli.deployment import free_ports

CLAIMS = 200
"""Ports that a process has asked for last and that no other test is given, while their servers start, or
are down for a while. Each claim is an open file."""
_claims: deque[contextlib.ExitStack] = deque()


def free_port() -> int:
    """Of the loopback. The next ones are others, in other processes, too."""
    if len(_claims) == CLAIMS:
        _claims.popleft().close()
    _claims.append(contextlib.ExitStack())
    (port,) = free_ports("127.0.0.1", 1, _claims[-1])
    return port
