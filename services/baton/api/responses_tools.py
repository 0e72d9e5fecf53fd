"""Tools of /v1/responses: as the client offers them, as the model is shown them, and as its calls go back.

The model knows functions only. A function in a namespace, as Codex offers those of an MCP server, has the
namespace before its name. A tool of type `custom` takes a text: it is a function with one argument.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Discriminator, Tag

from baton.api.openai_fields import DroppedTool, Elements, Json, Strict
from baton.v1 import tokenizer_pb2

INPUT = "input"
"""The argument of a custom tool."""


class FunctionTool(Strict):
    FIELD_PATH = "tools"
    HINTS: ClassVar[Mapping[str, str]] = {"defer_loading": "all tools are shown to the model"}

    type: Literal["function"]
    name: str
    description: str | None = None
    parameters: Json | None = None
    strict: bool | None = None


class InputFormat(Strict):
    FIELD_PATH = "tools.format"

    type: Literal["text", "grammar"]
    syntax: Literal["lark", "regex"] | None = None
    definition: str | None = None


class CustomTool(Strict):
    """A tool whose input is any text. A regular expression is enforced; a grammar is shown to the model."""

    FIELD_PATH = "tools"
    HINTS: ClassVar[Mapping[str, str]] = {"defer_loading": "all tools are shown to the model"}

    type: Literal["custom"]
    name: str
    description: str | None = None
    format: InputFormat | None = None


def tool_kind(value: Any) -> str:
    kind = value.get("type") if isinstance(value, dict) else getattr(value, "type", "")
    return kind if kind in ("function", "custom", "namespace") else "other"


InnerTool = Annotated[
    Annotated[FunctionTool, Tag("function")]
    | Annotated[CustomTool, Tag("custom")]
    | Annotated[DroppedTool, Tag("other")],
    Discriminator(tool_kind),
]


class Namespace(Strict):
    FIELD_PATH = "tools"
    HINTS: ClassVar[Mapping[str, str]] = {"description": "is about the tools together: describe each"}

    type: Literal["namespace"]
    name: str
    tools: Elements[InnerTool]


ResponsesTool = Annotated[
    Annotated[FunctionTool, Tag("function")]
    | Annotated[CustomTool, Tag("custom")]
    | Annotated[Namespace, Tag("namespace")]
    | Annotated[DroppedTool, Tag("other")],
    Discriminator(tool_kind),
]


@dataclass(frozen=True, slots=True)
class OfferedTool:
    """A tool that the model may call. namespace: empty for none."""

    tool: FunctionTool | CustomTool
    namespace: str = ""

    @property
    def shown(self) -> str:
        """The tool's name to the model."""
        return shown_name(self.tool.name, self.namespace)

    def item(self, call: tokenizer_pb2.ToolCall) -> Json:
        """The output item of a call."""
        of = {"name": self.tool.name} | ({"namespace": self.namespace} if self.namespace else {})
        if isinstance(self.tool, CustomTool):
            return {"type": "custom_tool_call", "call_id": call.id, **of, INPUT: _input(call.arguments)}
        return function_item(call) | of

    def add_to(self, chat: tokenizer_pb2.ChatPrompt) -> None:
        tool = self.tool
        made = chat.tools.add(name=self.shown, description=tool.description or "")
        if isinstance(tool, FunctionTool):
            if tool.parameters is not None:
                made.parameters = json.dumps(tool.parameters, ensure_ascii=False)
            if tool.strict is not None:
                made.strict = tool.strict
            return
        value: Json = {"type": "string"}
        if tool.format is not None and tool.format.definition:
            if tool.format.syntax == "regex":
                value["pattern"] = f"^(?:{tool.format.definition})$"
                made.strict = True
            else:
                made.description += f"\n\nThe input is of this grammar:\n{tool.format.definition}"
        schema = {"type": "object", "properties": {INPUT: value}, "required": [INPUT]}
        made.parameters = json.dumps({**schema, "additionalProperties": False}, ensure_ascii=False)


def offered(tools: Iterable[FunctionTool | CustomTool | Namespace | DroppedTool]) -> Iterator[OfferedTool]:
    """The tools that clients run; all others are left out, as clients expect."""
    for tool in tools:
        if isinstance(tool, Namespace):
            for each in tool.tools:
                if not isinstance(each, DroppedTool):
                    yield OfferedTool(each, tool.name)
        elif not isinstance(tool, DroppedTool):
            yield OfferedTool(tool)


def shown_name(name: str, namespace: str | None) -> str:
    if not namespace:
        return name
    return f"{namespace}{name}" if namespace.endswith("__") else f"{namespace}__{name}"


def function_item(call: tokenizer_pb2.ToolCall) -> Json:
    return {"type": "function_call", "call_id": call.id, "name": call.name, "arguments": call.arguments}


def custom_arguments(text: str) -> str:
    """The arguments that a custom tool's input is to the model."""
    return json.dumps({INPUT: text}, ensure_ascii=False)


def _input(arguments: str) -> str:
    """All that the model wrote, where it is not the one argument."""
    try:
        text = json.loads(arguments)[INPUT]
    except (ValueError, KeyError, TypeError):
        return arguments
    return text if isinstance(text, str) else arguments
