"""Ids of server-sent events say what a client has, so that another gateway can go on from `Last-Event-ID`.

Of each choice: characters of text and of reasoning, tool calls, log-probabilities, and its finish reason,
all as numbers, with points between them and a comma between choices. Where one piece of output makes several
events: also how many of them follow that position, and the number of all events, behind slashes.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import cast

from baton.api.openai_errors import ApiError
from baton.gateway.resumption import Unseen, says_something
from baton.v1 import common_pb2, inference_pb2

TICKET_HEADER = "x-baton-resume"
POSITION_HEADER = "last-event-id"
_CHOICE = r"\d{1,10}\.\d{1,10}\.\d{1,6}\.\d{1,10}\.\d"
_COUNTS = r"/(\d{1,2})/(\d{1,10})"


class StreamPosition:
    """What the client of a stream has, and what it had when the stream began."""

    def __init__(
        self,
        starts: Sequence[inference_pb2.GenerateStart],
        resume: inference_pb2.GenerateResume | None,
        counts: tuple[int, int] | None = None,
    ) -> None:
        """resume: another gateway had begun the one request. counts: of events that its client has."""
        start = starts[0]
        prompt_logprobs = start.sampling.HasField("prompt_logprobs")
        self._possible = len(starts) == 1 and not start.include_token_ids and not prompt_logprobs
        self._had: list[inference_pb2.ReceivedChoice] = []
        self._unseen = list(map(Unseen.of, resume.choices)) if resume is not None else []
        self.begun = resume is not None and any(map(says_something, resume.choices))
        """The client has the beginning of the stream."""
        self.ticket = ""
        """Empty: no other gateway can go on with the stream."""
        self._n = start.n or 1
        self._resume = resume
        self._counts = counts

    @property
    def counts(self) -> tuple[int, int]:
        """Events that the client has: behind its position, and all."""
        return self._counts or (0, 0)

    def keep(self, possible: bool, counted: bool = False) -> bool:
        """Whether another gateway may go on with the answer. possible: by its form. counted: ids of its
        events have counts. Raises ApiError if this one is to go on with it, and that is not possible."""
        if (self.begun and self._counts is None) if counted else self._counts is not None:
            raise _no_id()
        if possible and self._possible:
            self._had = (
                list(self._resume.choices) if self._resume is not None else parse_position("", self._n)
            )
            return True
        if self._resume is not None:
            text = f"only streams of one prompt, without echo, go on with {TICKET_HEADER}: send it without"
            raise ApiError(400, text, TICKET_HEADER)
        return False

    def split(
        self, delta: inference_pb2.Delta
    ) -> tuple[inference_pb2.Delta | None, inference_pb2.Delta | None]:
        """What the client has of a delta, and what it has not."""
        if not self._unseen:
            return None, delta
        seen = self._unseen[delta.choice].split(delta)
        delta.choice = seen.choice
        return seen if says_something(seen) else None, delta if says_something(delta) else None

    def after(self, delta: inference_pb2.Delta) -> str:
        """The client will have the delta: its position then, the id of the event; empty: there is none."""
        if not self._had or not self.ticket:
            return ""
        had = self._had[delta.choice]
        had.text_characters += len(delta.text)
        had.reasoning_characters += len(delta.reasoning)
        had.tool_calls += len(delta.tool_calls)
        had.logprobs += len(delta.logprobs)
        had.finish_reason = delta.finish_reason or had.finish_reason
        return str(self)

    def __str__(self) -> str:
        if not self.ticket:
            return ""
        return ",".join(
            f"{had.text_characters}.{had.reasoning_characters}.{had.tool_calls}.{had.logprobs}."
            f"{had.finish_reason}"
            for had in self._had
        )


def parse_position(text: str, n: int) -> list[inference_pb2.ReceivedChoice]:
    """Empty: the client has nothing. Raises ApiError."""
    if not text:
        return [inference_pb2.ReceivedChoice(logprobs=0) for _ in range(n)]
    if not re.fullmatch(f"{_CHOICE}(,{_CHOICE}){{{n - 1}}}", text):
        raise _no_id()
    made = []
    for choice in text.split(","):
        characters, reasoning, calls, logprobs, finish = map(int, choice.split("."))
        had = inference_pb2.ReceivedChoice(
            text_characters=characters, reasoning_characters=reasoning, tool_calls=calls, logprobs=logprobs
        )
        if finish not in common_pb2.FinishReason.values():
            raise _no_id()
        had.finish_reason = cast(common_pb2.FinishReason, finish)
        made.append(had)
    return made


def _no_id() -> ApiError:
    return ApiError(400, f"{POSITION_HEADER} is no id of an event of this request", POSITION_HEADER)


def resume_from(
    ticket: str, position: str, starts: Sequence[inference_pb2.GenerateStart]
) -> tuple[inference_pb2.GenerateResume, tuple[int, int] | None]:
    """What the client has, and its counts of events; None: its ids have none. Raises ApiError."""
    if len(starts) != 1:
        raise ApiError(400, f"{TICKET_HEADER} goes with one prompt only", TICKET_HEADER)
    counts = None
    if found := re.search(f"{_COUNTS}$", position):
        counts = int(found[1]), int(found[2])
        position = position[: found.start()]
        if counts[0] > counts[1]:
            raise _no_id()
    choices = parse_position(position, starts[0].n or 1)
    return inference_pb2.GenerateResume(ticket=ticket, choices=choices), counts
