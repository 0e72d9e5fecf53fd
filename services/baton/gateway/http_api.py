"""The OpenAI API over HTTP, and /health and /metrics."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from typing import Any, TypeVar

from fastapi import FastAPI, Request, Response
from fastapi.responses import JSONResponse
from google.protobuf.json_format import MessageToDict
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
from pydantic import BaseModel
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Receive, Scope, Send

from baton.gateway import openai_errors
from baton.gateway.admission import check_start
from baton.gateway.authentication import ApiKey, GatewayAuthentication
from baton.gateway.gateway import Gateway
from baton.gateway.openai_answers import Answer, ChatAnswer, CompletionAnswer, Json, RequestBatch
from baton.gateway.openai_errors import ApiError
from baton.gateway.openai_protocol import (
    ChatRequest,
    CommonRequest,
    CompletionRequest,
    chat_start,
    completion_starts,
    parse_body,
)
from baton.rpc.authentication import bearer
from baton.rpc.errors import BatonError
from baton.rpc.http_server import authorization
from baton.rpc.logs import get_logger
from baton.v1 import inference_pb2

ECHO_SECONDS = 10.0
BODY_SECONDS = 30.0
"""Time for a body to arrive."""

SMALL_BODY_BYTES = 2**15
"""A body up to this size is parsed on the event loop: handing it to a thread would take longer."""

_log = get_logger()
_Body = TypeVar("_Body", bound=BaseModel)
_Starts = list[inference_pb2.GenerateStart]


def make_app(gateway: Gateway, authentication: GatewayAuthentication) -> FastAPI:
    """The HTTP application of one gateway."""
    app = FastAPI(
        title="Baton", docs_url=None, redoc_url=None, openapi_url=None, exception_handlers=_EXCEPTION_HANDLERS
    )
    app.add_middleware(
        HttpAuthentication, authentication=authentication, max_header_bytes=gateway.config.max_header_bytes
    )
    started = int(time.time())

    def models() -> list[Json]:
        model = gateway.model()
        described = {"id": model.name, "object": "model", "created": started, "owned_by": "baton"}
        defaults = MessageToDict(model.default_sampling, preserving_proto_field_name=True)
        return [{**described, "max_model_len": model.context_length, "default_sampling": defaults}]

    # One thread: each computing thread delays the event loop by milliseconds.
    parser = ThreadPoolExecutor(1, "http-bodies")

    def read_large(
        body: bytearray, kind: type[_Body], convert: Callable[[_Body], _Starts]
    ) -> tuple[_Body, _Starts]:
        """Refuses a prompt that is too long in this thread: the event loop would copy it once more."""
        request, starts = parse_body(body, kind, convert)
        for start in starts:
            check_start(start, gateway.config, gateway.model_or_last())
        return request, starts

    async def read(
        request: Request, kind: type[_Body], convert: Callable[[_Body], _Starts]
    ) -> tuple[_Body, _Starts]:
        """The checked body and its requests. Raises ApiError or BatonError."""
        body = await _read(request, gateway.config.max_message_bytes)
        if len(body) <= SMALL_BODY_BYTES:
            return parse_body(body, kind, convert)
        return await asyncio.get_running_loop().run_in_executor(parser, read_large, body, kind, convert)

    @app.get("/v1/models")
    async def list_models() -> Json:
        return {"object": "list", "data": models()}

    @app.get("/v1/models/{name:path}")
    async def get_model(name: str) -> Json:
        for model in models():
            if model["id"] == name:
                return model
        raise ApiError(404, f"model {name[:256]!r} is not served here", "model", "model_not_found")

    @app.post("/v1/completions")
    async def completions(request: Request) -> Response:
        body, starts = await read(request, CompletionRequest, completion_starts)
        async with _job(gateway, starts, request) as job:
            await job.wait_for_output()
            echoes = (
                [await _echo(gateway, start) for start in starts for _ in range(job.n)] if body.echo else None
            )
            usage = _include_usage(body)
            answer = CompletionAnswer(job.name, body.model, len(starts) * job.n, usage, echoes)
            return await _answer(job, answer, bool(body.stream))

    @app.post("/v1/chat/completions")
    async def chat_completions(request: Request) -> Response:
        body, starts = await read(request, ChatRequest, lambda body: [chat_start(body)])
        async with _job(gateway, starts, request) as job:
            await job.wait_for_output()  # `n` has been checked by then
            answer = ChatAnswer(job.name, body.model, job.n, _include_usage(body))
            return await _answer(job, answer, bool(body.stream))

    @app.get("/health")
    async def health() -> Response:
        info = gateway.info()
        peers = [
            {"role": peer.role, "address": peer.address, "connected": peer.connected} for peer in info.peers
        ]
        status: Json = {"status": "serving" if gateway.healthy else "not serving"}
        if authentication.keys is None:  # else the caller may not be authenticated
            status["peers"] = peers
            status["problems"] = [problem.message for problem in gateway.problems()]
        return JSONResponse(status, status_code=200 if gateway.healthy else 503)

    @app.get("/metrics")
    async def metrics() -> Response:
        return Response(generate_latest(gateway.metrics.registry), media_type=CONTENT_TYPE_LATEST)

    return app


async def _error(request: Request, error: Any) -> Response:
    if isinstance(error, BatonError):
        error = openai_errors.from_baton(error)
    if isinstance(error, ApiError):
        return openai_errors.response(error)
    if not isinstance(error, HTTPException):
        return openai_errors.response(ApiError(500, f"internal error: {type(error).__name__}"))
    message = f"{request.method[:20]} {request.url.path[:256]}: {str(error.detail).lower()}"
    answer = openai_errors.response(ApiError(error.status_code, message))
    answer.headers.update(error.headers or {})
    return answer


_EXCEPTION_HANDLERS: dict[int | type[Exception], Any] = dict.fromkeys(
    (ApiError, BatonError, HTTPException, Exception), _error
)


async def _read(request: Request, limit: int) -> bytearray:
    """The body. Raises ApiError: 415, 413, 408 or 499."""
    content_type = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if content_type != "application/json":
        given = content_type[:80] or "absent"
        raise ApiError(415, f"the content type must be application/json, not {given}")
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
async def _job(
    gateway: Gateway, starts: list[inference_pb2.GenerateStart], request: Request
) -> AsyncIterator[RequestBatch]:
    """Runs the requests; they are cancelled when the client leaves, or when the body fails."""
    job = RequestBatch(gateway, starts, request.state.api_key)
    job.begin()
    watch = asyncio.create_task(_cancel_on_disconnect(request.receive, job))
    try:
        yield job
    except BaseException:
        job.cancel("the HTTP request failed")
        raise
    finally:
        watch.cancel()


async def _cancel_on_disconnect(receive: Receive, job: RequestBatch) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
    job.cancel("the client has gone")


async def _answer(job: RequestBatch, answer: Answer, stream: bool) -> Response:
    if stream:
        return EventStream(job, answer)
    async for index, event in job.events():
        if isinstance(event, inference_pb2.Delta):
            answer.add(index, event)
        else:
            answer.add_end(event)
    return JSONResponse(answer.whole())


PUBLIC_PATHS = ("/health",)
"""With API keys, /health only says whether requests are served."""
OPERATOR_PATHS = ("/metrics",)


class HttpAuthentication:
    """ASGI middleware: checks headers and credentials. Sets the request's `state.api_key`."""

    def __init__(self, app: ASGIApp, authentication: GatewayAuthentication, max_header_bytes: int) -> None:
        self._app = app
        self._authentication = authentication
        self._max_header_bytes = max_header_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        try:
            headers = Headers(scope=scope)
            self._check_headers(scope, headers)
            scope.setdefault("state", {})["api_key"] = self._admit(scope["path"], headers)
        except BatonError as error:
            await openai_errors.response(openai_errors.from_baton(error))(scope, receive, send)
        except ApiError as error:
            answer = openai_errors.response(error)
            answer.headers["connection"] = "close"
            await answer(scope, receive, send)
        else:
            await self._app(scope, receive, send)

    def _check_headers(self, scope: Scope, headers: Headers) -> None:
        if "content-length" in headers and "transfer-encoding" in headers:
            # Request smuggling (RFC 9112, section 6.3): a proxy in front may use the other of the two.
            text = "the request has both Content-Length and Transfer-Encoding: send one of them"
            raise ApiError(400, text, None, "invalid_http")
        size = len(scope["raw_path"]) + len(scope["query_string"])
        size += sum(len(name) + len(value) for name, value in scope["headers"])
        if size > self._max_header_bytes:
            text = f"the request's headers have {size} bytes; {self._max_header_bytes} are allowed here"
            raise ApiError(431, text, None, "headers_too_large")

    def _admit(self, path: str, headers: Headers) -> ApiKey | None:
        """Raises BatonError."""
        if path in OPERATOR_PATHS:
            if self._authentication.keys is not None:
                self._authentication.check_operator(bearer(authorization(headers)))
            return None
        if path in PUBLIC_PATHS:
            return None
        return self._authentication.api_key(authorization(headers))


