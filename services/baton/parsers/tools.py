"""What parsers of tool calls share: text around calls, calls that are no calls, and types of arguments.

A call comes out when it is complete and valid: the name of a tool that is offered, and a JSON object. What
only looks like a call is text. A call that the end of the output cuts off is left out.
"""

from __future__ import annotations

import json
import re
from abc import abstractmethod
from collections.abc import Generator, Mapping
from typing import Any

from baton.parsers.reader import (
    HALF_MARK,
    Malformed,
    ParsedCall,
    ParsedText,
    Reader,
    TextCut,
    find,
    may_begin,
)

ToolSchemas = Mapping[str, str]
"""Names of the tools that are offered, and the JSON Schemas of their arguments as JSON text (may be
empty)."""


MAX_VAIN = 2**16
"""After so many characters that were read as calls and are none, all is text: marks within marks would take
time that grows with the square of their number."""


class ToolParser(Reader):
    MARKS: tuple[str, ...] = ()
    """What a call begins with, or several in a row."""

    def __init__(self, tools: ToolSchemas) -> None:
        self.tools = tools
        self.vain = 0
        """Characters read as calls that are none."""
        self.called = False
        self._properties: dict[str, Mapping[str, Any]] = {}
        """Properties of the tools that have been called: a schema may be large, and calls many."""
        self._begin = 0
        """Where what may be a call begins."""
        self._space = ""
        """White space that is text only if text follows."""
        self._after_call = False
        super().__init__()

    @abstractmethod
    def calls(self, mark: str) -> Generator[None, None, None]:
        """Reads what follows a mark, and gives out the calls in it. Raises Malformed or Cut."""

    def run(self) -> Generator[None, None, None]:
        while (mark := (yield from self.pass_text(*self._marks()))) is not None:
            self._begin = self.at - len(mark)
            try:
                yield from self.calls(mark)
            except Malformed:
                self.vain += self.at - self._begin
                self.at = self._begin + len(mark)
                self.put(self.text[self._begin : self.at])
            except TextCut:
                self.left_over(len(mark))
        if self._space and not self.called:
            self.events.append(ParsedText(self._space))

    def _marks(self) -> tuple[str, ...]:
        return self.MARKS if self.vain < MAX_VAIN else ()

    def left_over(self, mark: int) -> None:
        """The text has ended in a call. It is text unless it was cut off, or is no more than its mark."""
        rest = self.text[self._begin :]
        if not self.cut and rest[mark:].strip():
            self.put(rest)
        else:
            self._space = ""
        self.at = len(self.text)

    def pass_text(self, *marks: str) -> Generator[None, None, str | None]:
        """Gives out text up to the first of the marks, and reads the mark. None: there is none."""
        while True:
            self.forget()
            found = find(self.text, marks, self.at)
            if found is not None:
                index, mark = found
                self.put(self.text[self.at : index])
                self.at = index + len(mark)
                return mark
            half = may_begin(self.text[self.at :], marks)
            if self.ended and not (self.cut and half >= HALF_MARK):
                half = 0
            end = len(self.text) - half
            self.put(self.text[self.at : end])
            self.at = end
            if self.ended:
                return None
            yield

    def put(self, text: str) -> None:
        """Gives out text. White space waits for more: before and after calls it is left out."""
        if self._after_call:
            text = text.lstrip()
        if not text:
            return
        self._after_call = False
        shown = text.rstrip()
        if shown:
            self.events.append(ParsedText(self._space + shown))
            self._space = ""
        self._space += text[len(shown) :]

    def call(self, name: Any, arguments: Any) -> None:
        """Gives out a call of JSON values. Raises Malformed."""
        if isinstance(arguments, str):  # as JSON in a string
            arguments = loads(arguments)
        if not isinstance(name, str) or name not in self.tools or not isinstance(arguments, dict):
            raise Malformed
        self.events.append(ParsedCall(name, dumps(arguments)))
        self.called = self._after_call = True
        self._space = ""
        self._begin = self.at

    def call_json(self, value: Any) -> None:
        """Gives out a call that is an object with a name and arguments. Raises Malformed."""
        if not isinstance(value, dict):
            raise Malformed
        arguments = value.get("arguments", value.get("parameters", {}))
        self.call(value.get("name"), arguments)

    def typed(self, name: str, texts: Mapping[str, str]) -> dict[str, Any]:
        """Arguments that came as plain text, with the types that the tool's schema gives them."""
        properties = self._properties.get(name)
        if properties is None:
            properties = self._properties[name] = _properties(self.tools.get(name) or "{}")
        return {key: _typed(text, properties.get(key)) for key, text in texts.items()}


def _properties(schema: str) -> Mapping[str, Any]:
    try:
        properties = json.loads(schema).get("properties")
    except (ValueError, RecursionError):
        return {}
    return properties if isinstance(properties, dict) else {}


def loads(text: str) -> Any:
    """A JSON value; control characters in strings are let pass. Raises Malformed."""
    try:
        return json.loads(text, cls=_Lenient)
    except (ValueError, RecursionError):
        raise Malformed from None


def dumps(value: Any) -> str:
    try:
        text = json.dumps(value, ensure_ascii=False, allow_nan=False)
        text.encode()
    except UnicodeEncodeError:  # a lone surrogate
        return json.dumps(value)
    except (TypeError, ValueError, RecursionError):  # TypeError: a value of Python that JSON has not
        raise Malformed from None
    return text


class _Lenient(json.JSONDecoder):
    def __init__(self) -> None:
        super().__init__(strict=False, parse_constant=_no_constant)


def _no_constant(name: str) -> None:
    raise ValueError(name)


_LITERALS = {"True": True, "False": False, "None": None}
_KINDS = {str: "string", bool: "boolean", int: "integer", float: "number", list: "array", dict: "object"}


def _typed(text: str, schema: Any) -> Any:
    kinds = _kinds(schema, 0)
    if kinds == {"string"}:
        return text
    stripped = text.strip()
    try:
        value = _LITERALS[stripped] if stripped in _LITERALS else loads(stripped)
    except Malformed:
        return text
    kind = "null" if value is None else _KINDS[type(value)]
    fits = not kinds or kind in kinds or (kind == "integer" and "number" in kinds)
    if isinstance(value, float) and value.is_integer() and "integer" in kinds:
        fits = True
    if kind == "string":
        return text
    return value if fits or "string" not in kinds else text


def _kinds(schema: Any, depth: int) -> set[str]:
    """The JSON types that a schema allows; empty: not known."""
    if not isinstance(schema, dict) or depth > 8:
        return set()
    kind = schema.get("type")
    if isinstance(kind, str):
        return {kind}
    if isinstance(kind, list):
        return {each for each in kind if isinstance(each, str)}
    if isinstance(schema.get("enum"), list):
        return {"null" if each is None else _KINDS[type(each)] for each in schema["enum"]}
    found: set[str] = set()
    for key in ("anyOf", "oneOf", "allOf"):
        parts = schema.get(key)
        for part in parts if isinstance(parts, list) else ():
            found |= _kinds(part, depth + 1)
    return found


NAME = re.compile(r"[a-zA-Z0-9_.-]{1,128}")
