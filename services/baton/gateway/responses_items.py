"""Input items of /v1/responses, and the messages that they become."""

from __future__ import annotations

import base64
import binascii
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Discriminator, Tag

from baton.gateway.images import IMAGE, PART, InputImage, image_or_part
from baton.gateway.openai_errors import invalid_value
from baton.gateway.openai_fields import Elements, Strict, call_arguments
from baton.v1 import tokenizer_pb2

Messages = list[tokenizer_pb2.ChatMessage]
SUMMARY = "What has been said so far, in short: "
"""Begins the message that a compaction item becomes."""
BREAK = "\n\n"
"""Between messages that become one."""
_COMPACTED = "baton1."
"""Begins the content of a compaction item. It needs no secret: it tells a client what its own items said."""


class Part(Strict):
    PLACE = "input.content"
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
    Annotated[Part, Tag(PART)] | Annotated[InputImage, Tag(IMAGE)], image_or_part("input_image")
]


class Item(Strict):
    PLACE = "input"
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
    arguments: Annotated[str, call_arguments("input.arguments")]


class OutputItem(Item):
    type: Literal["function_call_output"]
    call_id: str
    output: str | Elements[PartOrImage]


class ReasoningItem(Item):
    HINTS: ClassVar[Mapping[str, str]] = {
        **Item.HINTS,
        "encrypted_content": "the reasoning itself is sent",
    }

    type: Literal["reasoning"]
    summary: Elements[Part] | None = None
    content: Elements[Part] | None = None


class CompactionItem(Item):
    HINTS: ClassVar[Mapping[str, str]] = {**Item.HINTS, "created_by": "is the client's own record"}

    type: Literal["compaction"]
    encrypted_content: str


def _kind(value: Any) -> str:
    kind = value.get("type") if isinstance(value, dict) else getattr(value, "type", "")
    return kind if isinstance(kind, str) and kind else "message"


InputItem = Annotated[
    Annotated[MessageItem, Tag("message")]
    | Annotated[CallItem, Tag("function_call")]
    | Annotated[OutputItem, Tag("function_call_output")]
    | Annotated[ReasoningItem, Tag("reasoning")]
    | Annotated[CompactionItem, Tag("compaction")],
    Discriminator(_kind),
]


@dataclass(frozen=True, slots=True)
class _Turn:
    """A message, and pieces of it: put together once, however many there are."""

    message: tokenizer_pb2.ChatMessage
    texts: list[str] = field(default_factory=list)
    thoughts: list[str] = field(default_factory=list)


def input_messages(given: str | list[InputItem]) -> Messages:
    """What an assistant wrote in one turn (reasoning, text, calls) is one message. Raises ApiError."""
    if isinstance(given, str):
        return [tokenizer_pb2.ChatMessage(role="user", content=given)] if given else []
    messages: Messages = []
    turn: _Turn | None = None
    turns: list[_Turn] = []
    for index, item in enumerate(given):
        if isinstance(item, MessageItem) and item.role != "assistant":
            messages.append(tokenizer_pb2.ChatMessage(role=item.role, content=_text(item.content)))
            turn = None
        elif isinstance(item, OutputItem):
            content = _text(item.output)
            messages.append(
                tokenizer_pb2.ChatMessage(role="tool", content=content, tool_call_id=item.call_id)
            )
            turn = None
        elif isinstance(item, CompactionItem):
            summary = _summary(item.encrypted_content, f"input[{index}]")
            _join_users(messages)
            messages.append(tokenizer_pb2.ChatMessage(role="assistant", content=SUMMARY + summary))
            turn = None
        else:
            if turn is None:
                turn = _Turn(tokenizer_pb2.ChatMessage(role="assistant"))
                turns.append(turn)
                messages.append(turn.message)
            if isinstance(item, MessageItem):
                turn.texts.append(_text(item.content))
            elif isinstance(item, CallItem):
                turn.message.tool_calls.add(id=item.call_id, name=item.name, arguments=item.arguments)
            elif isinstance(item, ReasoningItem):
                turn.thoughts.append(_text(item.content or item.summary or []))
    for turn in turns:
        turn.message.content, turn.message.reasoning = "".join(turn.texts), "".join(turn.thoughts)
    return messages


def _join_users(messages: Messages) -> None:
    """Makes one of the users' messages at the end: templates may demand that users and assistants alternate,
    and of what was compacted only the users' messages are left."""
    first = len(messages)
    while first and messages[first - 1].role == "user":
        first -= 1
    if first < len(messages):
        joined = BREAK.join(message.content for message in messages[first:])
        messages[first:] = [tokenizer_pb2.ChatMessage(role="user", content=joined)]


def _text(given: str | Sequence[Part | InputImage]) -> str:
    return given if isinstance(given, str) else "".join(part.said for part in given)


def compacted(summary: str) -> str:
    """The content of a compaction item."""
    return _COMPACTED + base64.urlsafe_b64encode(summary.encode()).decode()


def _summary(content: str, place: str) -> str:
    """Raises ApiError."""
    try:
        if not content.startswith(_COMPACTED):
            raise ValueError
        return base64.b64decode(content.removeprefix(_COMPACTED), b"-_", validate=True).decode()
    except (ValueError, binascii.Error):
        text = f"{place}: its encrypted_content is not of this server: send the items themselves"
        raise invalid_value(place, text) from None
