"""Answers of one request, whole or as a stream of named events: for the Responses and Messages APIs."""

from __future__ import annotations

import asyncio
import json
import re
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from typing import Any

from fastapi import Response
from fastapi.responses import JSONResponse
from starlette.types import Receive, Scope, Send

from baton.gateway.http_requests import cancel_on_disconnect, name_ignored
from baton.gateway.openai_answers import RequestBatch
from baton.gateway.openai_errors import ApiError
from baton.v1 import inference_pb2

Json = dict[str, Any]


class TypedAnswer(ABC):
    """One answer. Either `whole` after everything has been added, or the events of each step, in order. An
    event has its name as `type`."""

    def opening(self) -> list[Json]:
        """Events that come before all output."""
        return []

    @abstractmethod
    def add(self, delta: inference_pb2.Delta) -> list[Json]:
        """Takes new output."""

    @abstractmethod
    def end(self, finished: inference_pb2.Finished) -> list[Json]:
        """The request has finished."""

    @abstractmethod
    def fail(self, error: ApiError) -> list[Json]:
        """The request has failed after its stream began."""

    @abstractmethod
    def whole(self) -> Json: ...


@contextmanager
def naming_fields(tagged: str) -> Iterator[None]:
    """Errors name fields without the kind of item that pydantic has put into their path, behind what the
    regular expression `tagged` matches."""
    try:
        yield
    except ApiError as error:
        if error.param is not None:
            plain = re.sub(rf"^({tagged})\.\w+(?=\.|$)", r"\1", error.param)
            error.message = error.message.replace(error.param, plain)
            error.param = plain
        raise


async def respond(job: RequestBatch, answer: TypedAnswer, stream: bool, ignored: set[str]) -> Response:
    """The HTTP response. Raises ApiError for a failure before the first output."""
    if stream:
        await job.wait_for_output()
        return name_ignored(TypedEventStream(job, answer), ignored)
    answer.opening()
    async for _, event in job.events():
        _take(answer, event)
    return name_ignored(JSONResponse(answer.whole()), ignored)


def _take(answer: TypedAnswer, event: inference_pb2.Delta | inference_pb2.Finished) -> list[Json]:
    return answer.add(event) if isinstance(event, inference_pb2.Delta) else answer.end(event)


class TypedEventStream(Response):
    """Server-sent events with names. While a client reads slowly, only the token log grows."""

    media_type = "text/event-stream"

    def __init__(self, job: RequestBatch, answer: TypedAnswer) -> None:
        super().__init__()
        del self.headers["content-length"]
        self.headers["cache-control"] = "no-cache"
        self._job = job
        self._answer = answer

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        watch = asyncio.create_task(cancel_on_disconnect(receive, self._job))
        try:
            await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
            async for event in self._events():
                body = _encode(event)
                await send({"type": "http.response.body", "body": body, "more_body": True})
            await send({"type": "http.response.body", "body": b"", "more_body": False})
        except OSError:
            pass  # the client has gone; the request is cancelled below
        finally:
            watch.cancel()
            self._job.cancel("the client has gone")

    async def _events(self) -> AsyncIterator[Json]:
        try:
            for event in self._answer.opening():
                yield event
            async for _, taken in self._job.events():
                for event in _take(self._answer, taken):
                    yield event
        except ApiError as error:
            for event in self._answer.fail(error):
                yield event


def _encode(event: Json) -> bytes:
    data = json.dumps(event, ensure_ascii=False, separators=(",", ":"))
    return f"event: {event['type']}\ndata: {data}\n\n".encode()
