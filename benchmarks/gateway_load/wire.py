"""Streaming gRPC calls over a plain socket (RFC 9113, and gRPC's PROTOCOL-HTTP2.md) at low cost.

A client library costs as much as the server for the same message, and on few cores a benchmark of the server
would measure both. For trusted peers only: an unexpected frame ends the program.
"""

from __future__ import annotations

import socket
import struct
from collections.abc import Iterator

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
DATA, HEADERS, RST_STREAM, SETTINGS, PING, GOAWAY, WINDOW_UPDATE = 0x0, 0x1, 0x3, 0x4, 0x6, 0x7, 0x8
END_STREAM = ACK = 0x1
END_HEADERS = 0x4
INITIAL_WINDOW_SIZE, MAX_FRAME_SIZE = 4, 5
LARGEST_WINDOW = 2**31 - 1
"""Bytes. The windows are opened once to this size, so a connection carries less than that."""
FRAME = struct.Struct(">HBBBL")  # a length of 24 bits, type, flags, stream
PREFIX = struct.Struct(">BL")  # of a gRPC message: compressed, length


def frame(kind: int, flags: int, stream: int, payload: bytes = b"") -> bytes:
    return FRAME.pack(len(payload) >> 8, len(payload) & 0xFF, kind, flags, stream) + payload


def literal(name: str, value: str) -> bytes:
    """A header without compression (RFC 7541, section 6.2.2); both are shorter than 127 bytes."""
    return b"\0" + b"".join(bytes([len(text)]) + text.encode() for text in (name, value))


class Connection:
    """Calls of one method. Only the constructor blocks."""

    def __init__(self, address: str, path: str) -> None:
        host, _, port = address.rpartition(":")
        self._socket = socket.create_connection((host, int(port)), timeout=10)
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        headers = {":method": "POST", ":scheme": "http", ":path": path, ":authority": address}
        headers |= {"te": "trailers", "content-type": "application/grpc"}
        self._headers = b"".join(literal(name, value) for name, value in headers.items())
        self._streams = 0
        self._unread = b""
        self._parts: dict[int, bytes] = {}
        """Stream -> beginning of an incomplete message."""
        settings = struct.pack(">HLHL", INITIAL_WINDOW_SIZE, LARGEST_WINDOW, MAX_FRAME_SIZE, 2**24 - 1)
        opened = struct.pack(">L", LARGEST_WINDOW - 65535)
        hello = PREFACE + frame(SETTINGS, 0, 0, settings) + frame(WINDOW_UPDATE, 0, 0, opened)
        self._socket.sendall(hello)
        self._socket.setblocking(False)

    def open(self) -> int:
        """Begins a call; returns its stream."""
        stream = 2 * self._streams + 1
        self._streams += 1
        self._socket.sendall(frame(HEADERS, END_HEADERS, stream, self._headers))
        return stream

    def send(self, stream: int, message: bytes) -> None:
        self._socket.sendall(frame(DATA, 0, stream, PREFIX.pack(0, len(message)) + message))

    def receive(self) -> Iterator[tuple[int, bytes]]:
        """Received messages with their streams."""
        try:
            data = self._unread + self._socket.recv(2**20)
        except BlockingIOError:
            return
        at = 0
        while at + FRAME.size <= len(data):
            high, low, kind, flags, stream = FRAME.unpack_from(data, at)
            end = at + FRAME.size + (high << 8) + low
            if end > len(data):
                break
            payload = data[at + FRAME.size : end]
            at = end
            if kind == DATA:
                yield from self._messages(stream, payload)
            elif kind in (SETTINGS, PING) and not flags & ACK:
                self._socket.sendall(frame(kind, ACK, 0, payload if kind == PING else b""))
            elif kind in (RST_STREAM, GOAWAY) or (kind == HEADERS and flags & END_STREAM):
                raise RuntimeError(f"the server ended stream {stream}: frame {kind}, {payload!r}")
        self._unread = data[at:]

    def _messages(self, stream: int, payload: bytes) -> Iterator[tuple[int, bytes]]:
        data = self._parts.pop(stream, b"") + payload
        at = 0
        while at + PREFIX.size <= len(data):
            _, length = PREFIX.unpack_from(data, at)
            end = at + PREFIX.size + length
            if end > len(data):
                break
            yield stream, data[at + PREFIX.size : end]
            at = end
        if at < len(data):
            self._parts[stream] = data[at:]
