"""Llama: an answer that is an object with a name (3.1 to 3.3), or a list of calls in Python (3.2 and 4)."""

from __future__ import annotations

import ast
import re
from collections.abc import Generator
from typing import Any

from pydantic_core import from_json

from baton.parsers.reader import HALF_MARK, Malformed, TextCut
from baton.parsers.tools import ToolParser, loads

MAX_LIST = 2**20
"""Longest list of calls in Python: its parser takes much memory."""
_KEYS = {"name", "type", "id", "function", "parameters", "arguments"}
"""Keys of a call."""
_CALL = re.compile(r"\[\s*(?:[A-Za-z_][\w.-]*\s*(?:\(|$)|$)")


class WholeAnswer(ToolParser):
    """An answer is calls from its first character on, or from a mark on."""

    FIRST: tuple[str, ...]

    def run(self) -> Generator[None, None, None]:
        space = yield from self.space()
        self._begin = self.at - len(space)
        if (yield from self.peek()) in self.FIRST:
            try:
                yield from self.calls("")
            except Malformed:
                self.at = self._begin + 1
                self.put(self.text[self._begin : self.at])
            except TextCut:
                if self._may_be_call(self.text[self._begin :]):
                    self.left_over(0)
                else:
                    self.put(self.text[self._begin :])
                    self.at = len(self.text)
        else:
            self.put(space)
        yield from super().run()

    def _may_be_call(self, text: str) -> bool:
        """Whether a text that has been cut off can have gone on as a call of a tool that is offered. An
        answer of a schema, which is an object as well, cannot by its keys or by its name."""
        text = text.strip()
        if len(text) < HALF_MARK:
            return False
        try:
            begun = from_json(text + "null" * text.endswith(":"), allow_partial="trailing-strings")
        except ValueError:
            return True
        if not isinstance(begun, dict):
            return True
        name = begun.get("name")
        named = isinstance(name, str) and any(tool.startswith(name) for tool in self.tools)
        return begun.keys() <= _KEYS and (name is None or named)


class Llama3Json(WholeAnswer):
    SPECIAL: tuple[str, ...] = ("<|python_tag|>",)
    MARKS: tuple[str, ...] = ("<|python_tag|>",)
    FIRST: tuple[str, ...] = ("{",)

    def calls(self, mark: str) -> Generator[None, None, None]:
        while True:
            yield from self.space()
            self.call_json(loads((yield from self.json())))
            yield from self.space()
            if not (yield from self.accept(";", ",")):
                return


class Pythonic(Llama3Json):
    SPECIAL = ("<|python_start|>", "<|python_end|>")
    MARKS = ("<|python_start|>",)
    FIRST = ("[", "{")

    def calls(self, mark: str) -> Generator[None, None, None]:
        yield from self.space()
        if (yield from self.peek()) == "{":  # as a grammar makes a model write it
            yield from super().calls(mark)
            return
        while _CALL.match(self.text, self.at) and not re.match(r"\[\s*[\w.-]+\s*\(", self.text[self.at :]):
            if self.ended:
                raise TextCut
            yield
        start = self.at
        if not _CALL.match(self.text, start):
            raise Malformed
        yield from self.brackets("'\"")
        for name, arguments in _calls(self.text[start : self.at]):
            self.call(name, arguments)
        yield from self.space()
        yield from self.accept("<|python_end|>")


def _calls(text: str) -> list[tuple[str, dict[str, Any]]]:
    """The calls in a list, as Python writes it. Raises Malformed."""
    if len(text) > MAX_LIST:
        raise Malformed
    try:
        listed = ast.parse(text, mode="eval").body
        if not isinstance(listed, ast.List):
            raise Malformed
        return [_one(each) for each in listed.elts]
    except (SyntaxError, TypeError, ValueError, RecursionError, MemoryError):
        raise Malformed from None


def _one(node: ast.expr) -> tuple[str, dict[str, Any]]:
    if not isinstance(node, ast.Call) or node.args or any(each.arg is None for each in node.keywords):
        raise Malformed
    return ast.unparse(node.func), {each.arg or "": _value(each.value) for each in node.keywords}


_NAMES = {"true": True, "false": False, "null": None}


def _value(node: ast.expr) -> Any:
    if isinstance(node, ast.Name) and node.id in _NAMES:
        return _NAMES[node.id]
    if isinstance(node, ast.List | ast.Tuple):
        return [_value(each) for each in node.elts]
    if isinstance(node, ast.Dict):
        pairs = zip(node.keys, node.values, strict=True)
        return {str(_value(key)): _value(value) for key, value in pairs if key is not None}
    return ast.literal_eval(node)
