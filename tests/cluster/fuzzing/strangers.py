"""Cases of strangers, who know everything but what opens the doors; and what must become of them: nothing."""

from __future__ import annotations

import asyncio
import itertools
import json
from collections.abc import Iterator
from random import Random
from urllib.parse import unquote

import grpc
import grpc.aio

from baton.rpc.channel import open_channel
from fuzzing.cases import FOR_STRANGERS, TARGETS, Case
from fuzzing.credentials import WAYS, Keys, broken
from fuzzing.h2 import Answer, call_bare, request
from fuzzing.mutate import break_bytes, call, connection
from fuzzing.seeds import BODIES, SEEDS
from fuzzing.send import CALL_SECONDS, RAW_SECONDS, Ports, Wrong
from fuzzing.talk import WRITTEN_TOO_LATE, Ended, Headers, exchange
from fuzzing.talk import call as call_grpc

BROKEN = 0.3
"""Of the messages: a good one would do most behind an open door."""
VERBS = ("GET", "POST", "POST", "HEAD", "PUT", "DELETE", "OPTIONS", "PATCH", "TRACE")
OPERATOR, TRACES, PAGE = "/metrics", "/traces", "/"
PATHS = (
    "/v1/completions", "/v1/chat/completions", "/v1/models", "/v1/models/model", OPERATOR, TRACES, PAGE,
    "/docs", "/openapi.json", "/nowhere", "/health/", "//health", "/Health", "/health;x", "/health%00",
    "/health%2f", "/health/../metrics", "/health/../v1/models", "/v1/models?x=/health", "/v1/models#/health",
    "/metrics/", "/%6detrics", "//v1/models", "/v1/../metrics", "http://x/v1/models", "http://x/metrics", "*",
)  # fmt: skip
"""All that HTTP has behind the door, and what may be taken for what is before it."""
REFUSED = {"400", "401", "404", "405", "413", "431"}
LARGE = 4096
"""Bytes of metadata from which on a call may be refused for them alone."""


def strangers(rng: Random) -> Iterator[Case]:
    """Cases without end."""
    while True:
        kind, way = rng.random(), rng.choice(WAYS)
        if kind < 0.75:
            yield call(rng, FOR_STRANGERS, BROKEN, way)
        elif kind < 0.95:
            path = rng.choice(PATHS)
            bodies = BODIES.get(path) or BODIES["/v1/completions"]
            body = json.dumps(rng.choice(bodies)).encode()
            body = break_bytes(body, rng) if rng.random() < BROKEN else body
            yield Case(f"{rng.choice(VERBS)} {path}", (body,), way)
        else:
            noise = connection(rng)
            yield Case(noise.target, noise.messages, "nothing")


def every_door() -> Iterator[Case]:
    """Each door in some of the ways, and each way at the door of each kind."""
    ways = itertools.cycle(WAYS)
    for method in FOR_STRANGERS:
        for target in method.targets:
            for seed in SEEDS[method.path]:
                yield Case(target, (seed.SerializeToString(),), next(ways))
    for path in PATHS:
        yield from (Case(f"{verb} {path}", (b"{}",), next(ways)) for verb in ("GET", "POST"))
    for way in WAYS:
        for target in (
            "Inference/ListModels",
            "Prefill/Run",
            "Node/GetLoad gateway",
            f"GET {OPERATOR}",
            f"GET {PAGE}",
            "GET /v1/models",
        ):
            yield Case(target, (b"",), way)


