"""Calls and connections of a client that keeps to no contract. What comes of them is judged elsewhere."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import grpc
import grpc.aio

Headers = tuple[tuple[str, str | bytes], ...]
READ = 64 * 1024
UPDATES = 3
"""Of answers without end so many are read, in at most so long after the first:"""
UPDATES_SECONDS = 1.0
WRITTEN_TOO_LATE = "Internal error from Core"
"""What grpc.aio makes, here in the client, of a write to a call that the server has just ended."""


@dataclass(frozen=True)
class Ended:
    """How a call ended. answers: messages received."""

    code: grpc.StatusCode
    details: str
    answers: int


async def call(
    channel: grpc.aio.Channel,
    wire: str,
    messages: Iterable[bytes],
    headers: Headers = (),
    *,
    leave: bool = False,
    endless: bool = False,
) -> Ended:
    """leave: the client goes away once it has sent all, instead of reading all answers, or of those without
    end a few."""
    call = channel.stream_stream(wire)(metadata=headers)  # a unary method is a stream of one, on the wire
    answers = 0
    try:
        for data in messages:
            await call.write(data)
        if not leave:
            await call.done_writing()
            async with asyncio.timeout(None) as limit:
                while (not endless or answers < UPDATES) and await call.read() is not grpc.aio.EOF:
                    answers += 1
                    if endless and answers == 1:
                        limit.reschedule(asyncio.get_running_loop().time() + UPDATES_SECONDS)
    except TimeoutError:
        if not limit.expired():
            raise
    except (grpc.aio.AioRpcError, asyncio.InvalidStateError):
        pass  # the code tells
    finally:
        call.cancel()
    return Ended(await call.code(), await call.details() or "", answers)


async def exchange(
    address: str, pieces: Sequence[bytes], *, leave: bool = False, answer: bytearray | None = None
) -> bytes:
    """Sends the pieces on a connection of its own; returns what comes until the other side closes it, its
    first READ bytes. They are put into `answer` as they come, for who does not wait for the end."""
    host, _, port = address.rpartition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    answer = bytearray() if answer is None else answer
    try:
        for piece in pieces:
            writer.write(piece)
            await writer.drain()
        while not leave and (data := await reader.read(READ)):
            answer += data[: READ - len(answer)]
        return bytes(answer)
    finally:
        writer.close()
