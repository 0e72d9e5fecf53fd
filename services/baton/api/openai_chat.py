"""/v1/chat/completions: its requests, and their conversion to baton.v1.Inference."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Discriminator, Field, Tag

from baton.api.images import IMAGE, PART, ChatImage, image_or_part, say
from baton.api.openai_errors import ApiError, invalid_value
from baton.api.openai_fields import Elements, Int32, Int64, Strict, call_arguments
from baton.api.openai_protocol import (
    COMMON_HINTS,
    OTHER_SERVERS,
    CommonRequest,
    common_sampling,
    common_start,
)
from baton.rpc.validate import check_sampling
from baton.v1 import common_pb2, inference_pb2, tokenizer_pb2

EFFORTS = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]
MAX_TEMPLATE_VALUES = 1024
"""In chat_template_kwargs; each takes fifty bytes and more on its way."""
MAX_TEMPLATE_DEPTH = 16
"""Protocol buffers may be nested a hundred levels deep, and each level here is two or three of those."""
_CACHE_CONTROL = {"cache_control": "every prompt finds what is cached of it"}
_TOOLS_INSTEAD = "is not supported: functions are called tools now, give tools"
_ANNOTATIONS = {
    "annotations": "is what an answer carried beside its text",
    "provider_specific_fields": "is a client's own note",
    "thinking_blocks": "is a client's own note",
    **_CACHE_CONTROL,
}
_REPLAYED = {
    **_ANNOTATIONS,
    "id": "is another server's name for the message",
    "parsed": "is the content once more",
    "reasoning_details": "is another server's form of the reasoning",
}
"""Fields of an answer that may come back as history."""


class JsonSchema(Strict):
    FIELD_PATH = "response_format.json_schema"
    HINTS: ClassVar[Mapping[str, str]] = {
        "name": "it names the schema for the client",
        "description": "the model does not see the schema: say in a message what it is for",
        "strict": "a schema is enforced in every case",
    }

    schema_: dict[str, Any] | bool = Field(default_factory=lambda: {"type": "object"}, alias="schema")


class ChatResponseFormat(Strict):
    FIELD_PATH = "response_format"

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None


class ContentPart(Strict):
    FIELD_PATH = "messages.content"
    HINTS = _ANNOTATIONS

    type: Literal["text", "refusal"]
    text: str | None = None
    refusal: str | None = None

    @property
    def said(self) -> str:
        return self.text or self.refusal or ""


ChatPart = Annotated[
    Annotated[ContentPart, Tag(PART)] | Annotated[ChatImage, Tag(IMAGE)], image_or_part("image_url")
]


class CalledFunction(Strict):
    FIELD_PATH = "messages.tool_calls.function"
    HINTS: ClassVar[Mapping[str, str]] = {"parsed_arguments": "are the arguments once more"}

    name: str
    arguments: Annotated[str, call_arguments("messages.tool_calls.function.arguments")] = ""


class CalledTool(Strict):
    FIELD_PATH = "messages.tool_calls"
    HINTS: ClassVar[Mapping[str, str]] = {
        "index": "the list has an order",
        "provider_specific_fields": _ANNOTATIONS["provider_specific_fields"],
        "extra_content": _ANNOTATIONS["provider_specific_fields"],
        **_CACHE_CONTROL,
    }

    id: str = ""
    type: Literal["function"] = "function"
    function: CalledFunction


class ChatMessage(Strict):
    FIELD_PATH = "messages"
    HINTS = _REPLAYED
    REFUSED: ClassVar[Mapping[str, str]] = {
        "audio": "is not supported: send text",
        "images": "is not supported: give them as parts of the content",
        "function_call": _TOOLS_INSTEAD,
    }

    role: str
    content: str | Elements[ChatPart] | None = None
    name: str | None = None
    refusal: str | None = None
    tool_calls: Elements[CalledTool] | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    """Another name of reasoning_content."""


class Function(Strict):
    FIELD_PATH = "tools.function"
    HINTS = _CACHE_CONTROL

    name: str
    description: str = ""
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class ChatTool(Strict):
    FIELD_PATH = "tools"
    HINTS = _CACHE_CONTROL

    type: Literal["function"]
    function: Function


class NamedFunction(Strict):
    name: str


class NamedChatTool(Strict):
    type: Literal["function"]
    function: NamedFunction


class Allowed(Strict):
    mode: Literal["auto", "required"]
    tools: Annotated[Elements[NamedChatTool], Field(min_length=1)]


class AllowedChatTools(Strict):
    """All tools are shown to the model, and it may call some of them."""

    type: Literal["allowed_tools"]
    allowed_tools: Allowed


def kind_of_choice(choice: Any) -> str:
    """The name of the branch of a union that a tool_choice is of."""
    if isinstance(choice, str):
        return "str"
    kind = choice.get("type") if isinstance(choice, dict) else getattr(choice, "type", "")
    return "AllowedTools" if kind == "allowed_tools" else "NamedTool"


ChatToolChoice = Annotated[
    Annotated[Literal["none", "auto", "required"], Tag("str")]
    | Annotated[NamedChatTool, Tag("NamedTool")]
    | Annotated[AllowedChatTools, Tag("AllowedTools")],
    Discriminator(kind_of_choice),
]


class ChatReasoning(Strict):
    FIELD_PATH = "reasoning"
    HINTS: ClassVar[Mapping[str, str]] = {
        "summary": "the reasoning itself is shown",
        "generate_summary": "the reasoning itself is shown",
    }

    effort: EFFORTS | None = None


class ChatRequest(CommonRequest):
    """POST /v1/chat/completions."""

    HINTS: ClassVar[Mapping[str, str]] = {
        **COMMON_HINTS,
        "verbosity": "no model here is trained for it: say it in a message",
        "prediction": "is to make an answer faster, not another one",
    }
    REFUSED: ClassVar[Mapping[str, str]] = {
        **OTHER_SERVERS,
        "functions": _TOOLS_INSTEAD,
        "function_call": "is not supported: give tool_choice",
        "audio": "is not supported: answers are text",
        "web_search_options": "is not supported: give a tool that searches",
        "chat_template": "is not supported: the model's own is used",
        "add_special_tokens": "is not supported: the template brings its own",
        "echo": "is not supported: an answer is what the model adds",
    }

    messages: Elements[ChatMessage]
    max_completion_tokens: Int64 | None = None
    logprobs: bool | None = None
    top_logprobs: Int32 | None = None
    response_format: ChatResponseFormat | None = None
    tools: Elements[ChatTool] | None = None
    tool_choice: ChatToolChoice | None = None
    parallel_tool_calls: bool | None = None
    reasoning_effort: EFFORTS | None = None
    modalities: Elements[Literal["text"]] | None = None
    # Beyond OpenAI's.
    chat_template_kwargs: dict[str, Any] | None = None
    enable_thinking: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool = False
    include_reasoning: Literal[True] | None = None
    separate_reasoning: Literal[True] | None = None
    reasoning: ChatReasoning | None = None

    @property
    def limit(self) -> str | None:
        return super().limit if self.max_completion_tokens is None else "max_completion_tokens"


def chat_start(request: ChatRequest) -> inference_pb2.GenerateStart:
    """Raises ApiError for what is not supported, BatonError for sampling parameters that are wrong."""
    sampling = common_sampling(request)
    limits = [each for each in (request.max_completion_tokens, request.max_tokens) if each is not None]
    if len(set(limits)) > 1:
        raise invalid_value("max_tokens", "max_tokens and max_completion_tokens are one: give one of them")
    if limits:
        sampling.max_tokens = limits[0]
    if request.top_logprobs and not request.logprobs:
        raise invalid_value("top_logprobs", "top_logprobs needs logprobs to be true")
    if request.logprobs:
        sampling.logprobs = request.top_logprobs or 0
    _constrain(request.response_format, sampling)
    check_sampling(sampling, None)
    start = common_start(request, sampling)
    chat = start.chat
    chat.SetInParent()
    add_messages(chat, request.messages)
    add_tools(chat, request.tools or ())
    set_end(chat, request.add_generation_prompt, request.continue_final_message)
    _choose(request, chat)
    _template_arguments(request, chat)
    return start


def _constrain(format: ChatResponseFormat | None, sampling: common_pb2.SamplingParams) -> None:
    """Over HTTP as over gRPC: the whole answer is of the format."""
    schema = format.json_schema if format is not None else None
    if format is None or format.type == "text":
        return
    if sampling.HasField("grammar"):
        text = "structured_outputs and response_format both say what the answer is: give one of them"
        raise invalid_value("structured_outputs", text)
    if format.type == "json_object":
        sampling.grammar.json_object.SetInParent()
    elif schema is None:
        param = "response_format.json_schema"
        raise ApiError(400, f"missing parameter: {param}", param, "missing_parameter")
    else:
        sampling.grammar.json_schema = json.dumps(schema.schema_, ensure_ascii=False)


def add_messages(chat: tokenizer_pb2.ChatPrompt, messages: Sequence[ChatMessage]) -> None:
    """Raises ApiError."""
    for index, message in enumerate(messages):
        if message.content is None and message.role in ("system", "developer", "user", "tool"):
            param = f"messages[{index}].content"
            raise ApiError(400, f"missing parameter: {param}", param, "missing_parameter")
        _fill(chat.messages.add(), message, f"messages[{index}]")


def _fill(made: tokenizer_pb2.ChatMessage, message: ChatMessage, field: str) -> None:
    if message.reasoning and message.reasoning_content not in (None, "", message.reasoning):
        text = f"{field}.reasoning and {field}.reasoning_content are one, and differ: give one of them"
        raise invalid_value(f"{field}.reasoning", text)
    made.role, made.name = message.role, message.name or ""
    made.tool_call_id = message.tool_call_id or ""
    made.reasoning = message.reasoning_content or message.reasoning or ""
    if isinstance(message.content, list):
        say(made, ((f"{field}.content[{index}]", part) for index, part in enumerate(message.content)))
    else:
        made.content = message.content if message.content is not None else message.refusal or ""
    for call in message.tool_calls or ():
        made.tool_calls.add(id=call.id, name=call.function.name, arguments=call.function.arguments)


def add_tools(chat: tokenizer_pb2.ChatPrompt, tools: Sequence[ChatTool]) -> None:
    for tool in tools:
        function = tool.function
        made = chat.tools.add(name=function.name, description=function.description)
        if function.parameters is not None:
            made.parameters = json.dumps(function.parameters, ensure_ascii=False)
        if function.strict is not None:
            made.strict = function.strict


def set_end(
    chat: tokenizer_pb2.ChatPrompt, add_generation_prompt: bool | None, continue_final_message: bool
) -> None:
    if add_generation_prompt is not None:
        chat.add_generation_prompt = add_generation_prompt
    chat.continue_final_message = continue_final_message


TOOL_MODES = {
    "none": tokenizer_pb2.ToolChoice.MODE_NONE,
    "auto": tokenizer_pb2.ToolChoice.MODE_AUTO,
    "required": tokenizer_pb2.ToolChoice.MODE_REQUIRED,
}


def _choose(request: ChatRequest, chat: tokenizer_pb2.ChatPrompt) -> None:
    choice = request.tool_choice
    if isinstance(choice, NamedChatTool):
        chat.tool_choice.mode = tokenizer_pb2.ToolChoice.MODE_REQUIRED
        chat.tool_choice.name = choice.function.name
    elif isinstance(choice, AllowedChatTools):
        chat.tool_choice.mode = TOOL_MODES[choice.allowed_tools.mode]
        chat.tool_choice.allowed.extend(tool.function.name for tool in choice.allowed_tools.tools)
    elif choice is not None:
        chat.tool_choice.mode = TOOL_MODES[choice]
    if request.parallel_tool_calls is not None:
        chat.parallel_tool_calls = request.parallel_tool_calls


def _template_arguments(request: ChatRequest, chat: tokenizer_pb2.ChatPrompt) -> None:
    """chat_template_kwargs win over the fields that stand for one of them."""
    arguments: dict[str, Any] = {}
    efforts = {request.reasoning_effort, request.reasoning and request.reasoning.effort} - {None}
    if len(efforts) > 1:
        text = "reasoning.effort and reasoning_effort are one, and differ: give one of them"
        raise invalid_value("reasoning.effort", text)
    for effort in efforts:
        arguments["reasoning_effort"] = effort
        if effort == "none":
            arguments["enable_thinking"] = False
    if request.enable_thinking is not None:
        arguments["enable_thinking"] = request.enable_thinking
    add_template_arguments(chat, arguments | (request.chat_template_kwargs or {}))


def add_template_arguments(chat: tokenizer_pb2.ChatPrompt, arguments: dict[str, Any]) -> None:
    """Raises ApiError if they are too many."""
    if _count(arguments, MAX_TEMPLATE_VALUES) > MAX_TEMPLATE_VALUES:
        text = f"chat_template_kwargs has more than {MAX_TEMPLATE_VALUES} values"
        raise invalid_value("chat_template_kwargs", text)
    if arguments:
        chat.template_arguments.update(arguments)


def _count(value: Any, limit: int, depth: int = 0) -> int:
    """Values in `value`; at most a few more than `limit`. Raises ApiError if it is nested too deeply."""
    if depth > MAX_TEMPLATE_DEPTH:
        text = f"chat_template_kwargs is nested more than {MAX_TEMPLATE_DEPTH} levels deep"
        raise invalid_value("chat_template_kwargs", text)
    if not isinstance(value, dict | list):
        return 1
    count = 0
    for each in value.values() if isinstance(value, dict) else value:
        count += _count(each, limit, depth + 1)
        if count > limit:
            break
    return count
