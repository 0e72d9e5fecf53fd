"""Answers of /v1/responses: output items in order, whole or as typed events."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from baton.api.openai_errors import CONTEXT_CODE, ApiError, said
from baton.api.openai_fields import DroppedTool, Json
from baton.api.responses_protocol import ResponsesRequest
from baton.api.responses_tools import CustomTool, FunctionTool, Namespace, function_item
from baton.api.typed_events import TypedAnswer
from baton.api.usage_details import baton_usage
from baton.v1 import common_pb2, inference_pb2, tokenizer_pb2

_CODES = {429: "rate_limit_exceeded"}
"""Codes of failures in a stream, by HTTP status: clients know by them what to do."""
CANCELLED = 499
"""HTTP status of requests that were cancelled."""


@dataclass(frozen=True, slots=True)
class Growing:
    """An item that grows by text, in one part, and how its events are called."""

    item: str
    id: str
    """What its id begins with."""
    holder: str
    """The field of the item that has the part."""
    part: str
    """Type of the part."""
    event: str
    """Event type of its text."""
    part_event: str
    index: str
    more: Json = field(default_factory=dict)
    """In the events of its text."""


MESSAGE = Growing(
    item="message",
    id="msg",
    holder="content",
    part="output_text",
    event="response.output_text",
    part_event="response.content_part",
    index="content_index",
    more={"logprobs": []},
)
REASONING = Growing(
    item="reasoning",
    id="rs",
    holder="content",
    part="reasoning_text",
    event="response.reasoning_text",
    part_event="response.content_part",
    index="content_index",
)
SUMMARY = Growing(
    item="reasoning",
    id="rs",
    holder="summary",
    part="summary_text",
    event="response.reasoning_summary_text",
    part_event="response.reasoning_summary_part",
    index="summary_index",
)


class ResponseAnswer(TypedAnswer):
    """`keep` is called with the response and the assistant's message, once the response is complete; with
    None for the message, if it fails after its stream has begun."""

    NUMBERED = True

    def __init__(
        self,
        request: ResponsesRequest,
        id: str,
        keep: Callable[[Json, tokenizer_pb2.ChatMessage | None], None],
    ) -> None:
        self._response = _head(request, id)
        self._output: list[Json] = self._response["output"]
        self._keep = keep
        self._tools = {each.shown: each for each in request.offered}
        self._message = tokenizer_pb2.ChatMessage(role="assistant")
        self._reasoning = REASONING if request.summary is None else SUMMARY
        self._open: Growing | None = None
        """The item that grows, the last one."""
        self._pieces: list[str] = []
        self._name = id.removeprefix("resp_")
        self._finish = common_pb2.FINISH_REASON_UNSPECIFIED

    def opening(self) -> list[Json]:
        return [self._of_response("response.created"), self._of_response("response.in_progress")]

    def add(self, delta: inference_pb2.Delta) -> list[Json]:
        events: list[Json] = []
        if delta.reasoning:
            events += self._grow(self._reasoning, delta.reasoning)
        if delta.text:
            events += self._grow(MESSAGE, delta.text)
        for call in delta.tool_calls:
            events += self._close("completed") + self._call(call)
        if delta.finish_reason:
            self._finish = delta.finish_reason
            cut = delta.finish_reason == common_pb2.FINISH_REASON_LENGTH
            events += self._close("incomplete" if cut else "completed")
        return events

    def end(self, finished: inference_pb2.Finished) -> list[Json]:
        response = self._response
        response["usage"] = usage_of(finished)
        response["status"] = "completed"
        if self._finish == common_pb2.FINISH_REASON_LENGTH:
            response["status"] = "incomplete"
            response["incomplete_details"] = {"reason": "max_output_tokens"}
        else:
            response["completed_at"] = int(time.time())
        self._keep(response, self._message)
        return [self._of_response(f"response.{response['status']}")]

    def fail(self, error: ApiError) -> list[Json]:
        self._response["status"] = "cancelled" if error.status == CANCELLED else "failed"
        code = _CODES.get(error.status, "server_error")
        if error.code == CONTEXT_CODE:
            code = CONTEXT_CODE
        self._response["error"] = {"code": code, "message": said(error)}
        events = self._close("incomplete")
        self._keep(self._response, None)
        return [*events, self._of_response("response.failed")]

    def whole(self) -> Json:
        return self._response

    def _event(self, kind: str, **fields: Any) -> Json:
        return {"type": kind, **fields}

    def _of_response(self, kind: str) -> Json:
        response = {**self._response, "output": [*self._output]}
        return self._event(kind, response=response)

    @property
    def _index(self) -> int:
        return len(self._output) - 1

    def _add_item(self, item: Json, **shown: Any) -> Json:
        """shown: what of the item differs in the event."""
        self._output.append(item)
        return self._event("response.output_item.added", output_index=self._index, item={**item, **shown})

    def _indexes(self, kind: Growing) -> Json:
        return {"item_id": self._output[-1]["id"], "output_index": self._index, kind.index: 0}

    def _grow(self, kind: Growing, text: str) -> list[Json]:
        events: list[Json] = []
        if self._open is not kind:
            events += self._close("completed")
            self._open = kind
            more: Json = {"role": "assistant"} if kind is MESSAGE else {"summary": []}
            item: Json = {"type": kind.item, "id": f"{kind.id}_{self._name}_{len(self._output)}"}
            item |= {"status": "in_progress", **more, kind.holder: []}
            events.append(self._add_item(item))
            part = _part(kind, "")
            events.append(self._event(f"{kind.part_event}.added", **self._indexes(kind), part=part))
        self._pieces.append(text)
        events.append(self._event(f"{kind.event}.delta", **self._indexes(kind), delta=text, **kind.more))
        return events

    def _close(self, status: str) -> list[Json]:
        """Ends the item that grows."""
        if self._open is None:
            return []
        kind, text = self._open, "".join(self._pieces)
        if kind is MESSAGE:
            self._message.content += text
        else:
            self._message.reasoning += text
        self._open, self._pieces = None, []
        item, part = self._output[-1], _part(kind, text)
        item["status"], item[kind.holder] = status, [part]
        return [
            self._event(f"{kind.event}.done", **self._indexes(kind), text=text, **kind.more),
            self._event(f"{kind.part_event}.done", **self._indexes(kind), part=part),
            self._event("response.output_item.done", output_index=self._index, item={**item}),
        ]

    def _call(self, call: tokenizer_pb2.ToolCall) -> list[Json]:
        self._message.tool_calls.append(call)
        offered = self._tools.get(call.name)
        item = offered.item(call) if offered is not None else function_item(call)
        custom = item["type"] == "custom_tool_call"
        item |= {"id": f"{'ctc' if custom else 'fc'}_{self._name}_{len(self._output)}", "status": "completed"}
        written = "input" if custom else "arguments"
        events = [self._add_item(item, **{written: ""}, status="in_progress")]
        indexes = {"item_id": item["id"], "output_index": self._index}
        kind = "response.custom_tool_call_input" if custom else "response.function_call_arguments"
        text = item[written]
        done = {written: text} if custom else {"name": item["name"], written: text}
        events.append(self._event(f"{kind}.delta", **indexes, delta=text))
        events.append(self._event(f"{kind}.done", **indexes, **done))
        events.append(self._event("response.output_item.done", output_index=self._index, item={**item}))
        return events


def usage_of(finished: inference_pb2.Finished) -> Json:
    usage = finished.usage
    return {
        "input_tokens": usage.prompt_tokens,
        "input_tokens_details": {"cached_tokens": usage.cached_tokens},
        "output_tokens": usage.output_tokens,
        "output_tokens_details": {"reasoning_tokens": usage.reasoning_tokens},
        "total_tokens": usage.prompt_tokens + usage.output_tokens,
        **baton_usage(usage),
    }


def _part(kind: Growing, text: str) -> Json:
    part: Json = {"type": kind.part, "text": text}
    return part | {"annotations": [], "logprobs": []} if kind is MESSAGE else part


def _shown(tool: FunctionTool | CustomTool | Namespace) -> Json:
    return tool.model_dump(exclude_none=not isinstance(tool, FunctionTool))


def _head(request: ResponsesRequest, id: str) -> Json:
    fields = request.model_dump(
        include={"instructions", "previous_response_id", "max_output_tokens"}, exclude_none=False
    )
    format = request.text.format if request.text is not None else None
    shown: Json = {"type": "text"}
    if format is not None:
        shown = {"type": format.type}
        if format.schema_ is not None:
            shown |= {"name": "schema", "schema": format.schema_, "strict": True, "description": None}
    choice: Any = request.tool_choice or "auto"
    if not isinstance(choice, str):
        choice = choice.model_dump(exclude_none=True)
    effort = request.reasoning.effort if request.reasoning is not None else None
    return {
        "id": id,
        "object": "response",
        "created_at": int(time.time()),
        "completed_at": None,
        "status": "in_progress",
        "background": False,
        "error": None,
        "incomplete_details": None,
        **fields,
        "model": request.model,
        "output": [],
        "parallel_tool_calls": request.parallel_tool_calls is not False,
        "reasoning": {"effort": effort, "summary": request.summary},
        "store": request.store is not False,
        "temperature": 1.0 if request.temperature is None else request.temperature,
        "top_p": 1.0 if request.top_p is None else request.top_p,
        "presence_penalty": request.presence_penalty or 0.0,
        "frequency_penalty": request.frequency_penalty or 0.0,
        "top_logprobs": 0,
        "text": {"format": shown},
        "tool_choice": choice,
        "tools": [_shown(tool) for tool in request.tools or () if not isinstance(tool, DroppedTool)],
        "max_tool_calls": None,
        "truncation": "disabled",
        "usage": None,
        "user": None,
        "safety_identifier": None,
        "prompt_cache_key": None,
        "service_tier": "default",
        "metadata": request.metadata or {},
    }
