"""A chat prompt as chat templates take it: messages, tools and variables, checked.

Templates follow the conventions of `transformers` (https://huggingface.co/docs/transformers/chat_extras):
tools are {"type": "function", "function": {...}}, the arguments of calls are objects. A template that knows
no tools gets them in a system message, in the words of the Hermes format, and calls and results as text.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from google.protobuf import json_format

from baton.rpc.errors import BatonError, invalid_field
from baton.rpc.validate import check_enums
from baton.v1 import tokenizer_pb2

ROLES = ("system", "developer", "user", "assistant", "tool")
MAX_TOOLS = 1024
RESERVED = frozenset(
    (
        *("conversation", "conversations", "messages", "tools", "documents", "chat_template"),
        *("add_generation_prompt", "continue_final_message", "tokenize", "sanitize_control_tokens"),
        *("padding", "truncation", "max_length", "return_tensors", "return_dict", "tokenizer_kwargs"),
        *("return_assistant_tokens_mask", "raise_exception", "strftime_now", "self", "key"),
    )
)
"""Names that template_arguments may not have: arguments of `apply_chat_template`, and what templates call."""
_NAME = re.compile(r"[a-zA-Z0-9_.-]{1,128}")
RAW_ARGUMENTS = "raw_arguments"
"""The key under which a template sees arguments of an earlier call that are no JSON object."""

MAX_PARTS = 32_768
"""Parts of a message."""

JsonValue = Any
"""A JSON value; what a message says may be a list of texts, and of None where an image is."""


@dataclass(frozen=True, slots=True)
class Conversation:
    """What a template is rendered with."""

    messages: Sequence[Mapping[str, JsonValue]]
    tools: Sequence[Mapping[str, JsonValue]] = ()
    arguments: Mapping[str, JsonValue] = field(default_factory=dict)
    """Variables of the template."""

    def with_text_arguments(self) -> Conversation:
        """The conversation with the arguments of calls as JSON text, as some templates want them."""
        return Conversation([_text_arguments(each) for each in self.messages], self.tools, self.arguments)

    def with_short_ids(self) -> Conversation:
        """The conversation with ids of calls as Mistral's templates want them."""
        return Conversation([_short_ids(each) for each in self.messages], self.tools, self.arguments)

    def with_parts(self, *, every: bool = True) -> Conversation:
        """The conversation with what messages say as lists of parts, as templates want it where an image is.
        every: also of messages without images, as some templates want it."""
        messages = [
            {**each, "content": _parts(each["content"])}
            if every or isinstance(each["content"], list)
            else each
            for each in self.messages
        ]
        return Conversation(messages, self.tools, self.arguments)

    def without_tools(self) -> Conversation:
        """The conversation for a template that knows no tools."""
        messages = [_plain(message) for message in self.messages]
        if self.tools:
            text = _TOOLS_TEXT.format(tools="\n".join(_dumps(tool) for tool in self.tools))
            if messages and messages[0]["role"] == "system" and isinstance(messages[0]["content"], str):
                messages[0] = {**messages[0], "content": f"{messages[0]['content']}\n\n{text}".lstrip()}
            else:
                messages.insert(0, {"role": "system", "content": text})
        return Conversation(messages, (), self.arguments)


def read(chat: tokenizer_pb2.ChatPrompt, name: str, *, developer: bool = False) -> Conversation:
    """Raises BatonError (INVALID_ARGUMENT), naming the field below `name`.

    developer: the template knows the role "developer"; otherwise it is "system".
    """
    if not chat.messages:
        raise invalid_field(f"{name}.messages", "must not be empty")
    calls: dict[str, str] = {}  # ids of calls, and the functions that they call
    messages = [
        _message(message, f"{name}.messages[{index}]", calls, developer)
        for index, message in enumerate(chat.messages)
    ]
    if chat.continue_final_message:
        _check_continued(chat, f"{name}.continue_final_message")
    shown = chat.tool_choice.mode != tokenizer_pb2.ToolChoice.MODE_NONE
    tools = _tools(chat, name)
    arguments = json_format.MessageToDict(chat.template_arguments)
    for key in arguments:
        if key in RESERVED or key.startswith("_") or key.endswith("_token"):
            where = f"{name}.template_arguments.{key[:40]}"
            raise invalid_field(where, "is not the caller's to give")
    return Conversation(messages, tools if shown else (), _integers(arguments))


