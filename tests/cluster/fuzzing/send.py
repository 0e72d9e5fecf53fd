"""Sends a case as a friend does, and judges how its call ends."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass

import grpc
import grpc.aio

from baton.rpc.channel import open_channel
from baton.v1 import cache_pb2, common_pb2, decode_pb2, prefill_pb2
from fuzzing.cases import HELLO, HTTP, TARGETS, Case, Method, parse
from fuzzing.seeds import OWN
from fuzzing.talk import WRITTEN_TOO_LATE, call, exchange

CALL_SECONDS = 30.0
"""A call that has not ended by then hangs: requests end by themselves within the deployment's limit."""
RAW_SECONDS = 1.0
"""A bare connection is held so long at most, then left: silence is an answer there."""
BUGS = {grpc.StatusCode.UNKNOWN, grpc.StatusCode.INTERNAL, grpc.StatusCode.DATA_LOSS}
"""What no message may end a call with."""


class Wrong(Exception):
    """The deployment did what it must not do."""


@dataclass(frozen=True)
class Ports:
    """Of a deployment. grpc: address by role. http: of the gateway's other one. incarnations: by role."""

    grpc: Mapping[str, str]
    http: str
    incarnations: Mapping[str, int]
    layout: common_pb2.Layout

    def at(self, name: str) -> str:
        return self.http if name == "http" else self.grpc[name]

    def message(self, method: Method, role: str, data: bytes) -> bytes:
        """What a message of a case is there."""
        if data == HELLO and method.request is prefill_pb2.PrefillRequest:
            hello = prefill_pb2.PrefillHello(incarnation=99, layout=self.layout)
            return prefill_pb2.PrefillRequest(hello=hello).SerializeToString()
        if data == HELLO:
            greeting = decode_pb2.GenerateCommand(hello=decode_pb2.DecodeHello(incarnation=99))
            return greeting.SerializeToString()
        parsed = parse(method, data)
        if isinstance(parsed, cache_pb2.WatchRequest) and parsed.incarnation == OWN:
            parsed.incarnation = self.incarnations[role]
            return parsed.SerializeToString()
        return data


class Sender:
    """Keeps one connection to each process; each call is a call of its own."""

    def __init__(self, ports: Ports) -> None:
        self._ports = ports
        self._channels = {role: open_channel(address) for role, address in ports.grpc.items()}

    async def close(self) -> None:
        await asyncio.gather(*(channel.close() for channel in self._channels.values()))

    async def send(self, case: Case, *, leave: bool) -> None:
        """leave: the client goes away at the end, instead of waiting for all answers. Raises Wrong."""
        try:
            async with asyncio.timeout(CALL_SECONDS):
                if case.target in HTTP:
                    await self._http(case, leave)
                elif case.target in TARGETS:
                    await self._grpc(case, leave)
                else:
                    await self._raw(case, leave)
        except TimeoutError:
            raise Wrong(f"hung: no end of the call within {CALL_SECONDS:g} s") from None

    async def _grpc(self, case: Case, leave: bool) -> None:
        method, role = TARGETS[case.target]
        sent = [self._ports.message(method, role, data) for data in case.messages]
        ended = await call(self._channels[role], method.wire, sent, leave=leave, endless=method.endless)
        if ended.code in BUGS and ended.details != WRITTEN_TOO_LATE:
            raise Wrong(f"the call ended with {ended.code.name}: {ended.details}")
        if method.endless and ended.code is grpc.StatusCode.RESOURCE_EXHAUSTED:
            raise Wrong(f"those who have left still count: {ended.details}")

    async def _http(self, case: Case, leave: bool) -> None:
        (body,) = case.messages
        head = f"POST {case.target} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        rest = f"Connection: close\r\nContent-Length: {len(body)}\r\n\r\n"
        answer = await exchange(self._ports.http, [(head + rest).encode(), body], leave=leave)
        if leave:
            return
        status = answer[9:12]
        if not status.isdigit() or (status.startswith(b"5") and status not in (b"503", b"504")):
            raise Wrong(f"HTTP answered {answer[:300]!r}")

    async def _raw(self, case: Case, leave: bool) -> None:
        where = self._ports.at(case.target.removeprefix("raw "))
        try:
            async with asyncio.timeout(RAW_SECONDS):
                await exchange(where, case.messages, leave=leave)
        except (TimeoutError, OSError):
            pass  # silence and a closed connection are both good answers to noise
