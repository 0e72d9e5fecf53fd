"""Input items of /v1/responses, and the messages that they become."""

from __future__ import annotations

import base64
import binascii
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, ClassVar, Literal, get_args

from pydantic import Discriminator, Tag, TypeAdapter

from baton.api.images import IMAGE, PART, InputImage, Saying, Words, image_or_part, say
from baton.api.openai_errors import invalid_value
from baton.api.openai_fields import Elements, LeftOut, Strict, call_arguments
from baton.api.responses_tools import ResponsesTool, custom_arguments, shown_name
from baton.v1 import tokenizer_pb2

Messages = list[tokenizer_pb2.ChatMessage]
SUMMARY = "What has been said so far, in short: "
"""Begins the message that a compaction item becomes."""
BREAK = "\n\n"
"""Between messages that become one."""
_COMPACTED = "baton1."
"""Begins the content of a compaction item. It needs no secret: it tells a client what its own items said."""


class ItemPart(Strict):
    FIELD_PATH = "input.content"
    HINTS: ClassVar[Mapping[str, str]] = {
        "annotations": "is what an answer carried beside its text",
        "logprobs": "is what an answer carried beside its text",
    }

    type: Literal["input_text", "output_text", "text", "refusal", "summary_text", "reasoning_text"]
    text: str | None = None
    refusal: str | None = None

    @property
    def said(self) -> str:
        return self.text or self.refusal or ""


PartOrImage = Annotated[
    Annotated[ItemPart, Tag(PART)] | Annotated[InputImage, Tag(IMAGE)], image_or_part("input_image")
]


class Item(Strict):
    FIELD_PATH = "input"
    HINTS: ClassVar[Mapping[str, str]] = {
        "id": "items are in order",
        "status": "what is sent back is taken as it is",
        "phase": "is the client's own record",
    }


class MessageItem(Item):
    type: Literal["message"] = "message"
    role: Literal["user", "assistant", "system", "developer"]
    content: str | Elements[PartOrImage]


class CallItem(Item):
    type: Literal["function_call"]
    call_id: str
    name: str
    namespace: str | None = None
    arguments: Annotated[str, call_arguments("input.arguments")]


class CustomCallItem(Item):
    type: Literal["custom_tool_call"]
    call_id: str
    name: str
    namespace: str | None = None
    input: str


class OutputItem(Item):
    HINTS: ClassVar[Mapping[str, str]] = {**Item.HINTS, "name": "is that of the call"}

    type: Literal["function_call_output", "custom_tool_call_output"]
    call_id: str
    output: str | Elements[PartOrImage]


class ActionItem(Item):
    """A call of a tool that only OpenAI's models know; the model reads it as a call of a function."""

    HINTS: ClassVar[Mapping[str, str]] = {
        "status": Item.HINTS["status"],
        "environment": "is the client's own record",
    }

    type: Literal["local_shell_call", "shell_call", "apply_patch_call"]
    call_id: str | None = None
    id: str | None = None
    action: dict[str, Any] | None = None
    operation: dict[str, Any] | None = None


class ActionOutputItem(Item):
    HINTS: ClassVar[Mapping[str, str]] = {
        "status": Item.HINTS["status"],
        "max_output_length": "is the client's own record",
    }

    type: Literal["local_shell_call_output", "shell_call_output", "apply_patch_call_output"]
    call_id: str | None = None
    id: str | None = None
    output: str | list[Any] = ""


class AgentMessageItem(Item):
    """What another agent of the client says to this one."""

    type: Literal["agent_message"]
    author: str
    recipient: str | None = None
    content: str | Elements[PartOrImage]


class ToolsItem(Item):
    """Tools that are offered from here on."""

    HINTS: ClassVar[Mapping[str, str]] = {
        **Item.HINTS,
        "role": "tools are no message",
        "call_id": "what the search was for is in no message",
        "execution": "is the client's own record",
    }

    type: Literal["additional_tools", "tool_search_output"]
    tools: Elements[ResponsesTool]


class ReferenceItem(Item):
    """An item of a stored response. One that is not stored is left out."""

    HINTS: ClassVar[Mapping[str, str]] = {}

    type: Literal["item_reference"]
    id: str


class LeftOutItem(LeftOut):
    FIELD_PATH = "input"

    type: Literal[
        "web_search_call",
        "file_search_call",
        "code_interpreter_call",
        "image_generation_call",
        "tool_search_call",
        "mcp_list_tools",
        "mcp_call",
        "mcp_approval_request",
        "mcp_approval_response",
    ]


class ReasoningItem(Item):
    HINTS: ClassVar[Mapping[str, str]] = {
        **Item.HINTS,
        "encrypted_content": "the reasoning itself is sent",
    }

    type: Literal["reasoning"]
    summary: Elements[ItemPart] | None = None
    content: Elements[ItemPart] | None = None


class CompactionItem(Item):
    HINTS: ClassVar[Mapping[str, str]] = {**Item.HINTS, "created_by": "is the client's own record"}

    type: Literal["compaction"]
    encrypted_content: str


_TAGS = {
    "custom_tool_call_output": "function_call_output",
    "local_shell_call": "shell_call",
    "apply_patch_call": "shell_call",
    "local_shell_call_output": "shell_call_output",
    "apply_patch_call_output": "shell_call_output",
    "tool_search_output": "additional_tools",
    **dict.fromkeys(get_args(LeftOutItem.model_fields["type"].annotation), "web_search_call"),
}


def _kind(value: Any) -> str:
    """The tag of its model, which is one of the types that the model has."""
    kind = value.get("type") if isinstance(value, dict) else getattr(value, "type", "")
    return _TAGS.get(kind, kind) if isinstance(kind, str) and kind else "message"


