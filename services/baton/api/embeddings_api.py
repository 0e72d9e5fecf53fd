"""/v1/embeddings of the OpenAI API."""

from __future__ import annotations

import asyncio
import base64
import json
import sys
from array import array
from collections.abc import AsyncIterator, Coroutine, Mapping
from typing import Any, ClassVar, Literal, TypeVar

from fastapi import FastAPI, Request, Response
from fastapi.responses import StreamingResponse
from starlette.types import Receive

from baton.api.http_requests import BodyReader, name_ignored
from baton.api.openai_errors import ApiError, invalid_value
from baton.api.openai_fields import Elements, Int32, Strict, TokenId
from baton.gateway.admission import check_embed
from baton.gateway.embeddings import embed
from baton.gateway.gateway import Gateway
from baton.v1 import embed_pb2, inference_pb2

T = TypeVar("T")
_POOLING = {"last": embed_pb2.POOLING_LAST, "mean": embed_pb2.POOLING_MEAN}


class EmbeddingsRequest(Strict):
    """POST /v1/embeddings."""

    HINTS: ClassVar[Mapping[str, str]] = {"user": "names the caller's own user"}

    model: str
    input: str | Elements[str] | Elements[TokenId] | Elements[Elements[TokenId]]
    encoding_format: Literal["float", "base64"] = "float"
    dimensions: Int32 | None = None
    # Beyond OpenAI's.
    pooling: Literal["last", "mean"] | None = None
    normalize: bool | None = None
    priority: Int32 | None = None
    cache_salt: str | None = None


def add_embeddings(app: FastAPI, gateway: Gateway, bodies: BodyReader) -> None:
    """Adds the route."""

    @app.post("/v1/embeddings")
    async def embeddings(request: Request) -> Response:
        def checked(body: EmbeddingsRequest) -> inference_pb2.EmbedRequest:
            made = embed_request(body)
            check_embed(made, gateway.config, gateway.model_or_last())
            return made

        body = await bodies.read(request, EmbeddingsRequest, checked)
        answer = await unless_disconnected(request.receive, embed(gateway, body.made, request.state.api_key))
        pieces = _pieces(answer, body.request.model, body.request.encoding_format == "base64")
        return name_ignored(StreamingResponse(pieces, media_type="application/json"), body.ignored)


def embed_request(body: EmbeddingsRequest) -> inference_pb2.EmbedRequest:
    """Raises ApiError."""
    if not body.model:
        raise invalid_value("model", "model is empty: name one of /v1/models")
    request = inference_pb2.EmbedRequest(model=body.model)
    if body.pooling is not None:
        request.pooling = _POOLING[body.pooling]
    texts = body.input
    if isinstance(texts, str):
        request.inputs.add(text=texts)
    elif texts and isinstance(texts[0], int):
        request.inputs.add().tokens.token_ids.extend(each for each in texts if isinstance(each, int))
    else:
        for each in texts:
            if isinstance(each, str):
                request.inputs.add(text=each)
            elif isinstance(each, list):
                request.inputs.add(tokens=inference_pb2.TokenPrompt(token_ids=each))
    if body.dimensions is not None:
        if body.dimensions < 1:
            raise invalid_value("dimensions", f"dimensions must be at least 1, not {body.dimensions}")
        request.dimensions = body.dimensions
    if body.normalize is not None:
        request.normalize = body.normalize
    if body.priority is not None:
        request.priority = body.priority
    request.namespace = body.cache_salt or ""
    return request


async def _pieces(answer: inference_pb2.EmbedResponse, model: str, packed: bool) -> AsyncIterator[bytes]:
    """The body. Thousands of numbers at a time: all of them at once would stop the event loop."""
    tokens = sum(each.prompt_tokens for each in answer.embeddings)
    usage = {"prompt_tokens": tokens, "total_tokens": tokens}
    head = json.dumps({"object": "list", "model": model, "usage": usage})
    yield head[:-1].encode() + b', "data": ['
    for index, each in enumerate(answer.embeddings):
        values = pack(each) if packed else list(each.values)
        item = json.dumps({"object": "embedding", "index": index, "embedding": values})
        yield b", " * bool(index) + item.encode()
        await asyncio.sleep(0)
    yield b"]}"


def pack(embedding: embed_pb2.Embedding) -> str:
    """Little-endian float32 in base64, as OpenAI's clients read it."""
    values = array("f", embedding.values)
    if sys.byteorder == "big":
        values.byteswap()
    return base64.b64encode(values.tobytes()).decode()


async def unless_disconnected(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """The result of `work`, which is cancelled when the client leaves. Raises ApiError (499) then."""
    task = asyncio.ensure_future(work)
    watch = asyncio.ensure_future(_disconnected(receive))
    try:
        await asyncio.wait({task, watch}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ApiError(499, "the client has gone")
        return task.result()
    finally:
        watch.cancel()
        task.cancel()
        await asyncio.wait({task})


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
