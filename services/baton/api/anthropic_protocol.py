"""/v1/messages of the Anthropic API: its requests, and their conversion to baton.v1.Inference."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Discriminator, Field, Tag

from baton.api.anthropic_blocks import (
    CACHE,
    ContentBlock,
    LeftOutBlock,
    Said,
    TextBlock,
    Thinking,
    ToolResult,
    ToolUse,
    block_pieces,
    pieces,
    said,
)
from baton.api.images import Saying, say
from baton.api.openai_chat import EFFORTS
from baton.api.openai_errors import invalid_value
from baton.api.openai_fields import DroppedTool, Elements, Int64, Strict, TopK
from baton.rpc.validate import check_sampling
from baton.v1 import common_pb2, inference_pb2, tokenizer_pb2


class AnthropicMessage(Strict):
    FIELD_PATH = "messages"

    role: Literal["user", "assistant", "system"]
    content: str | Elements[ContentBlock]


class AnthropicTool(Strict):
    FIELD_PATH = "tools"
    HINTS: ClassVar[Mapping[str, str]] = {
        **CACHE,
        "eager_input_streaming": "calls come whole",
        "input_examples": "the schema says what fits",
        "defer_loading": "all tools are shown to the model",
        "allowed_callers": "the model calls them",
    }

    type: Literal["custom"] | None = None
    name: str
    description: str = ""
    input_schema: dict[str, Any]
    strict: bool | None = None


def _tool_kind(value: Any) -> str:
    kind = value.get("type") if isinstance(value, dict) else getattr(value, "type", None)
    return "custom" if kind in (None, "custom") else "other"


AnyTool = Annotated[
    Annotated[AnthropicTool, Tag("custom")] | Annotated[DroppedTool, Tag("other")], Discriminator(_tool_kind)
]


class AnthropicToolChoice(Strict):
    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class ThinkingChoice(Strict):
    FIELD_PATH = "thinking"
    HINTS: ClassVar[Mapping[str, str]] = {
        "budget_tokens": "max_tokens bounds thinking and answer together",
        "display": "thinking is shown",
    }

    type: Literal["enabled", "disabled", "adaptive"]


class OutputFormat(Strict):
    FIELD_PATH = "output_config.format"

    type: Literal["json_schema"]
    schema_: dict[str, Any] = Field(alias="schema")


class OutputConfig(Strict):
    FIELD_PATH = "output_config"

    effort: EFFORTS | None = None
    format: OutputFormat | None = None


class CountRequest(Strict):
    """POST /v1/messages/count_tokens, and what /v1/messages has in common with it."""

    HINTS: ClassVar[Mapping[str, str]] = {
        "metadata": "is for the caller's own records",
        "service_tier": "there is one",
        "speed": "there is one",
        "inference_geo": "requests stay where the gateway is",
        "context_management": "the client keeps its context",
        **CACHE,
    }
    REFUSED: ClassVar[Mapping[str, str]] = {
        "container": "is not supported: there are no containers",
        "mcp_servers": "is not supported: give the tools themselves",
    }

    model: str
    messages: Elements[AnthropicMessage]
    system: str | Elements[TextBlock] | None = None
    tools: Elements[AnyTool] | None = None
    tool_choice: AnthropicToolChoice | None = None
    thinking: ThinkingChoice | None = None
    output_config: OutputConfig | None = None
    output_format: OutputFormat | None = None
    """An older name of output_config.format."""

    @property
    def format(self) -> OutputFormat | None:
        """Raises ApiError if it is given by both names."""
        newer = self.output_config.format if self.output_config is not None else None
        if newer is not None and self.output_format is not None:
            text = "output_format is another name of output_config.format: give one of them"
            raise invalid_value("output_format", text)
        return newer or self.output_format


class MessagesRequest(CountRequest):
    """POST /v1/messages."""

    max_tokens: Int64
    stream: bool | None = None
    stop_sequences: Elements[str] | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: TopK | None = None


_MODES = {
    "auto": tokenizer_pb2.ToolChoice.MODE_AUTO,
    "any": tokenizer_pb2.ToolChoice.MODE_REQUIRED,
    "tool": tokenizer_pb2.ToolChoice.MODE_REQUIRED,
    "none": tokenizer_pb2.ToolChoice.MODE_NONE,
}


def count_start(request: CountRequest) -> inference_pb2.GenerateStart:
    """A request that is checked and never runs. Raises ApiError, BatonError."""
    sampling = common_pb2.SamplingParams()
    _set_format(request, sampling)
    check_sampling(sampling, None)
    start = inference_pb2.GenerateStart(model=request.model)
    _fill(start.chat, request)
    return start


def messages_start(request: MessagesRequest) -> inference_pb2.GenerateStart:
    """Raises ApiError for what is not supported, BatonError for sampling parameters that are wrong."""
    start = inference_pb2.GenerateStart(id="http", model=request.model, include_token_ids=False)
    sampling = start.sampling
    sampling.max_tokens = request.max_tokens
    for name in ("temperature", "top_p", "top_k"):
        value = getattr(request, name)
        if value is not None:
            setattr(sampling, name, value)
    sampling.stop.extend(request.stop_sequences or [])
    _set_format(request, sampling)
    check_sampling(sampling, None)
    _fill(start.chat, request)
    if request.messages[-1].role == "assistant" and not start.chat.continue_final_message:
        text = "messages: the last one is the assistant's, and has no text to go on with, or calls a tool"
        raise invalid_value("messages", text)
    return start


def _set_format(request: CountRequest, sampling: common_pb2.SamplingParams) -> None:
    """Raises ApiError."""
    if request.format is not None:
        sampling.grammar.json_schema = json.dumps(request.format.schema_, ensure_ascii=False)


def _fill(chat: tokenizer_pb2.ChatPrompt, request: CountRequest) -> None:
    """Raises ApiError."""
    if not request.model:
        raise invalid_value("model", "model is empty: name one of /v1/models")
    if not request.messages:
        raise invalid_value("messages", "messages is empty: give at least one")
    if request.system:
        chat.messages.add(role="system", content=said(request.system))
    for index, message in enumerate(request.messages):
        _add_message(chat, message, f"messages[{index}]")
    last = chat.messages[-1]
    chat.continue_final_message = (
        last.role == "assistant" and bool(last.content.strip()) and not last.tool_calls
    )
    for tool in request.tools or ():
        if isinstance(tool, DroppedTool):
            continue
        made = chat.tools.add(name=tool.name, description=tool.description)
        made.parameters = json.dumps(tool.input_schema, ensure_ascii=False)
        if tool.strict is not None:
            made.strict = tool.strict
    choice = request.tool_choice
    if choice is not None:
        if (choice.type == "tool") != bool(choice.name):
            raise invalid_value("tool_choice.name", "tool_choice.name goes with type tool, and only with it")
        chat.tool_choice.mode = _MODES[choice.type]
        chat.tool_choice.name = choice.name or ""
        if choice.disable_parallel_tool_use is not None:
            chat.parallel_tool_calls = not choice.disable_parallel_tool_use
    if request.thinking is not None:
        chat.template_arguments.update({"enable_thinking": request.thinking.type != "disabled"})
    if request.output_config is not None and request.output_config.effort is not None:
        chat.template_arguments.update({"reasoning_effort": request.output_config.effort})


def _add_message(chat: tokenizer_pb2.ChatPrompt, message: AnthropicMessage, field: str) -> None:
    """One message of the API may be several here: each tool result is one of its own."""
    if isinstance(message.content, str):
        chat.messages.add(role=message.role, content=message.content)
        return
    spoken: list[tuple[str, Saying]] = []
    calls: list[ToolUse] = []
    thoughts: list[str] = []
    for index, block in enumerate(message.content):
        path = f"{field}.content[{index}]"
        if isinstance(block, ToolResult):
            if message.role != "user":
                raise invalid_value(path, f"{path}: a tool_result is of the user")
            result = chat.messages.add(role="tool", tool_call_id=block.tool_use_id)
            say(result, pieces(block.content, path))
        elif isinstance(block, Said):
            spoken += block_pieces(block, path)
        elif isinstance(block, LeftOutBlock):
            continue
        elif message.role != "assistant":
            raise invalid_value(path, f"{path}: {block.type} is of the assistant")
        elif isinstance(block, ToolUse):
            calls.append(block)
        elif isinstance(block, Thinking):
            thoughts.append(block.thinking)
    made = chat.messages.add(role=message.role, reasoning="".join(thoughts))
    say(made, spoken)
    for call in calls:
        arguments = json.dumps(call.input, ensure_ascii=False)
        made.tool_calls.add(id=call.id, name=call.name, arguments=arguments)
    results = any(isinstance(block, ToolResult) for block in message.content)
    if results and not (made.content or made.parts or made.tool_calls or made.reasoning):
        del chat.messages[-1]
