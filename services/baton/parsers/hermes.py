"""The Hermes format (Nous Research's Hermes 2 Pro), of Qwen 2.5 and 3 as well, and that of Qwen3-Coder.

<tool_call>
{"name": "f", "arguments": {"x": 1}}
</tool_call>

Qwen3-Coder and Qwen 3.5 write <function=f>, a <parameter=x> for each argument, and values as plain text.
"""

from __future__ import annotations

from collections.abc import Generator

from baton.parsers.reader import Malformed
from baton.parsers.tools import ToolParser, loads

OPEN, CLOSE = "<tool_call>", "</tool_call>"


class Hermes(ToolParser):
    SPECIAL = (OPEN,)
    MARKS: tuple[str, ...] = (OPEN,)

    def calls(self, mark: str) -> Generator[None, None, None]:
        yield from self.space()
        self.call_json(loads((yield from self.json())))
        yield from self.close()

    def close(self) -> Generator[None, None, None]:
        yield from self.space()
        yield from self.accept(CLOSE)


class Qwen3Coder(Hermes):
    MARKS = (OPEN, "<function=")

    def calls(self, mark: str) -> Generator[None, None, None]:
        if mark == OPEN:
            yield from self.space()
            if (yield from self.peek()) == "{":
                yield from super().calls(mark)
                return
            if not (yield from self.accept("<function=")):
                raise self.wrong()
        name, _ = yield from self.until(">")
        texts: dict[str, str] = {}
        while True:
            yield from self.space()
            found = yield from self.accept("<parameter=", "</function>", CLOSE)
            if found != "<parameter=":
                break
            key, _ = yield from self.until(">")
            texts[key.strip()] = yield from self._value()
        if not found:
            # An end of the text is no end of the call.
            yield from self.until("</function>")
            raise Malformed
        self.call(name.strip(), self.typed(name.strip(), texts))
        if found != CLOSE:
            yield from self.close()

    def _value(self) -> Generator[None, None, str]:
        """A value on lines of its own ends at a mark that begins a line: marks in it are text. Its own mark
        may be missing."""
        if (yield from self.peek()) != "\n":
            value, _ = yield from self.until("</parameter>")
            return value
        value, mark = yield from self.until("\n</parameter>", "\n<parameter=", "\n</function>")
        if mark != "\n</parameter>":
            self.at -= len(mark)
        return value[1:]
