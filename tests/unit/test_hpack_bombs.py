"""Headers of a byte each, which name a long entry of HPACK's table (RFC 7541): a bound for a connection.

What is sent is written by hand: no client makes it.
"""

from __future__ import annotations

import asyncio
import contextlib
import multiprocessing
import socket
import struct
import threading
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import grpc.aio

from baton.rpc.channel import server_options
from baton.rpc.health import HealthServicer

STREAMS = 600
REFERENCES = 16_000
"""As many as a frame has room for."""
HEADERS, SETTINGS, END_HEADERS = 1, 4, 4


def frame(kind: int, flags: int, stream: int, payload: bytes = b"") -> bytes:
    return struct.pack(">I", len(payload))[1:] + bytes([kind, flags]) + struct.pack(">I", stream) + payload


def literal(name: bytes, value: bytes, first: int = 0) -> bytes:
    """first 0x40: entered into the table."""
    size = len(value)
    length = bytes([size]) if size < 127 else bytes([127, (size - 127) & 127 | 128, (size - 127) >> 7])
    return bytes([first, len(name)]) + name + length + value


def send_bombs(port: int) -> None:
    with socket.create_connection(("127.0.0.1", port)) as connection:
        threading.Thread(target=drain, args=(connection,), daemon=True).start()
        connection.sendall(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + frame(SETTINGS, 0, 0))
        head = b"\x83\x86" + literal(b":path", b"/grpc.health.v1.Health/Check") + literal(b":authority", b"x")
        head += literal(b"te", b"trailers") + literal(b"content-type", b"application/grpc")
        with contextlib.suppress(OSError):  # refused
            for number in range(STREAMS):
                entry = literal(b"a", b"b" * 3900, 0x40) if number == 0 else b""
                block = (head + entry + b"\xbe" * REFERENCES)[: 2**14]  # 0x80 | 62: the newest entry
                connection.sendall(frame(HEADERS, END_HEADERS, 2 * number + 1, block))
        threading.Event().wait(1)


def drain(connection: socket.socket) -> None:
    with contextlib.suppress(OSError):
        while connection.recv(2**16):
            pass


def memory(field: str) -> int:
    """MiB."""
    (line,) = (each for each in Path("/proc/self/status").read_text().splitlines() if each.startswith(field))
    return int(line.split()[1]) // 1024


def reset_peak() -> None:
    Path("/proc/self/clear_refs").write_text("5")


def grown() -> int:
    """MiB that a server grows by."""

    async def serve() -> int:
        server = grpc.aio.server(options=server_options())
        HealthServicer().add_to(server, [])
        port = server.add_insecure_port("127.0.0.1:0")
        await server.start()
        before = memory("VmRSS")
        reset_peak()
        try:
            await asyncio.to_thread(send_bombs, port)
            return memory("VmHWM") - before
        finally:
            await server.stop(0)

    return asyncio.run(serve())


def test_a_connection_takes_little_memory():
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as alone:
        size = alone.submit(grown).result(60)
    print(f"{size} MiB")
    assert size < 200
