"""gRPC messages that cost much to parse: streams of others go on, and memory stays in proportion."""

from __future__ import annotations

import asyncio
import multiprocessing
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import message_sender
import pytest
from gateway_rig import Rig, Stream, gateway
from scripted_decode import Running, ScriptedDecode
from test_large_bodies import LIMIT, LOOP_SECONDS, SMALL, longest_standstill, memory, reset_peak

from baton.rpc.message_scan import MAX_MESSAGES
from baton.v1 import inference_pb2, tokenizer_pb2

EMPTY = 7_900_000
TICK = 0.01


def nested(data: bytes, *numbers: int) -> bytes:
    """The bytes as the value of these fields, the outermost first."""
    for number in reversed(numbers):
        size, length = len(data), b""
        while size > 127:
            length, size = length + bytes([size & 127 | 128]), size >> 7
        data = b"".join((bytes([number << 3 | 2]), length, bytes([size]), data))
    return data


def empty(number: int, count: int = EMPTY) -> bytes:
    return bytes([number << 3 | 2, 0]) * count


START, CHAT, MESSAGES, SAMPLING = 1, 4, 1, 6


def start(data: bytes) -> bytes:
    """A request whose start has an id and these fields."""
    return nested(b"\x0a\x01a" + data, START)


def refused() -> dict[str, tuple[bytes, str]]:
    """Name -> message, and the field that is wrong."""
    in_start = "start.chat.messages"
    return {
        "tool calls of one message": (
            start(nested(empty(4), CHAT, MESSAGES)),
            f"{in_start}[0].tool_calls",
        ),
        "chat messages": (start(nested(empty(MESSAGES), CHAT)), in_start),
        "stops, the last one wrong": (
            start(nested(empty(12) + b"\x62\x01\xff", SAMPLING)),
            "start.sampling.stop",
        ),
        "unknown fields": (b"\x7a\x00" * EMPTY, "message"),
        "tool calls of many messages": (
            start(nested(nested(empty(4, 8000), MESSAGES) * 900, CHAT)),
            "message",
        ),
    }


def taken() -> dict[str, inference_pb2.GenerateRequest]:
    """As large as is allowed, or nearly."""
    message = tokenizer_pb2.ChatMessage(role="user", content="")
    chat = tokenizer_pb2.ChatPrompt(messages=[message] * MAX_MESSAGES)
    starts = {
        "messages": inference_pb2.GenerateStart(chat=chat),
        "tokens": inference_pb2.GenerateStart(tokens=inference_pb2.TokenPrompt(token_ids=[300] * 1_000_000)),
        "a text": inference_pb2.GenerateStart(text="a" * (LIMIT - 1024)),
    }
    for name, start in starts.items():
        start.id = name
    return {name: inference_pb2.GenerateRequest(start=start) for name, start in starts.items()}


async def endless(running: Running) -> None:
    while True:
        await running.tokens([300])
        await asyncio.sleep(TICK)


class Neighbour:
    """A stream that reads its output all the time. `longest`: CPU seconds of this process without any."""

    def __init__(self, rig: Rig) -> None:
        self.longest = 0.0
        self._stream = Stream(rig)

    async def run(self) -> None:
        await self._stream.start("neighbour", text="x")
        before = time.process_time()
        while True:
            await self._stream.next()
            now = time.process_time()
            self.longest, before = max(self.longest, now - before), now


@pytest.fixture
def client() -> Iterator[ProcessPoolExecutor]:
    """A process of its own, whose time and memory are not counted."""
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
        yield pool


async def test_streams_of_others_go_on_and_memory_stays_in_proportion(client, tmp_path: Path):
    exceeded = {}
    loop, file = asyncio.get_running_loop(), tmp_path / "message"
    async with ScriptedDecode(endless) as decode, gateway(decode, max_message_bytes=LIMIT) as rig:
        cases: dict[str, tuple[bytes, str | None]] = {}
        cases |= {name: (message.SerializeToString(), None) for name, message in taken().items()}
        cases |= refused()
        for name, (data, field) in cases.items():
            assert len(data) <= LIMIT
            file.write_bytes(data)
            neighbour = Neighbour(rig)
            listening = asyncio.create_task(neighbour.run())
            await asyncio.sleep(0.2)
            neighbour.longest = 0.0
            reset_peak()
            before = memory("VmRSS")
            work = loop.run_in_executor(client, message_sender.generate, rig.node.address, file)
            stood = await longest_standstill(work)
            (reason, wrong), grown = await work, memory("VmHWM") - before
            print(
                f"{name}: {reason} {wrong}, loop {stood * 1e3:.0f} ms, neighbour "
                f"{neighbour.longest * 1e3:.0f} ms, {grown / len(data):.1f} times the message"
            )
            listening.cancel()
            slow = max(stood, neighbour.longest) >= LOOP_SECONDS
            if slow or grown >= 10 * len(data) + SMALL or (field is not None and wrong != field):
                exceeded[name] = (wrong, stood, neighbour.longest, grown / len(data))
    assert not exceeded


async def test_a_call_of_one_message_is_refused_alike(client, tmp_path: Path):
    file = tmp_path / "message"
    file.write_bytes(start(nested(empty(4), CHAT, MESSAGES)))
    loop = asyncio.get_running_loop()
    async with ScriptedDecode(endless) as decode, gateway(decode, max_message_bytes=LIMIT) as rig:
        said = await loop.run_in_executor(client, message_sender.complete, rig.node.address, file)
        assert said == ("TOO_MANY_ENTRIES", "start.chat.messages[0].tool_calls")
