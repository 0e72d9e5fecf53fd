"""/v1/responses of the OpenAI API: its requests, and their conversion to baton.v1.Inference."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from functools import cached_property
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Discriminator, Field, Tag

from baton.api.openai_chat import TOOL_MODES, ChatReasoning, kind_of_choice
from baton.api.openai_errors import ApiError, invalid_value
from baton.api.openai_fields import Elements, Int64, Strict, TopK
from baton.api.responses_items import InputItem, ReasoningItem, ToolsItem, input_messages
from baton.api.responses_tools import OfferedTool, ResponsesTool, offered, shown_name
from baton.rpc.validate import check_sampling
from baton.v1 import inference_pb2, tokenizer_pb2

MAX_METADATA = 16
SUMMARIES = Literal["auto", "concise", "detailed"]


class TextFormat(Strict):
    FIELD_PATH = "text.format"
    HINTS: ClassVar[Mapping[str, str]] = {
        "name": "names the schema",
        "description": "is about the schema: say it in a message",
        "strict": "every schema is enforced",
    }

    type: Literal["text", "json_object", "json_schema"]
    schema_: dict[str, Any] | None = Field(default=None, alias="schema")


class TextOptions(Strict):
    FIELD_PATH = "text"
    HINTS: ClassVar[Mapping[str, str]] = {"verbosity": "no model here is trained for it: say it in a message"}

    format: TextFormat | None = None


class NamedResponsesTool(Strict):
    type: Literal["function", "custom"]
    name: str
    namespace: str | None = None


class AllowedResponsesTools(Strict):
    """All tools are shown to the model, and it may call some of them."""

    type: Literal["allowed_tools"]
    mode: Literal["auto", "required"]
    tools: Elements[dict[str, Any]]

    @property
    def names(self) -> list[str]:
        """Names of the tools that the model knows; what clients do not run is left out."""
        return [
            shown_name(str(tool.get("name", "")), str(tool.get("namespace") or ""))
            for tool in self.tools
            if tool.get("type") in ("function", "custom")
        ]


ResponsesToolChoice = Annotated[
    Annotated[Literal["none", "auto", "required"], Tag("str")]
    | Annotated[NamedResponsesTool, Tag("NamedTool")]
    | Annotated[AllowedResponsesTools, Tag("AllowedTools")],
    Discriminator(kind_of_choice),
]


class ReasoningOptions(ChatReasoning):
    """Beside the effort, whether the reasoning is given as a summary. It is the whole reasoning, whichever
    length is asked for: nothing here shortens it."""

    HINTS: ClassVar[Mapping[str, str]] = {}

    summary: SUMMARIES | None = None
    generate_summary: SUMMARIES | None = None
    """An older name of summary."""


class ConversationRequest(Strict):
    """What requests about a conversation have in common."""

    model: str
    input: str | Elements[InputItem] = ""
    instructions: str | None = None
    previous_response_id: str | None = None


class ResponsesRequest(ConversationRequest):
    """POST /v1/responses."""

    HINTS: ClassVar[Mapping[str, str]] = {
        "user": "names the caller's own user",
        "safety_identifier": "names the caller's own user",
        "service_tier": "there is one",
        "prompt_cache_key": "every prompt finds what is cached of it",
        "prompt_cache_retention": "pages are kept as long as there is room",
        "include": "what there is, is included",
        "stream_options": "answers are not padded",
        "client_metadata": "is the client's own record",
        "truncation": "a prompt that is too long is refused",
        "max_tool_calls": "is of tools that run here: there are none",
    }
    REFUSED: ClassVar[Mapping[str, str]] = {
        "background": "is not supported: stream the answer",
        "conversation": "is not supported: give previous_response_id, or the items",
        "prompt": "is not supported: give input and instructions",
    }

    store: bool | None = None
    stream: bool | None = None
    max_output_tokens: Int64 | None = None
    temperature: float | None = None
    top_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    top_logprobs: Literal[0] | None = None
    tools: Elements[ResponsesTool] | None = None
    tool_choice: ResponsesToolChoice | None = None
    parallel_tool_calls: bool | None = None
    text: TextOptions | None = None
    reasoning: ReasoningOptions | None = None
    metadata: dict[str, str] | None = None
    # Beyond OpenAI's.
    top_k: TopK | None = None

    @cached_property
    def offered(self) -> list[OfferedTool]:
        """The tools that the model is shown; those that items of the input have brought come last."""
        found = list(offered(self.tools or ()))
        names = {each.shown for each in found}
        for item in self.input if isinstance(self.input, list) else ():
            if isinstance(item, ToolsItem):
                more = [each for each in offered(item.tools) if each.shown not in names]
                found += more
                names |= {each.shown for each in more}
        return found

    @property
    def summary(self) -> str | None:
        """What length of summary is asked for; None: the reasoning is content. Raises ApiError."""
        asked = self.reasoning
        if asked is None:
            return None
        if asked.summary and asked.generate_summary not in (None, asked.summary):
            text = "reasoning.generate_summary and reasoning.summary are one, and differ: give one of them"
            raise invalid_value("reasoning.generate_summary", text)
        return asked.summary or asked.generate_summary

    @property
    def has_unread_summary(self) -> bool:
        """Reasoning came with a summary, which is left out beside its text."""
        items = self.input if isinstance(self.input, list) else ()
        return any(isinstance(item, ReasoningItem) and bool(item.content and item.summary) for item in items)


def response_start(
    request: ResponsesRequest, earlier: Iterable[tokenizer_pb2.ChatMessage]
) -> inference_pb2.GenerateStart:
    """earlier: the conversation of previous_response_id. Raises ApiError for what is not supported,
    BatonError for sampling parameters that are wrong."""
    _check_metadata(request.metadata or {})
    _ = request.summary  # raises ApiError
    start = inference_pb2.GenerateStart(id="http", model=request.model, include_token_ids=False)
    sampling = start.sampling
    if request.max_output_tokens is not None:
        sampling.max_tokens = request.max_output_tokens
    for name in ("temperature", "top_p", "presence_penalty", "frequency_penalty", "top_k"):
        value = getattr(request, name)
        if value is not None:
            setattr(sampling, name, value)
    format = request.text.format if request.text is not None else None
    if format is not None and format.type == "json_object":
        sampling.grammar.json_object.SetInParent()
    elif format is not None and format.type == "json_schema":
        if format.schema_ is None:
            param = "text.format.schema"
            raise ApiError(400, f"missing parameter: {param}", param, "missing_parameter")
        sampling.grammar.json_schema = json.dumps(format.schema_, ensure_ascii=False)
    if format is not None and format.type != "json_schema" and format.schema_ is not None:
        raise invalid_value("text.format.schema", "text.format.schema goes with type json_schema only")
    check_sampling(sampling, None)
    chat = start.chat
    add_messages(request, earlier, chat)
    _add_tools(request, chat)
    if request.reasoning is not None and request.reasoning.effort is not None:
        effort = request.reasoning.effort
        chat.template_arguments.update({"reasoning_effort": effort})
        if effort == "none":
            chat.template_arguments.update({"enable_thinking": False})
    return start


def add_messages(
    request: ConversationRequest, earlier: Iterable[tokenizer_pb2.ChatMessage], chat: tokenizer_pb2.ChatPrompt
) -> None:
    """Raises ApiError."""
    if not request.model:
        raise invalid_value("model", "model is empty: name one of /v1/models")
    if request.instructions:
        chat.messages.add(role="system", content=request.instructions)
    chat.messages.extend(earlier)
    messages = input_messages(request.input)
    if not messages and not request.previous_response_id:
        raise invalid_value("input", "input is empty: give a text, or at least one item")
    chat.messages.extend(messages)


def _check_metadata(metadata: Mapping[str, str]) -> None:
    """Each answer and event of a response has them."""
    longest = max(map(len, metadata.values()), default=0)
    if len(metadata) > MAX_METADATA or max(map(len, metadata), default=0) > 64 or longest > 512:
        text = f"metadata: {MAX_METADATA} keys of 64 characters, with values of 512, at most"
        raise invalid_value("metadata", text)
    "".join(metadata.values()).encode()  # raises UnicodeEncodeError for a lone surrogate


def _add_tools(request: ResponsesRequest, chat: tokenizer_pb2.ChatPrompt) -> None:
    for tool in request.offered:
        tool.add_to(chat)
    choice = request.tool_choice
    if isinstance(choice, NamedResponsesTool):
        chat.tool_choice.mode = tokenizer_pb2.ToolChoice.MODE_REQUIRED
        chat.tool_choice.name = shown_name(choice.name, choice.namespace)
    elif isinstance(choice, AllowedResponsesTools):
        if not choice.names and choice.mode == "required":
            text = "tool_choice.tools names no function, and one is to be called"
            raise invalid_value("tool_choice.tools", text)
        chat.tool_choice.mode = TOOL_MODES[choice.mode if choice.names else "none"]
        chat.tool_choice.allowed.extend(choice.names)
    elif choice is not None and (chat.tools or choice == "required"):
        chat.tool_choice.mode = TOOL_MODES[choice]
    if request.parallel_tool_calls is not None:
        chat.parallel_tool_calls = request.parallel_tool_calls