InputItem = Annotated[
    Annotated[MessageItem, Tag("message")]
    | Annotated[CallItem, Tag("function_call")]
    | Annotated[CustomCallItem, Tag("custom_tool_call")]
    | Annotated[OutputItem, Tag("function_call_output")]
    | Annotated[ActionItem, Tag("shell_call")]
    | Annotated[ActionOutputItem, Tag("shell_call_output")]
    | Annotated[ReasoningItem, Tag("reasoning")]
    | Annotated[AgentMessageItem, Tag("agent_message")]
    | Annotated[ToolsItem, Tag("additional_tools")]
    | Annotated[ReferenceItem, Tag("item_reference")]
    | Annotated[LeftOutItem, Tag("web_search_call")]
    | Annotated[CompactionItem, Tag("compaction")],
    Discriminator(_kind),
]


OutputItems = TypeAdapter(list[InputItem])
"""Output of an answer, to be read as items of an input."""


@dataclass(frozen=True, slots=True)
class _Turn:
    """A message, and pieces of it: put together once, however many there are."""

    message: tokenizer_pb2.ChatMessage
    pieces: list[tuple[str, Saying]] = field(default_factory=list)
    thoughts: list[str] = field(default_factory=list)


def input_messages(items: str | list[InputItem]) -> Messages:
    """What an assistant wrote in one turn (reasoning, text, calls) is one message. Raises ApiError."""
    if isinstance(items, str):
        return [tokenizer_pb2.ChatMessage(role="user", content=items)] if items else []
    messages: Messages = []
    turn: _Turn | None = None
    turns: list[_Turn] = []
    for index, item in enumerate(items):
        path = f"input[{index}]"
        if isinstance(item, MessageItem) and item.role != "assistant":
            messages.append(tokenizer_pb2.ChatMessage(role=item.role))
            say(messages[-1], _pieces(item.content, f"{path}.content"))
            turn = None
        elif isinstance(item, OutputItem):
            messages.append(_result(item.call_id, ""))
            say(messages[-1], _pieces(item.output, f"{path}.output"))
            turn = None
        elif isinstance(item, ActionOutputItem):
            messages.append(_result(item.call_id or item.id or "", _written(item.output)))
            turn = None
        elif isinstance(item, AgentMessageItem):
            messages.append(tokenizer_pb2.ChatMessage(role="user"))
            content = _pieces(item.content, f"{path}.content")
            say(messages[-1], [(path, Words(f"Message from {item.author}:\n")), *content])
            turn = None
        elif isinstance(item, ToolsItem | ReferenceItem | LeftOutItem):
            continue
        elif isinstance(item, CompactionItem):
            summary = _summary(item.encrypted_content, path)
            _join_users(messages)
            messages.append(tokenizer_pb2.ChatMessage(role="assistant", content=SUMMARY + summary))
            turn = None
        else:
            if turn is None:
                turn = _Turn(tokenizer_pb2.ChatMessage(role="assistant"))
                turns.append(turn)
                messages.append(turn.message)
            if isinstance(item, MessageItem):
                turn.pieces.extend(_pieces(item.content, f"{path}.content"))
            elif isinstance(item, CallItem):
                name = shown_name(item.name, item.namespace)
                turn.message.tool_calls.add(id=item.call_id, name=name, arguments=item.arguments)
            elif isinstance(item, CustomCallItem):
                name, arguments = shown_name(item.name, item.namespace), custom_arguments(item.input)
                turn.message.tool_calls.add(id=item.call_id, name=name, arguments=arguments)
            elif isinstance(item, ActionItem):
                name, done = item.type.removesuffix("_call"), item.action or item.operation or {}
                call = item.call_id or item.id or ""
                turn.message.tool_calls.add(id=call, name=name, arguments=_written(done))
            elif isinstance(item, ReasoningItem):
                turn.thoughts.extend(part.said for part in item.content or item.summary or ())
    for turn in turns:
        say(turn.message, turn.pieces)
        turn.message.reasoning = "".join(turn.thoughts)
    return messages


def _join_users(messages: Messages) -> None:
    """Makes one of the users' messages at the end: templates may demand that users and assistants alternate,
    and of what was compacted only the users' messages are left."""
    first = len(messages)
    while first and messages[first - 1].role == "user":
        first -= 1
    users = messages[first:]
    if any(message.parts for message in users):
        joined = tokenizer_pb2.ChatMessage(role="user")
        for message in users:
            joined.parts.extend(message.parts or [tokenizer_pb2.ContentPart(text=message.content)])
            joined.parts.add(text=BREAK)
        messages[first:] = [joined]
    elif users:
        content = BREAK.join(message.content for message in users)
        messages[first:] = [tokenizer_pb2.ChatMessage(role="user", content=content)]


def _result(call: str, content: str) -> tokenizer_pb2.ChatMessage:
    return tokenizer_pb2.ChatMessage(role="tool", content=content, tool_call_id=call)


def _written(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def _pieces(value: str | Sequence[ItemPart | InputImage], path: str) -> list[tuple[str, Saying]]:
    """path: of what has the parts, in the body."""
    if isinstance(value, str):
        return [(path, Words(value))]
    return [(f"{path}[{index}]", part) for index, part in enumerate(value)]


def compacted(summary: str) -> str:
    """The content of a compaction item."""
    return _COMPACTED + base64.urlsafe_b64encode(summary.encode()).decode()


def _summary(content: str, path: str) -> str:
    """Raises ApiError."""
    try:
        if not content.startswith(_COMPACTED):
            raise ValueError
        return base64.b64decode(content.removeprefix(_COMPACTED), b"-_", validate=True).decode()
    except (ValueError, binascii.Error):
        text = f"{path}: its encrypted_content is not of this server: send the items themselves"
        raise invalid_value(path, text) from None