class EventStream(Response):
    """Server-sent events. While a client reads slowly, only the token logs grow."""

    media_type = "text/event-stream"

    def __init__(self, job: RequestBatch, answer: Answer) -> None:
        super().__init__()
        del self.headers["content-length"]
        self.headers["cache-control"] = "no-cache"
        self._job = job
        self._answer = answer

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        watch = asyncio.create_task(_cancel_on_disconnect(receive, self._job))
        try:
            await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
            async for event in self._events():
                await send({"type": "http.response.body", "body": b"data: %b\n\n" % event, "more_body": True})
            await send({"type": "http.response.body", "body": b"", "more_body": False})
        except OSError:
            pass  # the client has gone; the requests are cancelled below
        finally:
            watch.cancel()
            self._job.cancel("the client has gone")

    async def _events(self) -> AsyncIterator[bytes]:
        try:
            for chunk in self._answer.opening():
                yield _encode(chunk)
            async for index, event in self._job.events():
                if isinstance(event, inference_pb2.Delta):
                    yield _encode(self._answer.chunk_of(index, event))
                else:
                    self._answer.add_end(event)
            for chunk in self._answer.closing():
                yield _encode(chunk)
            yield b"[DONE]"
        except ApiError as error:
            yield _encode(openai_errors.body(error))


def _include_usage(body: CommonRequest) -> bool:
    return body.stream_options is not None and bool(body.stream_options.include_usage)


async def _echo(gateway: Gateway, start: inference_pb2.GenerateStart) -> str:
    if start.WhichOneof("prompt") == "text":
        return str(start.text)
    return await gateway.tokenizer.decode(start.tokens.token_ids, ECHO_SECONDS)


def _encode(event: dict[str, Any]) -> bytes:
    return json.dumps(event, ensure_ascii=False, separators=(",", ":")).encode()
