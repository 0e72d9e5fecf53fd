"""Messages between rank 0 and a follower, over a pair of sockets, or from host to host over TCP.

The first byte says what a message is; plans are counted, so that a follower notices one that is missing.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import os
import pickle
import socket
import struct
from multiprocessing.connection import Connection
from typing import Any

_PLAN = struct.Struct("<BxHI")
"""PLAN, threads, count."""
PLAN, OBJECT, BYTES = 1, 2, 3
MAX_FRAME = 2**30
"""Bytes of a message at most."""
SEAL_BYTES = 16


class ChannelError(Exception):
    """The other side has ended, does not answer in time, or sends something unexpected."""


class ChannelClosed(ChannelError):
    """The other side has ended."""


class CollectiveError(Exception):
    """Another rank is gone, or has taken longer than the time limit. The ranks cannot go on together."""


class Seal:
    """Of one end of a TCP connection: each message carries a keyed hash (BLAKE2b) over it and its number, so
    that nobody without the key can add, change or repeat one. It hides nothing."""

    def __init__(self, sending: bytes, receiving: bytes) -> None:
        """The keys of the two directions, up to 64 bytes each."""
        self._keys = [sending, receiving]
        self._counts = [0, 0]

    def _hash(self, direction: int, message: bytes | memoryview) -> bytes:
        self._counts[direction] += 1
        count = self._counts[direction].to_bytes(16, "little")
        key = self._keys[direction]
        return hashlib.blake2b(message, digest_size=SEAL_BYTES, key=key, salt=count).digest()

    def close(self, message: bytes) -> bytes:
        return self._hash(0, message) + message

    def open(self, sealed: bytes) -> bytes:
        """Raises ChannelError."""
        message = memoryview(sealed)[SEAL_BYTES:]
        if not hmac.compare_digest(self._hash(1, message), sealed[:SEAL_BYTES]):
            raise ChannelError("a message came that the other side has not sent")
        return bytes(message)


class Channel:
    """One end. `seconds`: longest wait until a message is taken, or for its rest once it has begun."""

    def __init__(self, own: socket.socket, seconds: float, seal: Seal | None = None) -> None:
        timeout = struct.pack("ll", int(seconds), int(seconds % 1 * 1e6))
        own.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, timeout)
        own.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, timeout)
        own.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 2**20)
        self._connection = Connection(own.detach())
        self._seal = seal
        self._sent = self._received = 0

    def send(self, what: Any) -> None:
        """Any object that can be pickled: both ends are the same program and the same user's. Raises
        ChannelError."""
        self._send(bytes([OBJECT]) + pickle.dumps(what))

    def receive(self, seconds: float | None) -> Any:
        """The next object; None: waits as long as it takes. Raises ChannelError."""
        message = self._receive(seconds)
        if message[0] != OBJECT:
            raise ChannelError("a plan came where an answer was expected")
        return pickle.loads(memoryview(message)[1:])

    def send_bytes(self, what: bytes) -> None:
        """Raises ChannelError."""
        self._send(bytes([BYTES]) + what)

    def receive_bytes(self, seconds: float | None) -> memoryview:
        """None: waits as long as it takes. Raises ChannelError."""
        message = self._receive(seconds)
        if message[0] != BYTES:
            raise ChannelError("a message of another kind came where bytes were expected")
        return memoryview(message)[1:]

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
            self._connection.send_bytes(message if self._seal is None else self._seal.close(message))
        except OSError as error:
            raise ChannelClosed(f"it takes no messages: {error}") from error

    def _receive(self, seconds: float | None) -> bytes:
        try:
            if not self._connection.poll(seconds):
                raise ChannelError(f"it has not answered for {seconds:g} s")
            message = self._connection.recv_bytes(MAX_FRAME)
        except (OSError, EOFError) as error:
            raise ChannelClosed("it has ended") from error
        return message if self._seal is None else self._seal.open(message)

    def end(self) -> None:
        """Both sides read nothing more: wakes a thread that waits for a message."""
        with contextlib.suppress(OSError), socket.socket(fileno=os.dup(self._connection.fileno())) as own:
            own.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self._connection.close()