def short_id(id: str) -> str:
    """The id of a call in 9 letters and digits, the form that Mistral's templates want."""
    if re.fullmatch("[a-zA-Z0-9]{9}", id):
        return id
    return hashlib.sha256(id.encode()).hexdigest()[:9]


def _message(
    message: tokenizer_pb2.ChatMessage, name: str, calls: dict[str, str], developer: bool
) -> dict[str, JsonValue]:
    role = message.role
    if role not in ROLES:
        raise invalid_field(f"{name}.role", f"is {role[:40]!r}; use one of {', '.join(ROLES)}")
    made: dict[str, JsonValue] = {
        "role": "system" if role == "developer" and not developer else role,
        "content": _content(message, name),
    }
    if message.name:
        made["name"] = message.name
    for key, allowed in ("tool_calls", "assistant"), ("reasoning", "assistant"), ("tool_call_id", "tool"):
        if getattr(message, key) and role != allowed:
            raise invalid_field(f"{name}.{key}", f": only in a message of role {allowed!r}")
    if message.reasoning:
        made["reasoning_content"] = message.reasoning
    if message.tool_calls:
        made["tool_calls"] = [
            _call(call, f"{name}.tool_calls[{index}]", calls) for index, call in enumerate(message.tool_calls)
        ]
    if message.tool_call_id:
        made["tool_call_id"] = message.tool_call_id
        if not message.name and message.tool_call_id in calls:
            made["name"] = calls[message.tool_call_id]
    return made


def _content(message: tokenizer_pb2.ChatMessage, name: str) -> str | list[str | None]:
    parts = message.parts
    if not parts:
        return message.content
    if message.content:
        raise invalid_field(f"{name}.parts", ": in the place of content, which must be empty")
    if len(parts) > MAX_PARTS:
        raise invalid_field(f"{name}.parts", f": {len(parts)} parts; {MAX_PARTS} are allowed")
    found: list[str | None] = []
    for index, part in enumerate(parts):
        kind = part.WhichOneof("kind")
        if kind is None:
            raise invalid_field(f"{name}.parts[{index}]", "is empty: give text or image")
        found.append(part.text if kind == "text" else None)
    return "".join(each or "" for each in found) if None not in found else found


def _parts(content: str | list[str | None]) -> list[JsonValue]:
    if isinstance(content, str):
        return [{"type": "text", "text": content}] if content else []
    return [{"type": "image"} if each is None else {"type": "text", "text": each} for each in content]


def _check_continued(chat: tokenizer_pb2.ChatPrompt, field: str) -> None:
    if chat.add_generation_prompt:
        raise invalid_field(field, "needs add_generation_prompt to be false or absent")
    last = chat.messages[-1]
    if last.role != "assistant" or last.tool_calls or not last.content.strip():
        text = ": the last message must be of role 'assistant', with text and without tool calls"
        raise invalid_field(field, text)


def _call(call: tokenizer_pb2.ToolCall, name: str, calls: dict[str, str]) -> dict[str, JsonValue]:
    _check_name(call.name, f"{name}.name")
    arguments = earlier_arguments(call.arguments)
    if arguments is None:
        arguments = {RAW_ARGUMENTS: call.arguments}
    if call.id:
        calls[call.id] = call.name
    return {
        "id": call.id,
        "type": "function",
        "function": {"name": call.name, "arguments": arguments},
    }


def _tools(chat: tokenizer_pb2.ChatPrompt, name: str) -> list[dict[str, JsonValue]]:
    if len(chat.tools) > MAX_TOOLS:
        raise invalid_field(f"{name}.tools", f": {len(chat.tools)} tools; {MAX_TOOLS} are allowed")
    seen: dict[str, int] = {}
    found = []
    for index, tool in enumerate(chat.tools):
        where = f"{name}.tools[{index}]"
        _check_name(tool.name, f"{where}.name")
        if tool.name in seen:
            text = f"is {tool.name!r}, the name of tools[{seen[tool.name]}] as well"
            raise invalid_field(f"{where}.name", text)
        seen[tool.name] = index
        parameters = {"type": "object", "properties": {}}
        if tool.parameters:
            parameters = _json_object(tool.parameters, f"{where}.parameters")
        function = {"name": tool.name, "description": tool.description, "parameters": parameters}
        found.append({"type": "function", "function": function})
    check_enums(chat, name)
    choice = chat.tool_choice
    if choice.name and choice.mode != tokenizer_pb2.ToolChoice.MODE_REQUIRED:
        raise invalid_field(f"{name}.tool_choice.name", ": only with MODE_REQUIRED")
    if choice.mode == tokenizer_pb2.ToolChoice.MODE_REQUIRED and not found:
        text = ": a call is required, but there are no tools"
        raise invalid_field(f"{name}.tool_choice", text)
    if choice.name and choice.name not in seen:
        text = f"is {choice.name[:128]!r}, which is none of the tools"
        raise invalid_field(f"{name}.tool_choice.name", text)
    if choice.allowed and (choice.name or choice.mode == tokenizer_pb2.ToolChoice.MODE_NONE):
        text = ": not with a name or MODE_NONE"
        raise invalid_field(f"{name}.tool_choice.allowed", text)
    for index, each in enumerate(choice.allowed):
        if each not in seen:
            where = f"{name}.tool_choice.allowed[{index}]"
            raise invalid_field(where, f"is {each[:128]!r}, which is none of the tools")
    return found


