"""The gateway's HTTP application: the APIs of OpenAI and Anthropic, tokens, scores, /health and /metrics."""

from __future__ import annotations

import asyncio
import json
import time
from importlib.metadata import version
from typing import Any

from fastapi import FastAPI, Request, Response
from fastapi.responses import JSONResponse
from google.protobuf.json_format import MessageToDict
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware

from baton.api import http_errors, openai_errors, traces_http
from baton.api.anthropic_api import add_messages
from baton.api.embeddings_api import add_embeddings
from baton.api.field_names import field_names
from baton.api.http_authentication import HttpAuthentication, RequestIds
from baton.api.http_record import BEGUN, REFUSAL, HttpRecord
from baton.api.http_requests import (
    DROPPED_HEADER,
    IGNORED_HEADER,
    BodyReader,
    grammar_field,
    respond,
    running,
    unread_arguments,
)
from baton.api.openai_answers import ChatAnswer
from baton.api.openai_chat import ChatRequest, chat_start
from baton.api.openai_completions import CompletionAnswer
from baton.api.openai_errors import ApiError
from baton.api.openai_fields import Json
from baton.api.openai_protocol import CompletionRequest, completion_starts
from baton.api.openapi import document
from baton.api.responses_api import add_responses
from baton.api.scores_api import add_scores
from baton.api.stream_positions import TICKET_HEADER
from baton.api.tokenize_api import add_tokens
from baton.authentication.gateway import GatewayAuthentication
from baton.gateway.admission import check_model
from baton.gateway.gateway import Gateway
from baton.gateway.tool_grammars import unenforced
from baton.rpc.errors import BatonError
from baton.rpc.metrics import exposition
from baton.v1 import inference_pb2

ECHO_SECONDS = 10.0
READ = ["GET", "HEAD"]


def make_app(gateway: Gateway, authentication: GatewayAuthentication) -> FastAPI:
    """The HTTP application of one gateway."""
    app = FastAPI(
        title="Baton",
        docs_url=None,
        redoc_url=None,
        openapi_url=None,
        redirect_slashes=False,
        exception_handlers=_EXCEPTION_HANDLERS,
    )
    app.add_middleware(
        HttpAuthentication, authentication=authentication, max_header_bytes=gateway.config.max_header_bytes
    )
    app.add_middleware(HttpRecord, gateway=gateway)
    app.add_middleware(RequestIds)
    if gateway.config.cors_origins:  # outermost: browsers ask without credentials first
        app.add_middleware(
            CORSMiddleware,
            allow_origins=gateway.config.cors_origins,
            allow_methods=["GET", "HEAD", "POST", "DELETE"],
            allow_headers=["*"],
            allow_private_network=True,
            expose_headers=["x-request-id", IGNORED_HEADER, DROPPED_HEADER, TICKET_HEADER, "retry-after"],
        )
    bodies = BodyReader(gateway)
    started = int(time.time())

    def describe(name: str) -> Json:
        model = gateway.model()
        shown = {"id": name, "object": "model", "created": started, "owned_by": "baton"}
        defaults = MessageToDict(model.default_sampling, preserving_proto_field_name=True)
        return {**shown, "max_model_len": model.context_length, "default_sampling": defaults}

    @app.api_route("/v1/models", methods=READ)
    async def list_models() -> Json:
        model = gateway.model()
        names = [model.name, *(name for name in model.aliases if "*" not in name)]
        return {"object": "list", "data": [describe(name) for name in names]}

    @app.api_route("/v1/models/{name:path}", methods=READ)
    async def get_model(name: str) -> Json:
        check_model(name or "/", gateway.model())
        return describe(name)

    @app.post("/v1/completions")
    async def completions(request: Request) -> Response:
        body = await bodies.read_starts(request, CompletionRequest, completion_starts)
        async with running(gateway, body.made, request, body.request.grammar_field) as job:

            async def echo(prompt: int) -> str:
                return await _text(gateway, body.made[prompt])

            answer = CompletionAnswer(job, body.request, echo if body.request.echo else None)
            return await respond(job, answer, bool(body.request.stream), body.ignored, body.request.limit)

    @app.post("/v1/chat/completions")
    async def chat_completions(request: Request) -> Response:
        body = await bodies.read_starts(request, ChatRequest, lambda request: [chat_start(request)])
        chat = body.made[0].chat
        ignored = body.ignored | unread_arguments(gateway, chat) | unenforced(chat)
        grammar = grammar_field(body.made[0], body.request.grammar_field)
        async with running(gateway, body.made, request, grammar) as job:
            answer = ChatAnswer(job, body.request)
            return await respond(job, answer, bool(body.request.stream), ignored, body.request.limit)

    add_embeddings(app, gateway, bodies)
    add_scores(app, gateway, bodies)
    add_messages(app, gateway, bodies)
    add_responses(app, gateway, bodies)
    add_tokens(app, gateway, bodies)

    @app.api_route("/ping", methods=READ)  # SageMaker's name of it
    @app.api_route("/health", methods=READ)
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

    described: list[bytes] = []

    @app.api_route("/openapi.json", methods=READ)
    async def openapi() -> Response:
        if not described:  # takes a tenth of a second, once
            made = await asyncio.to_thread(document)
            described.append(json.dumps(made).encode())
        return Response(described[0], media_type="application/json")

    @app.api_route("/version", methods=READ)
    async def versions() -> Json:
        return {"version": version("baton-serve")}

    @app.api_route("/metrics", methods=READ)
    async def metrics() -> Response:
        text = exposition(gateway.metrics.registry, gateway.model_name)
        return Response(text, media_type=CONTENT_TYPE_LATEST)

    app.routes.append(traces_http.traces_route(gateway.traces))
    return app


async def _error(request: Request, error: Any) -> Response:
    if isinstance(error, BatonError):
        if error.recorded:
            setattr(request.state, BEGUN, True)
        error = openai_errors.from_baton(error, field_names(request.url.path))
    if isinstance(error, ApiError):
        setattr(request.state, REFUSAL, (error.code or "", error.param, error.message))
        return http_errors.response(error, request.url.path)
    if not isinstance(error, HTTPException):
        failed = ApiError(500, f"internal error: {type(error).__name__}")
        return http_errors.response(failed, request.url.path)
    message = f"{request.method[:20]} {request.url.path[:256]}: {str(error.detail).lower()}"
    if error.status_code == 404:
        message += "; /openapi.json lists what there is"
    answer = http_errors.response(ApiError(error.status_code, message), request.url.path)
    answer.headers.update(error.headers or {})
    return answer


_EXCEPTION_HANDLERS: dict[int | type[Exception], Any] = dict.fromkeys(
    (ApiError, BatonError, HTTPException, Exception), _error
)


async def _text(gateway: Gateway, start: inference_pb2.GenerateStart) -> str:
    """A prompt's text."""
    if start.WhichOneof("prompt") == "text":
        return str(start.text)
    return await gateway.tokenizer.decode(start.tokens.token_ids, ECHO_SECONDS)
