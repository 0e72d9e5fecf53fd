"""Reads a text that comes in pieces, as if it were there.

A parser is a generator that reads straight on and yields wherever it needs more text. So it is written once,
and gives the same result however the text is cut.
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Generator, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ParsedText:
    """More of the answer."""

    text: str


@dataclass(frozen=True, slots=True)
class ParsedReasoning:
    """More of the reasoning."""

    text: str


@dataclass(frozen=True, slots=True)
class ParsedCall:
    """A whole tool call. arguments: the JSON text of an object."""

    name: str
    arguments: str


ParserEvent = ParsedText | ParsedReasoning | ParsedCall
HALF_MARK = 3
"""Where an output is cut off, so many characters of a mark are the beginning of a call; fewer are text."""


class TextCut(Exception):
    """The text has ended where more was due."""


class Malformed(Exception):
    """The text is not in the form that was due."""


class Reader(ABC):
    """A parser of one text. `feed` takes the next piece, `finish` ends it; both give what is certain by
    now."""

    SPECIAL: tuple[str, ...] = ()
    """Special tokens that the parser needs to see; others have no text."""

    def __init__(self) -> None:
        self.events: list[ParserEvent] = []
        self.text = ""
        self.at = 0
        """Everything before has been read."""
        self.ended = False
        self.cut = False
        """By a stop string or a limit of tokens: an unfinished call is no mistake."""
        self.in_reasoning = False
        self._running: Generator[None, None, None] | None = self.run()
        self._step()

    @abstractmethod
    def run(self) -> Generator[None, None, None]:
        """Reads the whole text."""

    def feed(self, text: str) -> list[ParserEvent]:
        self.text += text
        self._step()
        return self._taken()

    def finish(self, *, cut: bool = False) -> list[ParserEvent]:
        self.ended, self.cut = True, cut
        self._step()
        assert self._running is None, "a parser waits for more than there is"
        return self._taken()

    def _taken(self) -> list[ParserEvent]:
        taken, self.events = self.events, []
        return taken

    def _step(self) -> None:
        if self._running is None:
            return
        try:
            next(self._running)
        except StopIteration:
            self._running = None

    # What parsers read with. Each returns with `at` behind what it has read.

    def forget(self) -> None:
        """Lets go of what has been read."""
        if self.at > 4096:
            self.text, self.at = self.text[self.at :], 0

    def wrong(self) -> TextCut | Malformed:
        """The error that the text goes on with something else than was due."""
        return TextCut() if self.ended and self.at == len(self.text) else Malformed()

    def accept(self, *literals: str) -> Generator[None, None, str]:
        """Reads the longest of the literals that the text goes on with; "": none. Raises Cut where the text
        has been cut off in one."""
        while True:
            rest = self.text[self.at : self.at + max(map(len, literals))]
            half = any(len(rest) < len(each) and each.startswith(rest) for each in literals)
            if half and not self.ended:
                yield
                continue
            if half and rest and self.cut:
                raise TextCut
            found = max((each for each in literals if rest.startswith(each)), key=len, default="")
            self.at += len(found)
            return found

    def opening(self, *literals: str) -> Generator[None, None, str]:
        """Accepts what an output may begin with. Where the output has been cut off in one, HALF_MARK
        characters of it are left out; fewer are text."""
        try:
            return (yield from self.accept(*literals))
        except TextCut:
            if len(self.text) - self.at >= HALF_MARK:
                self.at = len(self.text)
            return ""

    def space(self) -> Generator[None, None, str]:
        """Reads white space."""
        start = self.at
        while True:
            match = _SPACE.match(self.text, self.at)
            assert match is not None
            self.at = match.end()
            if self.at < len(self.text) or self.ended:
                return self.text[start : self.at]
            yield

    def peek(self) -> Generator[None, None, str]:
        """The next character, not read; "": the text has ended."""
        while self.at == len(self.text) and not self.ended:
            yield
        return self.text[self.at : self.at + 1]

    def until(self, *marks: str) -> Generator[None, None, tuple[str, str]]:
        """Reads up to the first of the marks, and the mark. Raises Cut if there is none."""
        start = seek = self.at
        longest = max(map(len, marks))
        while True:
            found = find(self.text, marks, seek)
            if found is not None:
                index, mark = found
                self.at = index + len(mark)
                return self.text[start:index], mark
            if self.ended:
                raise TextCut
            seek = max(start, len(self.text) - longest + 1)
            yield

    def json(self, first: str = "{") -> Generator[None, None, str]:
        """Reads an object or array of JSON. Raises Malformed if the text does not go on with `first`."""
        start = self.at
        if (yield from self.peek()) not in tuple(first):
            raise self.wrong()
        yield from self.brackets('"')
        return self.text[start : self.at]

    def brackets(self, quotes: str) -> Generator[None, None, None]:
        """Reads up to the bracket that closes the one at `at`. Brackets in strings do not count."""
        seek, depth, quote = self.at, 0, ""
        outside, inside = (
            re.compile(rf"[{quotes}{{}}\[\]()]"),
            {each: re.compile(rf"[{each}\\]") for each in quotes},
        )
        while True:
            match = (inside[quote] if quote else outside).search(self.text, seek)
            if match is None or (match[0] == "\\" and match.end() == len(self.text)):
                if self.ended:
                    raise TextCut
                seek = len(self.text) if match is None else match.start()
                yield
                continue
            seek = match.end()
            if match[0] == "\\":
                seek += 1
            elif quote:
                quote = ""
            elif match[0] in quotes:
                quote = match[0]
            else:
                depth += 1 if match[0] in "{[(" else -1
                if depth == 0:
                    self.at = seek
                    return


_SPACE = re.compile(r"\s*")


def find(text: str, marks: Sequence[str], start: int) -> tuple[int, str] | None:
    """The first of the marks in a text, and its index; of those at one position the longest."""
    found = [(index, -len(mark), mark) for mark in marks if (index := text.find(mark, start)) >= 0]
    if not found:
        return None
    index, _, mark = min(found)
    return index, mark


def may_begin(text: str, marks: Sequence[str]) -> int:
    """Characters at the end of the text that a mark may begin with."""
    for size in range(min(len(text), max(map(len, marks), default=0) - 1), 0, -1):
        if any(mark.startswith(text[-size:]) for mark in marks):
            return size
    return 0