def _check_name(name: str, field: str) -> None:
    if not _NAME.fullmatch(name):
        form = "1 to 128 letters, digits, underscores, hyphens and dots"
        raise invalid_field(field, f"is {name[:128]!r}; a name has {form}")


def earlier_arguments(text: str) -> dict[str, JsonValue] | None:
    """Arguments of a call in the history; None: they are no JSON object: they were cut off, or come from
    elsewhere."""
    try:
        return _json_object("{}" if text.strip() in ("", "null") else text, "arguments")
    except BatonError:
        return None


def _json_object(text: str, field: str) -> dict[str, JsonValue]:
    try:
        found = json.loads(text, parse_constant=_no_constant)
    except RecursionError:
        raise invalid_field(field, "is nested too deeply") from None
    except ValueError as error:
        raise invalid_field(field, f"is not valid JSON: {error}") from None
    if not isinstance(found, dict):
        raise invalid_field(field, "must be a JSON object")
    try:
        _dumps(found).encode()
    except (UnicodeEncodeError, RecursionError):
        raise invalid_field(field, "has a lone surrogate, or is nested too deeply") from None
    return found


def _no_constant(name: str) -> None:
    raise ValueError(f"{name} is no JSON")


def _integers(value: JsonValue) -> JsonValue:
    """Struct knows floating-point numbers only; templates may print them."""
    if isinstance(value, float) and value.is_integer():
        return int(value)
    if isinstance(value, list):
        return [_integers(each) for each in value]
    return {key: _integers(each) for key, each in value.items()} if isinstance(value, dict) else value


def _short_ids(message: Mapping[str, JsonValue]) -> Mapping[str, JsonValue]:
    changed = dict(message)
    if "tool_calls" in message:
        changed["tool_calls"] = [{**call, "id": short_id(call["id"])} for call in message["tool_calls"]]
    if "tool_call_id" in message:
        changed["tool_call_id"] = short_id(message["tool_call_id"])
    return changed


def _text_arguments(message: Mapping[str, JsonValue]) -> Mapping[str, JsonValue]:
    if "tool_calls" not in message:
        return message
    calls = [
        {**call, "function": {**call["function"], "arguments": _dumps(call["function"]["arguments"])}}
        for call in message["tool_calls"]
    ]
    return {**message, "tool_calls": calls}


_TOOLS_TEXT = """# Tools

You may call one or more functions to assist with the user query.

You are provided with function signatures within <tools></tools> XML tags:
<tools>
{tools}
</tools>

For each function call, return a JSON object with function name and arguments within <tool_call></tool_call> \
XML tags:
<tool_call>
{{"name": <function-name>, "arguments": <args-json-object>}}
</tool_call>"""
"""What Qwen's templates say, after Nous Research's Hermes 2 Pro."""


def _plain(message: Mapping[str, JsonValue]) -> dict[str, JsonValue]:
    content = message["content"]
    if message["role"] == "tool":
        if isinstance(content, list):
            return {"role": "user", "content": ["<tool_response>\n", *content, "\n</tool_response>"]}
        return {"role": "user", "content": f"<tool_response>\n{content}\n</tool_response>"}
    if isinstance(content, list):
        return {"role": message["role"], "content": content}
    parts = [content] if content else []
    for call in message.get("tool_calls", ()):
        said = {"name": call["function"]["name"], "arguments": call["function"]["arguments"]}
        parts.append(f"<tool_call>\n{_dumps(said)}\n</tool_call>")
    kept = {key: value for key, value in message.items() if key in ("role", "name")}
    return {**kept, "content": "\n".join(parts)}


def _dumps(value: JsonValue) -> str:
    return json.dumps(value, ensure_ascii=False)
