"""Messages between rank 0 and a follower on the same host, over a pair of sockets.

The first byte says what a message is; plans are counted, so that a follower notices one that is missing.
"""

from __future__ import annotations

import pickle
import socket
import struct
from multiprocessing.connection import Connection
from typing import Any

_PLAN = struct.Struct("<BxHI")
"""PLAN, threads, count."""
PLAN, OBJECT = 1, 2


class ChannelError(Exception):
    """The other side has ended, does not answer in time, or sends something unexpected."""


class ChannelClosed(ChannelError):
    """The other side has ended."""


class Channel:
    """One end. `seconds`: longest wait until a message is taken, or for its rest once it has begun."""

    def __init__(self, own: socket.socket, seconds: float) -> None:
        timeout = struct.pack("ll", int(seconds), int(seconds % 1 * 1e6))
        own.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, timeout)
        own.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, timeout)
        own.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 2**20)
        self._connection = Connection(own.detach())
        self._sent = self._received = 0

    def send(self, what: Any) -> None:
        """Any object that can be pickled: both ends are the same program and the same user's. Raises
        ChannelError."""
        self._send(bytes([OBJECT]) + pickle.dumps(what))

    def receive(self, seconds: float) -> Any:
        """The next object. Raises ChannelError."""
        message = self._receive(seconds)
        if message[0] != OBJECT:
            raise ChannelError("a plan came where an answer was expected")
        return pickle.loads(memoryview(message)[1:])

    def send_plan(self, plan: bytes, threads: int) -> None:
        """`threads`: with which the step is to be computed. Raises ChannelError."""
        self._sent += 1
        self._send(_PLAN.pack(PLAN, threads, self._sent & 0xFFFFFFFF) + plan)

    def next(self) -> tuple[int, bytes] | Any:
        """A plan with its threads, or another object; waits as long as it takes. Raises ChannelError."""
        message = self._receive(None)
        if message[0] == OBJECT:
            return pickle.loads(memoryview(message)[1:])
        _, threads, count = _PLAN.unpack_from(message)
        self._received += 1
        if count != self._received & 0xFFFFFFFF:
            raise ChannelError(f"plan {count} came where {self._received} was expected")
        return threads, message[_PLAN.size :]

    def _send(self, message: bytes) -> None:
        try:
            self._connection.send_bytes(message)
        except OSError as error:
            raise ChannelClosed(f"it takes no messages: {error}") from error

    def _receive(self, seconds: float | None) -> bytes:
        try:
            if not self._connection.poll(seconds):
                raise ChannelError(f"it has not answered for {seconds:g} s")
            return self._connection.recv_bytes()
        except (OSError, EOFError) as error:
            raise ChannelClosed("it has ended") from error

    def close(self) -> None:
        self._connection.close()
