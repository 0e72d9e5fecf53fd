"""Conversations, tools and tool calls, as the client's arguments say them, and as the contract does."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from baton.client.types import Arguments, Message, Schema, Tool, ToolCall, ToolChoice
from baton.rpc.errors import invalid
from baton.v1 import tokenizer_pb2

ToolArguments = Sequence[Tool | type[Schema]]

_MODES = {
    "auto": tokenizer_pb2.ToolChoice.MODE_AUTO,
    "none": tokenizer_pb2.ToolChoice.MODE_NONE,
    "required": tokenizer_pb2.ToolChoice.MODE_REQUIRED,
}
_OPTIONS = ("tools", "tool_choice", "parallel_tool_calls", "template_arguments")


def chat_prompt(arguments: Arguments) -> tokenizer_pb2.ChatPrompt | None:
    """None: the prompt is no chat. Raises BatonError, and KeyError, TypeError or ValueError for what the
    contract cannot express."""
    messages = arguments.get("messages")
    options = [name for name in _OPTIONS if arguments.get(name) is not None]
    if messages is None:
        if options:
            raise invalid(options[0], f"{options[0]} goes with messages only")
        return None
    said: Sequence[Message] = (
        [Message(role="user", content=messages)] if isinstance(messages, str) else messages
    )
    chat = tokenizer_pb2.ChatPrompt(messages=[_message(each) for each in said])
    for index, tool in enumerate(arguments.get("tools") or ()):
        try:
            chat.tools.append(_tool(tool))
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise invalid(f"tools[{index}]", f"tools[{index}] cannot be sent: {error!r}") from error
    choice = arguments.get("tool_choice")
    if choice is not None:
        _choose(choice, chat)
    parallel = arguments.get("parallel_tool_calls")
    if parallel is not None:
        chat.parallel_tool_calls = parallel
    variables = arguments.get("template_arguments")
    if variables:
        chat.template_arguments.update(dict(variables))
    return chat


def _message(message: Message) -> tokenizer_pb2.ChatMessage:
    made = tokenizer_pb2.ChatMessage(role=message["role"])
    content = message.get("content") or ""
    if isinstance(content, str):
        made.content = content
    else:
        for part in content:
            made.parts.add(**({"text": part} if isinstance(part, str) else {"image": part}))
    for name in ("name", "tool_call_id", "reasoning"):
        value = message.get(name)
        if value is not None:
            setattr(made, name, value)
    for call in message.get("tool_calls") or ():
        made.tool_calls.add(id=call.id, name=call.name, arguments=call.arguments)
    return made


def _tool(tool: Tool | type[Schema]) -> tokenizer_pb2.Tool:
    if not isinstance(tool, Mapping):
        schema = tool.model_json_schema()
        text = schema.pop("description", "")
        return tokenizer_pb2.Tool(name=tool.__name__, description=text, parameters=json.dumps(schema))
    made = tokenizer_pb2.Tool(name=tool["name"], description=tool.get("description") or "")
    parameters, strict = tool.get("parameters"), tool.get("strict")
    if parameters is not None:
        made.parameters = json.dumps(parameters)
    if strict is not None:
        made.strict = strict
    return made


def _choose(choice: ToolChoice, chat: tokenizer_pb2.ChatPrompt) -> None:
    if isinstance(choice, Mapping):
        chat.tool_choice.mode = tokenizer_pb2.ToolChoice.MODE_REQUIRED
        chat.tool_choice.name = choice["name"]
    elif choice in _MODES:
        chat.tool_choice.mode = _MODES[choice]
    else:
        text = f"tool_choice: auto, none, required, or the name of a tool in {{'name': ...}}, not {choice!r}"
        raise invalid("tool_choice", text)


def tool_calls(calls: Iterable[tokenizer_pb2.ToolCall], tools: ToolArguments) -> list[ToolCall]:
    models: dict[str, Any] = {tool.__name__: tool for tool in tools if not isinstance(tool, Mapping)}
    return [ToolCall(call.id, call.name, call.arguments, models.get(call.name)) for call in calls]
