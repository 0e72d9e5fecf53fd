"""From an HTTP body to running requests, and from their output to an answer, whole or streamed."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, suppress
from dataclasses import replace
from typing import Any

from fastapi import Request, Response
from fastapi.responses import JSONResponse
from starlette.requests import ClientDisconnect
from starlette.types import Receive, Scope, Send

from baton.api import openai_errors
from baton.api.field_names import field_names
from baton.api.http_record import BEGUN
from baton.api.json_body import BodyModel, Made, ParsedBody, parse_body
from baton.api.openai_answers import OpenAIAnswer, RequestBatch
from baton.api.openai_errors import ApiError, from_baton
from baton.api.stream_positions import POSITION_HEADER, TICKET_HEADER, resume_from
from baton.gateway.admission import check_start
from baton.gateway.gateway import Gateway
from baton.rpc.errors import BatonError
from baton.rpc.http_server import UNBUFFERED
from baton.rpc.logs import get_logger
from baton.v1 import inference_pb2, tokenizer_pb2

BODY_SECONDS = 30.0
"""Time for a body to arrive."""
SMALL_BODY_BYTES = 2**15
"""A body up to this size is parsed on the event loop: handing it to a thread would take longer."""
MEDIUM_BODY_BYTES = 2**20
"""One up to this size does not wait for larger ones."""
IGNORED_HEADER = "x-baton-ignored"
DROPPED_HEADER = "x-baton-dropped-tools"
MAX_IGNORED = 64
"""Most names in one of these headers."""

_Starts = list[inference_pb2.GenerateStart]
_log = get_logger()


class BodyReader:
    """Reads the bodies of one gateway's HTTP requests. Medium ones are parsed by a thread and large ones by
    another; not by more, because each computing thread delays the event loop by milliseconds."""

    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway
        self._medium = ThreadPoolExecutor(1, "http-bodies")
        self._large = ThreadPoolExecutor(1, "large-http-bodies")

    async def read(
        self, request: Request, kind: type[BodyModel], convert: Callable[[BodyModel], Made]
    ) -> ParsedBody[BodyModel, Made]:
        """The checked body, and what `convert` makes of it. Raises ApiError or BatonError."""
        config, names = self._gateway.config, field_names(request.url.path)
        body = await _read(request, config.max_message_bytes)

        def parse() -> ParsedBody[BodyModel, Made]:
            return parse_body(body, kind, convert, names, omit_images=config.omit_images)

        if len(body) <= SMALL_BODY_BYTES:
            return parse()
        thread = self._medium if len(body) <= MEDIUM_BODY_BYTES else self._large
        return await asyncio.get_running_loop().run_in_executor(thread, parse)

    async def read_starts(
        self, request: Request, kind: type[BodyModel], convert: Callable[[BodyModel], _Starts]
    ) -> ParsedBody[BodyModel, _Starts]:
        """Reads an HTTP body into requests to start. A prompt that is too long is refused in the thread:
        the event loop would copy it once more."""

        def checked(model: BodyModel) -> _Starts:
            names = field_names(request.url.path)
            names = replace(names, grammar=getattr(model, "grammar_field", names.grammar))
            prompt = None
            try:
                starts = convert(model)
                for number, start in enumerate(starts):
                    prompt = number if len(starts) > 1 else None
                    check_start(start, self._gateway.config, self._gateway.model_or_last())
            except BatonError as error:
                raise from_baton(error, names, prompt) from None
            return starts

        return await self.read(request, kind, checked)


async def _read(request: Request, limit: int) -> bytearray:
    """The body. Raises ApiError: 415, 413, 408 or 499."""
    content_type = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if content_type != "application/json":
        received = content_type[:80] or "absent"
        raise ApiError(415, f"the content type must be application/json, not {received}")
    encoding = request.headers.get("content-encoding", "identity").strip().lower()
    if encoding != "identity":
        raise ApiError(415, f"the content encoding {encoding[:80]} is not supported: send the body as it is")
    body = bytearray()
    try:
        async with asyncio.timeout(BODY_SECONDS):
            async for piece in request.stream():
                body += piece
                if len(body) > limit:
                    raise ApiError(413, f"the body is larger than the {limit} bytes allowed here")
    except TimeoutError:
        raise ApiError(408, f"the body did not arrive within {BODY_SECONDS:g} s") from None
    except ClientDisconnect:
        raise ApiError(499, "the client has gone") from None
    return body


@asynccontextmanager
async def running(
    gateway: Gateway, starts: _Starts, request: Request, grammar: str | None = None
) -> AsyncIterator[RequestBatch]:
    """Runs the requests; they are cancelled when the client leaves, or when the body fails. grammar: the
    field that their grammar comes from; None: the API's own."""
    names = field_names(request.url.path)
    setattr(request.state, BEGUN, True)
    traceparent = request.headers.get("traceparent", "")
    names = replace(names, grammar=grammar or names.grammar)
    resume = counts = None
    if ticket := request.headers.get(TICKET_HEADER):
        resume, counts = resume_from(ticket, request.headers.get(POSITION_HEADER, ""), starts)
    job = RequestBatch(gateway, starts, request.state.api_key, traceparent, names, resume, counts)
    job.begin()
    watch = asyncio.create_task(cancel_on_disconnect(request.receive, job))
    try:
        yield job
    except BaseException:
        job.cancel("the HTTP request failed")
        raise
    finally:
        watch.cancel()


def grammar_field(start: inference_pb2.GenerateStart, answer: str) -> str:
    """The field that the request's grammar comes from: `answer`, the one with the form of the answer, or
    tools; both where both are in it."""
    required = start.chat.tool_choice.mode == tokenizer_pb2.ToolChoice.MODE_REQUIRED
    if required or not start.sampling.HasField("grammar"):
        return "tools"
    held = any(tool.strict for tool in start.chat.tools) or bool(start.chat.tool_choice.allowed)
    return f"{answer} or tools" if held else answer


