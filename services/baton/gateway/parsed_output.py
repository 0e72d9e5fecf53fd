"""The output of a chat, taken apart: reasoning, answer and tool calls, as far as the client has not taken
them."""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import sha256
from itertools import pairwise

from baton.gateway.tool_grammars import callable_tools, constrain, most_calls
from baton.parsers.reader import ParsedCall, ParsedReasoning, ParsedText, ParserEvent, Reader
from baton.parsers.registry import REASONING_PARSERS, make_parser
from baton.rpc.errors import invalid_field
from baton.tokenizer.vocabulary import Vocabulary
from baton.v1 import common_pb2, inference_pb2, node_pb2, tokenizer_pb2

_PLACES = {ParsedReasoning: 0, ParsedText: 1, ParsedCall: 2}
"""In a delta."""


class ParsedOutput:
    """The parsed output of one choice. most_calls: after so many the choice is complete; 0: no limit.
    name: the choice's, from which its calls have their ids: a resumed request has the same."""

    def __init__(self, parser: Reader, most_calls: int, name: str) -> None:
        self.calls = 0
        self.complete = False
        self.reasoning_tokens = 0
        self._undecided = 0
        self._parser = parser
        self._most_calls = most_calls
        self._name = name
        self._taken_calls = 0
        self._events: list[ParserEvent] = []
        self._ended = False

    @property
    def special(self) -> Sequence[str]:
        """Special tokens that the parser needs to see."""
        return self._parser.SPECIAL

    @property
    def fresh(self) -> bool:
        """There is something that has not been taken."""
        return bool(self._events)

    def add(self, text: str, tokens: int, *, ended: bool, cut: bool) -> None:
        """Takes new text, of so many tokens. ended: it is the last; cut: by a stop string or a limit of
        tokens."""
        if self._ended:
            return
        reasoned = self._parser.in_reasoning
        events = self._parser.feed(text) if text else []
        if reasoned or self._parser.in_reasoning:
            self.reasoning_tokens += tokens + self._undecided
            self._undecided = 0
        else:  # without an event they may become the mark that begins the reasoning
            self._undecided = 0 if events else self._undecided + tokens
        if ended:
            self._ended = True
            events += self._parser.finish(cut=cut)
        for event in events:
            if isinstance(event, ParsedCall):
                if self.complete:
                    continue
                self.calls += 1
                if self.calls == self._most_calls:
                    self.complete = self._ended = True
            if not self.complete or isinstance(event, ParsedCall):
                self._events.append(event)

    def fill(self, delta: inference_pb2.Delta) -> None:
        """Puts what is fresh into a delta: as much as keeps its order, which in a delta is reasoning, text,
        calls."""
        order = [_PLACES[type(event)] for event in self._events]
        count = next((i for i, (a, b) in enumerate(pairwise(order), 1) if a > b), len(order))
        events, self._events = self._events[:count], self._events[count:]
        delta.text = "".join(event.text for event in events if isinstance(event, ParsedText))
        delta.reasoning = "".join(event.text for event in events if isinstance(event, ParsedReasoning))
        for event in events:
            if isinstance(event, ParsedCall):
                id = call_id(f"{self._name} {self._taken_calls}")
                delta.tool_calls.add(id=id, name=event.name, arguments=event.arguments)
                self._taken_calls += 1


def call_id(name: str) -> str:
    """Nine letters and digits at the end, the form that Mistral's templates want of a whole id."""
    return f"call_{sha256(name.encode()).hexdigest()[:9]}"


class OutputParsers:
    """Makes the parsers of a chat request's choices."""

    def __init__(self, chat: tokenizer_pb2.ChatPrompt, rendered: str, model: node_pb2.ModelInfo) -> None:
        """rendered: the end of the prompt's text. Raises BatonError for tools where it is not known how the
        model calls them."""
        self._formats = (model.tool_format, model.reasoning_format)
        self._tools = {tool.name: tool.parameters for tool in callable_tools(chat)}
        if self._tools and not model.tool_format:
            text = ": how this model calls tools is not known; give the gateway --tool-parser"
            raise invalid_field("chat.tools", text)
        end = rendered.rstrip()
        begins, ends = ("<think>", "[THINK]"), ("</think>", "[/THINK]")
        if chat.continue_final_message:
            find = chat.messages[-1].content.rfind
            self._opened = max(map(find, begins)) > max(map(find, ends))
            over = not self._opened
        else:
            self._opened, over = end.endswith(begins), end.endswith(ends)
        self._reasons = model.reasoning_format in REASONING_PARSERS and not over
        self._chat = chat
        self._most_calls = most_calls(chat)

    def constrain(self, sampling: common_pb2.SamplingParams, vocabulary: Vocabulary) -> None:
        """Gives the parameters a grammar that holds the output to the tools, and holds what comes after the
        reasoning to the grammar that they have. Raises BatonError."""
        grammar = constrain(
            self._chat, sampling, vocabulary, self._formats, reasons=self._reasons, opened=self._opened
        )
        if grammar is not None:
            sampling.grammar.CopyFrom(grammar)

    def make(self, name: str) -> ParsedOutput | None:
        """For the choice of that name; None: all of its output is the answer."""
        parser = make_parser(*self._formats, self._tools, opened=self._opened)
        return ParsedOutput(parser, self._most_calls, name) if parser is not None else None
