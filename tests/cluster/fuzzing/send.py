"""Sends a case and judges how its call ends."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable

import grpc
import grpc.aio

from baton.rpc.channel import open_channel
from baton.v1 import common_pb2, decode_pb2, prefill_pb2
from fuzzing.cases import HELLO, HTTP, METHODS, Case, Method

CALL_SECONDS = 30.0
"""A call that has not ended by then hangs: requests end by themselves within the deployment's limit."""
RAW_SECONDS = 1.0
"""A bare connection is held so long at most, then left: silence is an answer there."""
READ = 64 * 1024
BUGS = {grpc.StatusCode.UNKNOWN, grpc.StatusCode.INTERNAL, grpc.StatusCode.DATA_LOSS}
"""What no message may end a call with."""


WRITTEN_TOO_LATE = "Internal error from Core"
"""What grpc.aio makes, here in the client, of a write to a call that the server has just ended."""


class Wrong(Exception):
    """The deployment did what it must not do."""


class Sender:
    """Keeps one connection to each process; each call is a call of its own.

    addresses: of the gRPC port by role; `http`: the gateway's other one.
    """

    def __init__(self, addresses: dict[str, str], http: str, layout: common_pb2.Layout) -> None:
        self._addresses = {**addresses, "http": http}
        self._channels = {role: open_channel(address) for role, address in addresses.items()}
        hello = prefill_pb2.PrefillHello(incarnation=99, layout=layout)
        self._hellos = {
            "Prefill/Run": prefill_pb2.PrefillRequest(hello=hello).SerializeToString(),
            "Decode/Generate": decode_pb2.GenerateCommand(
                hello=decode_pb2.DecodeHello(incarnation=99)
            ).SerializeToString(),
        }

    async def close(self) -> None:
        await asyncio.gather(*(channel.close() for channel in self._channels.values()))

    async def send(self, case: Case, *, leave: bool) -> int:
        """Returns how many messages were sent. leave: the client goes away at the end, instead of waiting for
        all answers. Raises Wrong."""
        try:
            async with asyncio.timeout(CALL_SECONDS):
                if case.target in HTTP:
                    await self._http(case, leave)
                elif method := METHODS.get(case.target):
                    await self._grpc(method, case.messages, leave)
                else:
                    await self._raw(case, leave)
        except TimeoutError:
            raise Wrong(f"hung: no end of the call within {CALL_SECONDS:g} s") from None
        return len(case.messages)

    async def _grpc(self, method: Method, messages: Iterable[bytes], leave: bool) -> None:
        sent = [self._hellos[method.path] if data == HELLO else data for data in messages]
        channel, path = self._channels[method.role], f"/baton.v1.{method.path}"
        call = channel.stream_stream(path)()  # a unary method is a stream of one, on the wire
        try:
            for data in sent:
                await call.write(data)
            if not leave:
                await call.done_writing()
                while await call.read() is not grpc.aio.EOF:
                    pass
        except (grpc.aio.AioRpcError, asyncio.InvalidStateError):
            pass  # the code tells
        finally:
            if leave:
                call.cancel()
        code = await call.code()
        if code in BUGS and await call.details() != WRITTEN_TOO_LATE:
            raise Wrong(f"the call ended with {code.name}: {await call.details()}")

    async def _http(self, case: Case, leave: bool) -> None:
        (body,) = case.messages
        head = f"POST {case.target} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
        rest = f"Connection: close\r\nContent-Length: {len(body)}\r\n\r\n"
        answer = await self._exchange("http", [(head + rest).encode(), body], leave)
        if leave:
            return
        status = answer[9:12]
        if not status.isdigit() or (status.startswith(b"5") and status not in (b"503", b"504")):
            raise Wrong(f"HTTP answered {answer[:300]!r}")

    async def _raw(self, case: Case, leave: bool) -> None:
        try:
            async with asyncio.timeout(RAW_SECONDS):
                await self._exchange(case.target.removeprefix("raw "), case.messages, leave)
        except (TimeoutError, OSError):
            pass  # silence and a closed connection are both good answers to noise

    async def _exchange(self, where: str, pieces: Iterable[bytes], leave: bool) -> bytes:
        host, _, port = self._addresses[where].rpartition(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        try:
            for piece in pieces:
                writer.write(piece)
                await writer.drain()
            if leave:
                return b""
            answer = bytearray()
            while data := await reader.read(READ):
                answer += data[: READ - len(answer)]
            return bytes(answer)
        finally:
            writer.close()
