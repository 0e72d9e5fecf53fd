"""One stream, judged event by event."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncGenerator
from dataclasses import dataclass
from typing import Any

import grpc
import grpc.aio

from baton.client.messages import make_start
from baton.rpc.errors import from_status
from baton.v1 import inference_pb2, inference_pb2_grpc
from stress.tasks import Task

LATE_SECONDS = 10.0
"""After a request's deadline, before its stream counts as hung: machines that run tests are busy."""
TYPED = {
    grpc.StatusCode.UNAVAILABLE,
    grpc.StatusCode.RESOURCE_EXHAUSTED,
    grpc.StatusCode.DEADLINE_EXCEEDED,
    grpc.StatusCode.ABORTED,
}
"""What a fault of a process may be told as."""
TERMINAL = ("finished", "failed")


class Broken(Exception):
    """The stream did what none may do."""


@dataclass(frozen=True)
class Outcome:
    """How a stream ended. `error`: the reason of its typed error; `broken`: what no stream may do. Both
    empty: it gave exactly what it had to."""

    tokens: int
    seconds: float
    ttft: float
    error: str = ""
    broken: str = ""
    resumed: int = 0
    retries: int = 0
    pause: float = 0.0
    """Longest time between two events after the first token."""

    @property
    def exact(self) -> bool:
        return not self.error and not self.broken


class Judge:
    """Compares what comes with what must come; raises Broken at the first difference."""

    def __init__(self, task: Task) -> None:
        self.task = task
        self.count = 0
        self.text = ""
        self.error = ""
        self.accepted = self.ended = False
        self.resumed = self.retries = 0
        self.first = 0.0

    def tokens(self, token_ids: list[int]) -> None:
        self.first = self.first or time.monotonic()
        expected = self.task.tokens[self.count : self.count + len(token_ids)]
        if tuple(token_ids) != expected:
            raise Broken(f"token {self.count}: {token_ids} came instead of {list(expected)}")
        self.count += len(token_ids)

    def add_text(self, text: str) -> None:
        self.first = self.first or time.monotonic()
        self.text += text
        if not self.task.text.startswith(self.text):
            raise Broken(f"text {self.text!r} is no beginning of {self.task.text!r}")

    def end(self, error: str = "", *, whole: bool = True) -> None:
        if self.ended:
            raise Broken("a second terminal event")
        self.ended, self.error = True, error
        if whole and (self.count != len(self.task.tokens) or self.text != self.task.text):
            raise Broken(f"finished after {self.count} of {len(self.task.tokens)} tokens, text {self.text!r}")

    def fail(self, code: grpc.StatusCode, reason: str) -> None:
        if code not in TYPED or not reason:
            raise Broken(f"failed with {code.name} {reason}")
        self.end(reason, whole=False)


async def ask(judge: Judge, events: AsyncGenerator[None, None], deadline: float) -> Outcome:
    """Follows a stream to its end. `deadline`: seconds that the request may take."""
    started = time.monotonic()
    broken, pause, last = "", 0.0, 0.0
    try:
        async with asyncio.timeout(deadline + LATE_SECONDS):
            async for _ in events:
                now = time.monotonic()
                pause, last = max(pause, now - last if last else 0.0), now if judge.first else 0.0
        if not judge.ended:
            broken = "the stream ended without a terminal event"
    except Broken as error:
        broken = str(error)
    except TimeoutError:
        broken = f"hung: nothing ended it within {deadline + LATE_SECONDS:g} s, {judge.count} tokens came"
    except (grpc.aio.AioRpcError, OSError, EOFError) as error:
        broken = f"{type(error).__name__}: {error}"
    ttft = judge.first - started if judge.first else 0.0
    seconds = time.monotonic() - started
    return Outcome(judge.count, seconds, ttft, judge.error, broken, judge.resumed, judge.retries, pause)


async def by_grpc(
    channel: grpc.aio.Channel, judge: Judge, deadline: float, namespace: str
) -> AsyncGenerator[None, None]:
    """A call of its own on Inference.Generate, read until gRPC ends it."""
    task = judge.task
    options = {**task.request, "timeout": deadline, "namespace": namespace}
    call = inference_pb2_grpc.InferenceStub(channel).Generate()
    try:
        await call.write(make_start("it", None, {**options, "token_ids": task.prompt}))
        await call.done_writing()
        while (event := await call.read()) is not grpc.aio.EOF:
            judge_event(judge, event)
            yield
        if await call.code() is not grpc.StatusCode.OK:
            raise Broken(f"the call ended with {await call.code()}: {await call.details()}")
    finally:
        call.cancel()


def judge_event(judge: Judge, event: inference_pb2.GenerateResponse) -> None:
    """The next event of the request `it`. Raises Broken."""
    kind = event.WhichOneof("kind")
    if event.id != "it" or judge.ended:
        raise Broken(f"{kind} of {event.id!r} came after {judge.count} tokens, ended={judge.ended}")
    if kind == "delta":
        judge.tokens(list(event.delta.token_ids))
        judge.add_text(event.delta.text)
    elif kind == "finished":
        stats = event.finished.stats
        judge.resumed = event.finished.resumed
        judge.retries = stats.handoff_retries
        judge.end()
        if event.finished.usage.output_tokens != judge.count:
            raise Broken(f"usage says {event.finished.usage.output_tokens} tokens, {judge.count} came")
    elif kind == "failed":
        error = from_status(event.failed)
        judge.fail(error.code, error.reason)
    elif kind == "accepted" and not judge.accepted:
        judge.accepted = True
    else:
        raise Broken(f"an event of kind {kind}")


async def by_http(address: str, judge: Judge, deadline: float, model: str) -> AsyncGenerator[None, None]:
    """POST /v1/completions with server-sent events, read until the server closes the connection. The API has
    no deadline of its own, and its tokens are text."""
    task = judge.task
    host, _, port = address.rpartition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    try:
        body = json.dumps(
            {"model": model, "prompt": list(task.prompt), "stream": True, **task.request}
        ).encode()
        head = "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        writer.write(f"{head}Connection: close\r\nContent-Length: {len(body)}\r\n\r\n".encode() + body)
        status = int((await reader.readuntil(b"\r\n")).split()[1])
        await reader.readuntil(b"\r\n\r\n")
        if status != 200:
            raise_refusal(judge, status, await reader.read())
        else:
            async for line in reader:
                if line.startswith(b"data: "):
                    _take_sent(judge, line[6:].strip())
                    yield
    finally:
        writer.close()


def _take_sent(judge: Judge, data: bytes) -> None:
    if data == b"[DONE]":
        judge.count = len(judge.task.tokens)  # the text tells
        judge.end()
        return
    event = json.loads(data)
    if judge.ended:
        raise Broken(f"{event} came after the end")
    if "error" in event:
        judge.end(_reason(event), whole=False)
    for choice in event.get("choices", ()):
        judge.add_text(choice["text"])


def raise_refusal(judge: Judge, status: int, body: bytes) -> None:
    """A request that failed before its first token has its own HTTP status."""
    if status not in (429, 503, 504):
        raise Broken(f"HTTP {status}: {body[-300:]!r}")
    start = body.find(b"{")
    end = body.rfind(b"}")
    judge.end(_reason(json.loads(body[start : end + 1])), whole=False)


def _reason(event: dict[str, Any]) -> str:
    error = event["error"]
    if not error.get("message") or not (error.get("code") or error.get("type")):
        raise Broken(f"an error without a type: {event}")
    return str(error.get("code") or error["type"]).upper()
