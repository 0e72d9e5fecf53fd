"""/tokenize and /detokenize, as vLLM's server has them: texts and conversations to token ids, and back."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

from fastapi import FastAPI, Request, Response
from fastapi.responses import JSONResponse

from baton.api.http_requests import BodyReader, name_ignored, to_json, unread_arguments
from baton.api.openai_chat import (
    ChatMessage,
    ChatTool,
    add_messages,
    add_template_arguments,
    add_tools,
    set_end,
)
from baton.api.openai_errors import invalid_value
from baton.api.openai_fields import Elements, Strict, TokenId
from baton.gateway.admission import check_model
from baton.gateway.chat_tokens import encode_chat
from baton.gateway.gateway import Gateway
from baton.gateway.recorded_calls import recorded_call
from baton.rpc.validate import check_token_ids
from baton.tokenizer.vocabulary import Vocabulary
from baton.v1 import inference_pb2, tokenizer_pb2

TOO_LONG = 8
"""Times the context: more token ids are not put together to a text."""
PIECE = 2**13
"""Tokens that are written at a time: the encoder of JSON lets no other thread run."""


class TokenizeRequest(Strict):
    """POST /tokenize: a prompt, or messages."""

    REFUSED: ClassVar[Mapping[str, str]] = {
        "chat_template": "is not supported: the model's own is used",
    }

    model: str = ""
    prompt: str | None = None
    messages: Elements[ChatMessage] | None = None
    tools: Elements[ChatTool] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    add_special_tokens: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    return_token_strs: bool = False


class DetokenizeRequest(Strict):
    """POST /detokenize."""

    model: str = ""
    tokens: Elements[TokenId]


def tokenize_start(body: TokenizeRequest) -> list[inference_pb2.GenerateStart]:
    """A request that is checked and never runs. Raises ApiError."""
    start = inference_pb2.GenerateStart(model=body.model)
    if (body.prompt is None) == (body.messages is None):
        raise invalid_value("prompt", "give one of prompt and messages")
    if body.messages is None:
        for name in ("tools", "add_generation_prompt", "continue_final_message", "chat_template_kwargs"):
            if getattr(body, name) is not None:
                raise invalid_value(name, f"{name} goes with messages only")
        start.text = body.prompt or ""
        return [start]
    chat = start.chat
    chat.SetInParent()
    add_messages(chat, body.messages)
    add_tools(chat, body.tools or ())
    add_template_arguments(chat, body.chat_template_kwargs or {})
    set_end(chat, body.add_generation_prompt, bool(body.continue_final_message))
    return [start]


def add_tokens(app: FastAPI, gateway: Gateway, bodies: BodyReader) -> None:
    """Adds the routes."""

    @app.post("/tokenize")
    async def tokenize(request: Request) -> Response:
        body = await bodies.read_starts(request, TokenizeRequest, tokenize_start)
        (start,), asked = body.made, body.request
        special, api_key = asked.add_special_tokens, request.state.api_key
        with recorded_call(gateway, api_key, "tokenize", computes=False) as call:
            token_ids: Sequence[int]
            if start.WhichOneof("prompt") == "text":
                encode_input = tokenizer_pb2.EncodeInput(text=start.text)
                if special is not None:
                    encode_input.add_special_tokens = special
                token_ids = (
                    await gateway.tokenizer.encode(encode_input, gateway.config.request_seconds)
                ).token_ids
            else:
                token_ids = await encode_chat(gateway, start, api_key, special)
            call.tokens = len(token_ids)
            vocabulary = None
            if asked.return_token_strs:
                vocabulary = await gateway.tokenizer.ready(gateway.config.request_seconds)
            most = gateway.model().context_length
            # In a thread: a prompt may have millions of tokens.
            answer = await asyncio.to_thread(_answer, token_ids, most, vocabulary)
        response = Response(answer, media_type="application/json")
        return name_ignored(response, body.ignored | unread_arguments(gateway, start.chat))

    @app.post("/detokenize")
    async def detokenize(request: Request) -> Response:
        def checked(body: DetokenizeRequest) -> list[int]:
            model = gateway.model_or_last()
            if model is not None:
                check_model(body.model, model)
                most = TOO_LONG * model.context_length
                if len(body.tokens) > most:
                    text = f"tokens has {len(body.tokens)} token ids; {most} are allowed"
                    raise invalid_value("tokens", text)
                check_token_ids(body.tokens, model.vocab_size, "tokens")
            return body.tokens

        body = await bodies.read(request, DetokenizeRequest, checked)
        with recorded_call(gateway, request.state.api_key, "detokenize", computes=False) as call:
            call.tokens = len(body.made)
            text = await gateway.tokenizer.decode(
                body.made, gateway.config.request_seconds, skip_special_tokens=False
            )
        return JSONResponse({"prompt": text})


def _answer(ids: Sequence[int], max_model_len: int, vocabulary: Vocabulary | None) -> bytes:
    """Answer of /tokenize, as JSON. vocabulary: for the texts of the tokens, where they are asked for."""

    def written(value: Callable[[int], int | str]) -> bytes:
        pieces = (ids[first : first + PIECE] for first in range(0, len(ids), PIECE))
        texts = (to_json([value(id) for id in piece])[1:-1] for piece in pieces)
        return b"[%b]" % b",".join(texts)

    texts = b"null"
    if vocabulary is not None:
        bytes_of = vocabulary.bytes_of
        texts = written(lambda id: bytes_of(id).decode("utf-8", "replace"))
    head = b'"count":%d,"max_model_len":%d' % (len(ids), max_model_len)
    return b'{%b,"tokens":%b,"token_strs":%b}' % (head, written(int), texts)
