"""Mistral: [TOOL_CALLS] and a list of objects; or, since tokenizer 11, [TOOL_CALLS]name[ARGS]{...}."""

from __future__ import annotations

from collections.abc import Generator

from baton.parsers.reader import Malformed
from baton.parsers.tools import NAME, ToolParser, loads


class Mistral(ToolParser):
    SPECIAL = ("[TOOL_CALLS]", "[ARGS]", "[CALL_ID]")
    MARKS = ("[TOOL_CALLS]",)

    def calls(self, mark: str) -> Generator[None, None, None]:
        yield from self.space()
        if (yield from self.peek()) in ("[", "{"):
            value = loads((yield from self.json("[{")))
            for each in value if isinstance(value, list) else [value]:
                self.call_json(each)
            return
        name, found = yield from self.until("[ARGS]", "[CALL_ID]", "{")
        if not NAME.fullmatch(name.strip()):
            raise Malformed
        if found == "[CALL_ID]":
            _, found = yield from self.until("[ARGS]", "{")
        if found == "{":
            self.at -= 1
        yield from self.space()
        self.call(name.strip(), loads((yield from self.json())))
