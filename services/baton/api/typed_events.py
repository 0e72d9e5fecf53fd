"""Answers of one request, whole or as a stream of named events: for the Responses and Messages APIs."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Iterator
from typing import ClassVar

from fastapi import Response
from fastapi.responses import JSONResponse

from baton.api.http_requests import COMMENT, EventStream, name_ignored, to_json
from baton.api.openai_answers import RequestBatch
from baton.api.openai_errors import ApiError
from baton.api.openai_fields import Json
from baton.api.stream_positions import StreamPosition
from baton.v1 import inference_pb2


class TypedAnswer(ABC):
    """One answer. Either `whole` after everything has been added, or the events of each step, in order. An
    event has its name as `type`."""

    PING: ClassVar[bytes] = COMMENT
    NUMBERED: ClassVar[bool] = False
    """Events of the stream have a `sequence_number`."""

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
    job.keep_log(stream, counted=True)
    if stream:
        await job.wait_for_start()
        return name_ignored(EventStream(job, _events(job, answer), answer.PING), ignored, job, limit)
    answer.opening()
    async for _, event in job.events():
        _take(answer, event)
    return name_ignored(JSONResponse(answer.whole()), ignored, job, limit)


def _take(answer: TypedAnswer, event: inference_pb2.Delta | inference_pb2.Finished) -> list[Json]:
    return answer.add(event) if isinstance(event, inference_pb2.Delta) else answer.end(event)


class _EventWriter:
    """Gives the events of a stream their ids and numbers, without those that the client has."""

    def __init__(self, position: StreamPosition, numbered: bool) -> None:
        self._position = position
        self._left_out, self._sent = position.counts
        self._since = 0
        """Events since the position has changed."""
        self._numbered = numbered

    def write(
        self, events: list[Json], delta: inference_pb2.Delta | None = None, *, ids: bool = True
    ) -> Iterator[bytes]:
        """delta: after the last event the client has it. Else the events leave its position as it is. ids:
        another gateway can go on after each of them."""
        for left, event in zip(range(len(events))[::-1], events, strict=True):
            self._since += 1
            if delta is not None and not left:
                self._move(delta)
            if self._left_out and ids:
                self._left_out -= 1
                continue
            if self._numbered:
                event["sequence_number"] = self._sent
            self._sent += 1
            position = str(self._position) if ids else ""
            id = f"id: {position}/{self._since}/{self._sent}\n" if position else ""
            kind, data = event["type"].encode(), to_json(event)
            yield b"%bevent: %b\ndata: %b\n\n" % (id.encode(), kind, data)
        if delta is not None and not events:
            self._move(delta)

    def _move(self, delta: inference_pb2.Delta) -> None:
        self._position.after(delta)
        self._since = 0


def _parts(delta: inference_pb2.Delta) -> Iterator[inference_pb2.Delta]:
    """One for each piece of output that has events of its own, in their order."""
    if delta.reasoning:
        yield inference_pb2.Delta(reasoning=delta.reasoning)
    if delta.text:
        yield inference_pb2.Delta(text=delta.text)
    for call in delta.tool_calls:
        yield inference_pb2.Delta(tool_calls=[call])
    if delta.finish_reason:
        yield inference_pb2.Delta(finish_reason=delta.finish_reason, stop_matched=delta.stop_matched)


async def _events(job: RequestBatch, answer: TypedAnswer) -> AsyncIterator[bytes]:
    writer = _EventWriter(job.position, answer.NUMBERED)
    try:
        opening = answer.opening()
        for encoded in writer.write([] if job.position.begun else opening):
            yield encoded
        async for _, taken in job.events():
            if isinstance(taken, inference_pb2.Finished):
                for encoded in writer.write(answer.end(taken)):
                    yield encoded
                continue
            seen, rest = job.position.split(taken)
            if seen is not None:
                answer.add(seen)
            for part in _parts(rest) if rest is not None else ():
                for encoded in writer.write(answer.add(part), part):
                    yield encoded
    except ApiError as error:
        for encoded in writer.write(answer.fail(error), ids=False):
            yield encoded
