"""gpt-oss: messages on channels, the Harmony format (https://github.com/openai/harmony).

<|channel|>analysis<|message|>reasoning<|end|><|start|>assistant to=functions.f<|channel|>commentary
<|constrain|>json<|message|>{"x": 1}<|call|>

The library `openai-harmony` reads tokens of its own vocabulary, which it fetches from the network; this reads
text.
"""

from __future__ import annotations

import re
from collections.abc import Generator

from baton.parsers.reader import Malformed, ParsedReasoning, ParsedText, TextCut, find, may_begin
from baton.parsers.tools import MAX_VAIN, ToolParser, loads

_START, _MESSAGE, _CHANNEL = "<|start|>", "<|message|>", "<|channel|>"
_ENDS = ("<|end|>", "<|call|>", "<|return|>")
GPT_OSS_MARKS = (_START, _MESSAGE, _CHANNEL, *_ENDS)


class GptOss(ToolParser):
    SPECIAL = (_START, _MESSAGE, _CHANNEL, "<|constrain|>", *_ENDS)
    MARKS = ()

    def calls(self, mark: str) -> Generator[None, None, None]:
        raise NotImplementedError

    def run(self) -> Generator[None, None, None]:
        space = yield from self.space()
        begun = yield from self.opening(_CHANNEL, _START, "to=")
        if not begun:
            self.put(space)
            yield from self.pass_text()  # no messages: plain text
            if self._space:
                self.events.append(ParsedText(self._space))
            return
        self.at -= len(begun)
        try:
            while (yield from self.peek()):
                yield from self._message()
        except TextCut:
            pass

    def _message(self) -> Generator[None, None, None]:
        self.forget()
        header, _ = yield from self.until(_MESSAGE)
        header = header.rpartition(_START)[2]
        channels = re.findall(r"<\|channel\|>\s*([a-z]+)", header)
        recipient = re.search(r"to=([^\s<]+)", header)
        self.in_reasoning = channels[-1:] == ["analysis"] and recipient is None
        call = recipient is not None and recipient[1].startswith("functions.")
        if recipient is not None and call and self.vain < MAX_VAIN:
            self._begin = self.at
            yield from self.space()
            try:
                arguments = loads((yield from self.json()))
                self.call(recipient[1].removeprefix("functions."), arguments)
            except Malformed:
                self.vain += self.at - self._begin
                self.at = self._begin
                yield from self._body(ParsedText)
                return
            yield from self._body(None)
        elif recipient is not None and not call and recipient[1] != "assistant":
            yield from self._body(None)  # for a tool of its own, which nobody offers
        else:
            yield from self._body(ParsedReasoning if self.in_reasoning else ParsedText)
        self.in_reasoning = False

    def _body(self, kind: type[ParsedText] | type[ParsedReasoning] | None) -> Generator[None, None, None]:
        """Reads up to the end of the message: a mark of an end that another message or nothing follows."""
        while True:
            found = find(self.text, _ENDS, self.at)
            end = found[0] if found is not None else len(self.text)
            if found is None and not self.ended:
                end -= may_begin(self.text[self.at :], _ENDS)
            if kind is not None and end > self.at:
                self.events.append(kind(self.text[self.at : end]))
            self.at = end
            if found is not None:
                self.at += len(found[1])
                if (yield from self.accept(_START)) or not (yield from self.peek()):
                    return
                if kind is not None:
                    self.events.append(kind(found[1]))
                continue
            if self.ended:
                return
            yield
