"""gRPC on a bare connection: for headers that no client library sends."""

from __future__ import annotations

import asyncio
import struct
from collections.abc import Iterable, Iterator

from fuzzing.talk import READ, Headers

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
DATA, HEADERS, RST_STREAM, SETTINGS, GOAWAY, CONTINUATION = 0, 1, 3, 4, 7, 9
END_STREAM, END_HEADERS = 1, 4
MOST = 16384
"""Bytes of a frame's payload."""


def frame(kind: int, flags: int, stream: int, payload: bytes) -> bytes:
    """An HTTP/2 frame (RFC 9113, section 4.1)."""
    return struct.pack(">I", len(payload))[1:] + bytes((kind, flags)) + struct.pack(">I", stream) + payload


def request(wire: str, messages: Iterable[bytes], headers: Headers) -> bytes:
    """A whole call, on stream 1 of a new connection."""
    block = header_block(wire, headers)
    first, *others = [block[at : at + MOST] for at in range(0, len(block), MOST)]
    frames = [frame(HEADERS, 0 if others else END_HEADERS, 1, first)]
    for piece in others:
        frames.append(frame(CONTINUATION, END_HEADERS if piece is others[-1] else 0, 1, piece))
    frames += [frame(DATA, 0, 1, struct.pack(">BI", 0, len(data)) + data) for data in messages]
    return b"".join([PREFACE, frame(SETTINGS, 0, 0, b""), *frames, frame(DATA, END_STREAM, 1, b"")])


def header_block(wire: str, headers: Headers = ()) -> bytes:
    pseudo = ((":method", "POST"), (":scheme", "http"), (":path", wire), (":authority", "x"))
    grpc = (("te", "trailers"), ("content-type", "application/grpc"))
    return b"".join(_literal(name, value) for name, value in (*pseudo, *grpc, *headers))


def rapid_resets(first: int, count: int) -> bytes:
    """`count` calls from stream number `first` on, each reset as soon as it is opened (CVE-2023-44487)."""
    block, reason = header_block("/baton.v1.Node/GetInfo"), struct.pack(">I", 8)
    return b"".join(
        frame(HEADERS, END_HEADERS, stream, block) + frame(RST_STREAM, 0, stream, reason)
        for stream in range(first, first + 2 * count, 2)
    )


async def call_bare(address: str, sent: bytes, *, leave: bool = False) -> bytes:
    """Makes the call on a connection of its own; returns what has been delivered once it has ended, or once
    anything has."""
    host, _, port = address.rpartition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    try:
        received, answer = b"", Answer(b"")
        writer.write(sent)
        while not (leave or answer.ended or answer.delivered) and (data := await reader.read(READ)):
            received += data
            answer = Answer(received)
        return answer.delivered
    finally:
        writer.close()


class Answer:
    """What has come so far. delivered: payload of the call. ended: nothing more of it comes."""

    def __init__(self, received: bytes) -> None:
        self.delivered = b""
        self.ended = False
        for kind, flags, stream, payload in _frames(received):
            if stream == 1 and kind == DATA:
                self.delivered += payload
            closes = (kind in (DATA, HEADERS) and flags & END_STREAM) or kind == RST_STREAM
            self.ended |= kind == GOAWAY or (stream == 1 and bool(closes))


def _frames(received: bytes) -> Iterator[tuple[int, int, int, bytes]]:
    while len(received) >= 9:
        size = int.from_bytes(received[:3])
        if len(received) < 9 + size:
            return
        stream = int.from_bytes(received[5:9]) & 0x7FFFFFFF
        yield received[3], received[4], stream, received[9 : 9 + size]
        received = received[9 + size :]


def _literal(name: str, value: str | bytes) -> bytes:
    """Without indexing, new name, no Huffman code (RFC 7541, section 6.2.2)."""
    data = value if isinstance(value, bytes) else value.encode("latin-1")
    return b"\x00" + _string(name.encode()) + _string(data)


def _string(data: bytes) -> bytes:
    left = len(data) - 127
    if left < 0:
        return bytes((len(data),)) + data
    size = bytearray((127,))
    while left >= 128:
        size.append(left % 128 + 128)
        left //= 128
    return bytes((*size, left)) + data