class Stranger:
    """Sends cases to a closed deployment. `keys` are those that open it; they are shown broken, or at other
    doors, only."""

    def __init__(self, ports: Ports, keys: Keys) -> None:
        self._ports = ports
        self._keys = keys
        self._channels = {role: open_channel(address) for role, address in ports.grpc.items()}

    async def close(self) -> None:
        await asyncio.gather(*(channel.close() for channel in self._channels.values()))

    async def send(self, case: Case, *, leave: bool) -> None:
        """leave: without waiting for the refusal. Raises Wrong when it is none."""
        try:
            async with asyncio.timeout(CALL_SECONDS):
                if case.target in TARGETS:
                    await self._grpc(case, leave)
                elif case.target.startswith("raw "):
                    await self._raw(case, leave)
                else:
                    await self._http(case, leave)
        except TimeoutError:
            raise Wrong(f"as {case.way}: hung: not refused within {CALL_SECONDS:g} s") from None

    async def _grpc(self, case: Case, leave: bool) -> None:
        method, role = TARGETS[case.target]
        operator = role != "gateway" or method.path.startswith(("Node/", "Traces/"))
        headers = broken(case.way, self._keys.of(operator))
        messages = [self._ports.message(method, role, data) for data in case.messages]
        if not all(_speakable(name, value) for name, value in headers):
            await self._frames(self._ports.grpc[role], case, request(method.wire, messages, headers), leave)
            return
        channel = self._channels[role]
        ended = await call_grpc(channel, method.wire, messages, headers, leave=leave, endless=method.endless)
        if ended.details == WRITTEN_TOO_LATE and not ended.answers and not leave:
            ended = await _ask_once(channel, method.wire, messages[0], headers)
        if ended.answers:
            raise Wrong(f"as {case.way}: {ended.answers} messages delivered, then {ended.code.name}")
        size = sum(len(name) + len(value) for name, value in headers)
        refusals = {grpc.StatusCode.UNAUTHENTICATED}
        if size > LARGE:
            refusals.add(grpc.StatusCode.RESOURCE_EXHAUSTED)
        if not leave and ended.code not in refusals:
            raise Wrong(f"as {case.way}: the call ended with {ended.code.name}: {ended.details}")

    async def _frames(self, address: str, case: Case, sent: bytes, leave: bool) -> None:
        try:
            delivered = await call_bare(address, sent, leave=leave)
        except ConnectionError:
            return  # a refusal too
        if delivered:
            raise Wrong(f"as {case.way}: delivered {delivered[:100]!r}")

    async def _http(self, case: Case, leave: bool) -> None:
        verb, _, path = case.target.partition(" ")
        if (path, case.way) == (PAGE, "basic, as users"):
            return  # as operators' browsers open it
        (body,) = case.messages
        headers = broken(case.way, self._keys.of(_is_operators(path), http=True))
        lines = [
            f"{verb} {path} HTTP/1.1".encode(),
            b"Host: localhost",
            b"Connection: close",
            b"Content-Type: application/json",
            b"Content-Length: %d" % len(body),
            *(name.encode() + b": " + _bytes(value) for name, value in headers),
        ]
        try:
            answer = await exchange(self._ports.http, [b"\r\n".join(lines) + b"\r\n\r\n", body], leave=leave)
        except ConnectionError:
            return  # refused before all had been sent, and what came back is lost
        if not leave and answer[9:12].decode("latin-1") not in REFUSED:
            raise Wrong(f"as {case.way}: HTTP answered {answer[:300]!r}")

    async def _raw(self, case: Case, leave: bool) -> None:
        address, answer = self._ports.at(case.target.removeprefix("raw ")), bytearray()
        try:
            async with asyncio.timeout(RAW_SECONDS):
                await exchange(address, case.messages, leave=leave, answer=answer)
        except (TimeoutError, OSError):
            pass  # silence and a closed connection are both good answers to noise
        if answer.startswith(b"HTTP/1.1 2") or Answer(bytes(answer)).delivered:
            raise Wrong(f"noise was answered {bytes(answer[:300])!r}")


async def _ask_once(channel: grpc.aio.Channel, wire: str, message: bytes, headers: Headers) -> Ended:
    """One message, sent with the headers: nothing is written after the refusal, which is therefore heard."""
    call = channel.unary_stream(wire)(message, metadata=headers)
    answers = 0
    try:
        while await call.read() is not grpc.aio.EOF:
            answers += 1
    except grpc.aio.AioRpcError:
        pass  # the code tells
    return Ended(await call.code(), await call.details() or "", answers)


def _is_operators(path: str) -> bool:
    return unquote(path.partition("?")[0]) in (OPERATOR, TRACES, PAGE)


def _speakable(name: str, value: str | bytes) -> bool:
    """gRPC's client sends it."""
    return name.endswith("-bin") or (isinstance(value, str) and value.isascii() and value.isprintable())


def _bytes(value: str | bytes) -> bytes:
    return value if isinstance(value, bytes) else value.encode("latin-1")