async def cancel_on_disconnect(receive: Receive, job: RequestBatch) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
    job.cancel("the client has gone")


async def respond(
    job: RequestBatch, answer: OpenAIAnswer, stream: bool, ignored: set[str], limit: str | None
) -> Response:
    """The HTTP response. Raises ApiError for a failure before it begins. ignored: fields of the body that
    have no effect. limit: the field with max_tokens, if that was given."""
    response: Response
    job.keep_log(stream and answer.resumable)
    if stream:
        await job.wait_for_start()
        response = EventStream(job, _events(job, answer))
    else:
        await job.wait_for_output()
        chunks = await answer.begin()
        async for index, event in job.merged_events():
            if isinstance(event, inference_pb2.Delta):
                chunks += answer.add(index, event)
            else:
                answer.add_end(event)
        response = JSONResponse(answer.whole(chunks))
    return name_ignored(response, ignored, job, limit)


def name_ignored(
    response: Response, ignored: set[str], job: RequestBatch | None = None, limit: str | None = None
) -> Response:
    """The response, with a header that names fields of the body that have no effect. limit: the field with
    max_tokens, which has none if the job had to reduce it."""
    if limit is not None and job is not None and job.clamped:
        ignored = ignored | {limit}
    if ignored:
        response.headers[IGNORED_HEADER] = ", ".join(sorted(ignored)[:MAX_IGNORED])
    return response


def name_dropped(response: Response, dropped: set[str], request: str) -> Response:
    """The response, with a header that names the types of tools that the model was not shown. It is logged as
    well: who offered them may wait for calls in vain."""
    if dropped:
        names = ", ".join(sorted(dropped)[:MAX_IGNORED])
        response.headers[DROPPED_HEADER] = names
        _log.info("tools were left out", request=request, types=names)
    return response


def unread_arguments(gateway: Gateway, chat: tokenizer_pb2.ChatPrompt) -> set[str]:
    """Arguments of the chat template that it does not read, as fields of the body."""
    model = gateway.model_or_last()
    if model is None or not chat.HasField("template_arguments"):
        return set()
    names = chat.template_arguments.fields.keys() - set(model.template_variables)
    return {
        "reasoning_effort" if name == "reasoning_effort" else f"chat_template_kwargs.{name}"
        for name in names
        if re.fullmatch("[a-zA-Z0-9_]{1,64}", name)
    }


COMMENT = b": ping\n\n"
"""Clients read over it, as server-sent events define."""


class EventStream(Response):
    """Server-sent events. While a client reads slowly, only the token logs grow. The requests are cancelled
    when the client leaves."""

    media_type = "text/event-stream"

    def __init__(self, job: RequestBatch, events: AsyncIterator[bytes], ping: bytes = COMMENT) -> None:
        """ping: sent when nothing else has been for `job.ping_seconds`."""
        super().__init__()
        self._ping = ping
        self._sent = 0.0
        """When something was sent last, on the loop's clock."""
        del self.headers["content-length"]
        self.headers["cache-control"] = "no-cache"
        self.headers.update(UNBUFFERED)
        self._job = job
        self._events = events
        if ticket := job.ticket:
            self.headers[TICKET_HEADER] = ticket

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        clock = asyncio.get_running_loop().time
        tasks = [asyncio.create_task(cancel_on_disconnect(receive, self._job))]
        try:
            await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
            if self._job.ping_seconds:
                self._sent = clock()
                tasks.append(asyncio.create_task(self._keep_open(send)))
            async for event in self._events:
                await send({"type": "http.response.body", "body": event, "more_body": True})
                self._sent = clock()
            await send({"type": "http.response.body", "body": b"", "more_body": False})
        except OSError:
            pass  # the client has gone; the requests are cancelled below
        finally:
            for task in tasks:
                task.cancel()
            self._job.cancel("the client has gone")

    async def _keep_open(self, send: Send) -> None:
        clock, limit = asyncio.get_running_loop().time, self._job.ping_seconds
        while True:
            silent = clock() - self._sent
            if silent < limit:
                await asyncio.sleep(limit - silent)
                continue
            with suppress(OSError):  # as above
                await send({"type": "http.response.body", "body": self._ping, "more_body": True})
            self._sent = clock()


async def _events(job: RequestBatch, answer: OpenAIAnswer) -> AsyncIterator[bytes]:
    try:
        opening = [] if job.position.begun else answer.opening()
        yield b"".join(map(_encode, opening)) or COMMENT
        await job.wait_for_output()
        for chunk in await answer.begin():
            yield _encode(chunk)
        async for index, event in job.events():
            if isinstance(event, inference_pb2.Delta):
                seen, rest = job.position.split(event)
                if seen is not None:
                    answer.add(index, seen)
                if rest is not None:
                    for chunk in answer.add(index, rest):
                        yield _encode(chunk, job.position.after(rest))
            else:
                answer.add_end(event)
        for chunk in answer.closing():
            yield _encode(chunk)
        yield b"data: [DONE]\n\n"
    except (ApiError, BatonError) as error:
        yield _encode(openai_errors.body(error if isinstance(error, ApiError) else from_baton(error)))


def _encode(event: dict[str, Any], id: str = "") -> bytes:
    return b"%bdata: %b\n\n" % (f"id: {id}\n".encode() if id else b"", to_json(event))


def to_json(event: Any) -> bytes:
    """In one line."""
    return json.dumps(event, ensure_ascii=False, separators=(",", ":")).encode()
