"""Messages between rank 0 and a follower, over a pair of sockets, or from host to host over TLS.

A message is its length, a byte that says what it is, and plain data (msgpack). Plans are counted, so that a
follower notices one that is missing.
"""

from __future__ import annotations

import contextlib
import os
import select
import socket
import ssl
import struct
import threading
import time

import msgspec

from baton.worker.ranks.messages import Message

_LENGTH = struct.Struct("<I")
_PLAN = struct.Struct("<BxHI")
"""PLAN, threads, count."""
PLAN, OBJECT, BYTES = 1, 2, 3
MAX_FRAME = 2**30
"""Bytes of a message at most."""
PIECE = 2**16
"""Bytes read at a time."""

_encoder = msgspec.msgpack.Encoder()
_decoder: msgspec.msgpack.Decoder[Message] = msgspec.msgpack.Decoder(Message)


class ChannelError(Exception):
    """The other side has ended, does not answer in time, or sends something unexpected."""


class ChannelClosed(ChannelError):
    """The other side has ended."""


class CollectiveError(Exception):
    """Another rank is gone, or has taken longer than the time limit. The ranks cannot go on together."""


class Channel:
    """One end; a thread may send while another receives. `seconds`: longest wait until a message is taken, or
    for its rest once it has begun."""

    def __init__(self, connection: socket.socket, seconds: float) -> None:
        connection.setblocking(False)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 2**20)
        self._socket = connection
        self._seconds = seconds
        self._lock = threading.Lock()
        """OpenSSL's connections serve one thread at a time."""
        self._unread = bytearray()
        self._sent = self._received = 0

    def send(self, what: Message) -> None:
        """Raises ChannelError."""
        self._send(bytes([OBJECT]) + _encoder.encode(what))

    def receive(self, seconds: float | None) -> Message:
        """The next message that is no plan; None: waits as long as it takes. Raises ChannelError."""
        message = self._receive(seconds)
        if message[0] != OBJECT:
            raise ChannelError("a plan came where an answer was expected")
        return _decoded(message)

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

    def next(self) -> tuple[int, bytes] | Message:
        """A plan with its threads, or another message; waits as long as it takes. Raises ChannelError."""
        message = self._receive(None)
        if message[0] == OBJECT:
            return _decoded(message)
        if message[0] != PLAN or len(message) < _PLAN.size:
            raise ChannelError("a message of an unknown kind came")
        _, threads, count = _PLAN.unpack_from(message)
        self._received += 1
        if count != self._received & 0xFFFFFFFF:
            raise ChannelError(f"plan {count} came where {self._received} was expected")
        return threads, message[_PLAN.size :]

    def _send(self, message: bytes) -> None:
        left = memoryview(_LENGTH.pack(len(message)) + message)
        deadline = time.monotonic() + self._seconds
        try:
            while left:
                try:
                    with self._lock:
                        left = left[self._socket.send(left) :]
                except (BlockingIOError, ssl.SSLWantWriteError, ssl.SSLWantReadError):
                    if not self._wait(select.POLLOUT, deadline):
                        raise TimeoutError(f"none for {self._seconds:g} s") from None
        except (OSError, ValueError) as error:
            raise ChannelClosed(f"it takes no messages: {error}") from error

    def _receive(self, seconds: float | None) -> bytes:
        try:
            head = self._read(_LENGTH.size, seconds)
            if head is None:
                raise ChannelError(f"it has not answered for {seconds:g} s")
            (length,) = _LENGTH.unpack(head)
            if not 0 < length <= MAX_FRAME:
                raise ChannelError(f"a message of {length} bytes was announced")
            message = self._read(length, self._seconds)
        except (OSError, ValueError) as error:
            raise ChannelClosed("it has ended") from error
        if message is None:
            raise ChannelClosed("the rest of a message does not come")
        return message

    def _read(self, count: int, seconds: float | None) -> bytes | None:
        """So many bytes; None: they have not come in time. Raises ChannelClosed, OSError and ValueError."""
        deadline = None if seconds is None else time.monotonic() + seconds
        while len(self._unread) < count:
            try:
                with self._lock:
                    more = self._socket.recv(PIECE)
            except (BlockingIOError, ssl.SSLWantReadError, ssl.SSLWantWriteError):
                if not self._wait(select.POLLIN, deadline):
                    return None
                continue
            if not more:
                raise ChannelClosed("it has ended")
            self._unread += more
        found = bytes(memoryview(self._unread)[:count])
        del self._unread[:count]
        return found

    def _wait(self, event: int, deadline: float | None) -> bool:
        """Whether the socket is ready before the deadline."""
        waiting = select.poll()
        waiting.register(self._socket, event)
        left = None if deadline is None else max(0.0, 1000 * (deadline - time.monotonic()))
        return bool(waiting.poll(left))

    def end(self) -> None:
        """Both sides read nothing more: wakes a thread that waits for a message."""
        with contextlib.suppress(OSError), socket.socket(fileno=os.dup(self._socket.fileno())) as copy:
            copy.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self._socket.close()


def _decoded(message: bytes) -> Message:
    try:
        return _decoder.decode(memoryview(message)[1:])
    except msgspec.DecodeError as error:
        raise ChannelError(f"a message came that ranks do not send: {error}") from error
