"""Reasoning between two marks at the beginning of what a model writes: <think>, [THINK]."""

from __future__ import annotations

from collections.abc import Generator

from baton.parsers.reader import ParsedReasoning, ParsedText, ParserEvent, Reader, find, may_begin
from baton.parsers.tools import ToolParser


class Think(Reader):
    """The answer is given on to a parser of tool calls, if there is one.

    opened: the prompt ends with the opening mark. A call within the reasoning ends it, unless its end comes
    later.
    """

    MARKS = (("<think>", "</think>"), ("[THINK]", "[/THINK]"))
    SPECIAL = tuple(mark for pair in MARKS for mark in pair)

    def __init__(self, tools: ToolParser | None, *, opened: bool) -> None:
        self._tools = tools
        if tools is not None:
            self.SPECIAL += tools.SPECIAL
        self._opened = opened
        super().__init__()
        self.in_reasoning = opened

    def run(self) -> Generator[None, None, None]:
        space = yield from self.space()
        opening = ""
        if not self._opened:
            opening = yield from self.opening(*(mark for mark, _ in self.MARKS))
        if self._opened or opening:
            self.in_reasoning = True
            closing = [end for mark, end in self.MARKS if opening in ("", mark)]
            yield from self._reasoning(closing)
            self.in_reasoning = False
            yield from self.space()
        else:
            self._answer(space)
        while True:
            self._answer(self.text[self.at :])
            self.text, self.at = "", 0
            if self.ended:
                break
            yield
        if self._tools is not None:
            self.events += self._tools.finish(cut=self.cut)

    def _reasoning(self, closing: list[str]) -> Generator[None, None, None]:
        """Reads up to a closing mark. White space around the reasoning is left out."""
        calls = self._tools.MARKS[:1] if self._tools is not None else ()
        yield from self.space()
        while True:
            self.forget()
            found = find(self.text, closing, self.at)
            end = found[0] if found is not None else len(self.text)
            call = find(self.text[:end], calls, self.at) if calls and found is None else None
            if found is None and call is not None:
                end = call[0]  # a call, or the draft of one
            elif found is None and not self.ended:
                end -= may_begin(self.text[self.at :], [*closing, *calls])
            shown = self.text[self.at : end].rstrip()
            if shown:
                self.events.append(ParsedReasoning(shown))
                self.at += len(shown)
            if found is not None:
                self.at = end + len(found[1])
                return
            if self.ended:
                self.at = end if call is not None and not self.cut else len(self.text)
                return
            yield

    def _answer(self, text: str) -> None:
        if self._tools is not None:
            self.events += self._tools.feed(text)
        elif text:
            event: ParserEvent = ParsedText(text)
            self.events.append(event)
