"""/v1/messages and /v1/messages/count_tokens of the Anthropic API: answers, events and errors in its form."""

from __future__ import annotations

import json
from typing import Any

from fastapi import FastAPI, Request, Response
from fastapi.responses import JSONResponse

from baton.api.anthropic_protocol import CountRequest, MessagesRequest, count_start, messages_start
from baton.api.field_names import ANTHROPIC
from baton.api.http_errors import anthropic_body
from baton.api.http_requests import (
    BodyReader,
    grammar_field,
    name_dropped,
    name_ignored,
    running,
    unread_arguments,
)
from baton.api.openai_answers import RequestBatch
from baton.api.openai_errors import ApiError
from baton.api.openai_fields import Json
from baton.api.typed_events import TypedAnswer, respond
from baton.api.usage_details import baton_usage
from baton.gateway.chat_tokens import encode_chat
from baton.gateway.gateway import Gateway
from baton.gateway.recorded_calls import recorded_call
from baton.gateway.tool_grammars import unenforced
from baton.v1 import common_pb2, inference_pb2, tokenizer_pb2

_FIELDS = {
    "reasoning_effort": "output_config.effort",
    "chat_template_kwargs.enable_thinking": "thinking",
}
"""Request fields of chat template variables, for hints when the template does not read them."""
_STOP = {
    common_pb2.FINISH_REASON_STOP: "end_turn",
    common_pb2.FINISH_REASON_LENGTH: "max_tokens",
    common_pb2.FINISH_REASON_TOOL_CALLS: "tool_use",
}


def add_messages(app: FastAPI, gateway: Gateway, bodies: BodyReader) -> None:
    """Adds the routes."""

    def start(body: MessagesRequest) -> list[inference_pb2.GenerateStart]:
        made = messages_start(body)
        made.clamp_max_tokens = gateway.config.clamp_max_tokens is not False
        return [made]

    @app.post("/v1/messages")
    async def messages(request: Request) -> Response:
        body = await bodies.read_starts(request, MessagesRequest, start)
        chat = body.made[0].chat
        unread = unread_arguments(gateway, chat)
        ignored = body.ignored | {_FIELDS.get(name, name) for name in unread} | unenforced(chat)
        grammar = grammar_field(body.made[0], ANTHROPIC.grammar)
        async with running(gateway, body.made, request, grammar) as job:
            made = MessagesAnswer(job, body.request.model)
            response = await respond(job, made, bool(body.request.stream), ignored, "max_tokens")
            return name_dropped(response, body.dropped, job.name)

    @app.post("/v1/messages/count_tokens")
    async def count_tokens(request: Request) -> Response:
        body = await bodies.read_starts(request, CountRequest, lambda body: [count_start(body)])
        api_key = request.state.api_key
        with recorded_call(gateway, api_key, "count_tokens", computes=False) as call:
            call.tokens = len(await encode_chat(gateway, body.made[0], api_key))
            api_key.check_prompt(call.tokens, "messages")
        response = name_ignored(JSONResponse({"input_tokens": call.tokens}), body.ignored)
        return name_dropped(response, body.dropped, call.name)


class MessagesAnswer(TypedAnswer):
    """Content blocks in order: thinking, text and tool_use as the model writes them."""

    PING = b'event: ping\ndata: {"type":"ping"}\n\n'

    def __init__(self, job: RequestBatch, model: str) -> None:
        self._message: Json = {
            "id": f"msg_{job.name}",
            "type": "message",
            "role": "assistant",
            "model": model,
            "content": [],
            "stop_reason": None,
            "stop_sequence": None,
            "stop_details": None,
            "container": None,
        }
        self._usage: Json = {
            "input_tokens": 0,
            "output_tokens": 0,
            "output_tokens_details": {"thinking_tokens": 0},
            "cache_creation": None,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": 0,
            "inference_geo": None,
            "server_tool_use": None,
            "service_tier": "standard",
        }
        self._job = job
        self._open = ""
        """Type of the block that grows; empty: none."""
        self._pieces: list[str] = []

    def opening(self) -> list[Json]:
        usage = {**self._usage, "input_tokens": self._job.prompt_tokens}  # 0 while they are not counted
        return [{"type": "message_start", "message": {**self._message, "content": [], "usage": usage}}]

    def add(self, delta: inference_pb2.Delta) -> list[Json]:
        events: list[Json] = []
        if delta.reasoning:
            events += self._grow("thinking", "thinking_delta", delta.reasoning)
        if delta.text:
            events += self._grow("text", "text_delta", delta.text)
        for call in delta.tool_calls:
            events += self._call(call)
        if delta.finish_reason:
            events += self._close()
            self._message["stop_reason"] = _STOP.get(delta.finish_reason, "end_turn")
            if delta.stop_matched and delta.finish_reason == common_pb2.FINISH_REASON_STOP:
                self._message["stop_reason"] = "stop_sequence"
                self._message["stop_sequence"] = delta.stop_matched
        return events

    def end(self, finished: inference_pb2.Finished) -> list[Json]:
        cached = finished.usage.cached_tokens
        self._usage["input_tokens"] = finished.usage.prompt_tokens - cached
        self._usage["cache_read_input_tokens"] = cached
        self._usage["output_tokens"] = finished.usage.output_tokens
        self._usage["output_tokens_details"] = {"thinking_tokens": finished.usage.reasoning_tokens}
        self._usage |= baton_usage(finished.usage)
        delta = {key: self._message[key] for key in ("stop_reason", "stop_sequence")}
        return [{"type": "message_delta", "delta": delta, "usage": {**self._usage}}, {"type": "message_stop"}]

    def fail(self, error: ApiError) -> list[Json]:
        return [anthropic_body(error)]

    def whole(self) -> Json:
        return {**self._message, "usage": self._usage}

    @property
    def _index(self) -> int:
        return len(self._message["content"]) - 1

    def _start(self, block: Json) -> Json:
        self._message["content"].append(block)
        return {"type": "content_block_start", "index": self._index, "content_block": {**block}}

    def _grow(self, kind: str, delta: str, text: str) -> list[Json]:
        events: list[Json] = []
        if self._open != kind:
            events += self._close()
            more: Json = {"signature": ""} if kind == "thinking" else {"citations": []}
            events.append(self._start({"type": kind, kind: "", **more}))
            self._open = kind
        self._pieces.append(text)
        grown = {"type": delta, kind: text}
        events.append({"type": "content_block_delta", "index": self._index, "delta": grown})
        return events

    def _call(self, call: tokenizer_pb2.ToolCall) -> list[Json]:
        events = self._close()
        arguments = call.arguments or "{}"
        block: Json = {"type": "tool_use", "id": call.id, "name": call.name, "input": {}}
        block["caller"] = {"type": "direct"}
        events.append(self._start(block))
        block["input"] = _arguments(arguments)
        grown = {"type": "input_json_delta", "partial_json": arguments}
        events.append({"type": "content_block_delta", "index": self._index, "delta": grown})
        events.append({"type": "content_block_stop", "index": self._index})
        return events

    def _close(self) -> list[Json]:
        """Ends the block that grows."""
        if not self._open:
            return []
        block = self._message["content"][-1]
        block[self._open] = "".join(self._pieces)
        self._open, self._pieces = "", []
        return [{"type": "content_block_stop", "index": self._index}]


def _arguments(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return {}  # the parsers of tool calls let nothing else through
