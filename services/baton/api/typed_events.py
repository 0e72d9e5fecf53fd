"""Answers of one request, whole or as a stream of named events: for the Responses and Messages APIs."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import AsyncIterator
from typing import ClassVar

from fastapi import Response
from fastapi.responses import JSONResponse

from baton.api.http_requests import COMMENT, EventStream, name_ignored, to_json
from baton.api.openai_answers import RequestBatch
from baton.api.openai_errors import ApiError
from baton.api.openai_fields import Json
from baton.v1 import inference_pb2


class TypedAnswer(ABC):
    """One answer. Either `whole` after everything has been added, or the events of each step, in order. An
    event has its name as `type`."""

    PING: ClassVar[bytes] = COMMENT

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


async def respond(
    job: RequestBatch, answer: TypedAnswer, stream: bool, ignored: set[str], limit: str | None
) -> Response:
    """The HTTP response. Raises ApiError for a failure before it begins. limit: the field with max_tokens, if
    that was given."""
    job.keep_log(False)
    if stream:
        await job.wait_for_start()
        return name_ignored(EventStream(job, _events(job, answer), answer.PING), ignored, job, limit)
    answer.opening()
    async for _, event in job.events():
        _take(answer, event)
    return name_ignored(JSONResponse(answer.whole()), ignored, job, limit)


def _take(answer: TypedAnswer, event: inference_pb2.Delta | inference_pb2.Finished) -> list[Json]:
    return answer.add(event) if isinstance(event, inference_pb2.Delta) else answer.end(event)


async def _events(job: RequestBatch, answer: TypedAnswer) -> AsyncIterator[bytes]:
    try:
        for event in answer.opening():
            yield _encode(event)
        async for _, taken in job.events():
            for event in _take(answer, taken):
                yield _encode(event)
    except ApiError as error:
        for event in answer.fail(error):
            yield _encode(event)


def _encode(event: Json) -> bytes:
    return b"event: %b\ndata: %b\n\n" % (event["type"].encode(), to_json(event))
