"""DeepSeek V3 and R1, whose arguments are JSON in a code block, and V3.1, whose are plain JSON."""

from __future__ import annotations

from collections.abc import Generator

from baton.parsers.tools import ToolParser, loads

BEGIN, END = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"  # noqa: RUF001
CALL, CALL_END, SEP = "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>", "<｜tool▁sep｜>"  # noqa: RUF001


class DeepSeek(ToolParser):
    SPECIAL = (BEGIN, END, CALL, CALL_END, SEP)
    MARKS = (BEGIN,)

    def calls(self, mark: str) -> Generator[None, None, None]:
        count = 0
        while True:
            yield from self.space()
            found = yield from self.accept(CALL, END)
            if found == END and count:
                return
            if found != CALL:
                raise self.wrong()
            name, _ = yield from self.until(SEP)
            fenced = name.strip() == "function"
            if fenced:
                name, _ = yield from self.until("\n")
                if not (yield from self.accept("```json")):
                    raise self.wrong()
            yield from self.space()
            self.call(name.strip(), loads((yield from self.json())))
            count += 1
            yield from self.space()
            if fenced:
                yield from self.accept("```")
            yield from self.accept(CALL_END)
