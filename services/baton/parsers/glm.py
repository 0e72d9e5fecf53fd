"""GLM-4.5 and later: a name, then keys and values as plain text.

<tool_call>f
<arg_key>x</arg_key>
<arg_value>1</arg_value>
</tool_call>
"""

from __future__ import annotations

from collections.abc import Generator

from baton.parsers.hermes import CLOSE, OPEN
from baton.parsers.reader import Malformed, TextCut
from baton.parsers.tools import NAME, ToolParser, loads


class Glm(ToolParser):
    SPECIAL = (OPEN, CLOSE, "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>")
    MARKS = (OPEN,)

    def calls(self, mark: str) -> Generator[None, None, None]:
        yield from self.space()
        if (yield from self.peek()) == "{":  # as a grammar makes a model write it
            self.call_json(loads((yield from self.json())))
            yield from self.space()
            yield from self.accept(CLOSE)
            return
        name, found = yield from self.until("<arg_key>", CLOSE)
        name = name.strip()
        if not NAME.fullmatch(name):
            raise Malformed
        texts: dict[str, str] = {}
        while found == "<arg_key>":
            key, _ = yield from self.until("</arg_key>")
            yield from self.space()
            if not (yield from self.accept("<arg_value>")):
                raise self.wrong()
            start = self.at
            try:
                texts[key.strip()], _ = yield from self.until("</arg_value>")
            except TextCut:
                # The last value's own end may be missing.
                rest = self.text[start:].rstrip()
                if not rest.endswith(CLOSE):
                    raise
                texts[key.strip()], self.at = rest.removesuffix(CLOSE), len(self.text)
                break
            yield from self.space()
            found = yield from self.accept("<arg_key>", CLOSE)
            if not found:
                raise self.wrong()
        self.call(name, self.typed(name, texts))
