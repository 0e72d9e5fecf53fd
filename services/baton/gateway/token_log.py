"""A request's output, and how much of it the client has taken."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence

from google.rpc import status_pb2

from baton.gateway.parsed_output import OutputParsers, ParsedOutput
from baton.gateway.stop_strings import StopMatcher
from baton.rpc.validate import MAX_CHOICES, MAX_STOP_CHARACTERS, MAX_STOP_STRINGS
from baton.tokenizer.detokenize import Detokenizer
from baton.tokenizer.vocabulary import Vocabulary
from baton.v1 import common_pb2, inference_pb2

CONTEXT_TOKENS = 32
"""Prompt tokens as context: enough for a character that crosses the prompt's end, also with special tokens
in it."""
LOGPROBS_PER_DELTA = 512
"""Bounds the size of a merged delta: a position with 20 alternatives takes about 500 bytes."""


class ChoiceLog:
    """One choice: its output tokens, their log-probabilities and the text that is certain."""

    def __init__(self, index: int, stop: Sequence[str], min_tokens: int) -> None:
        self.index = index
        self.token_ids: list[int] = []
        """All tokens that decode nodes have sent. None of these positions is ever sampled again."""
        self.finish_reason = common_pb2.FINISH_REASON_UNSPECIFIED
        self._detokenizer: Detokenizer | None = None
        self._matcher = StopMatcher(stop)
        self._one_by_one = self._stops = bool(stop)
        self._min_tokens = min_tokens
        self._logprobs: list[common_pb2.PositionLogprobs] = []
        # With stop strings and log-probabilities: where each token's text begins, and what is shown ends.
        self._begins: list[int] = []
        self._fed = self._shown = 0
        # Invariant: the client's writer has taken everything before the marks.
        self._taken_tokens = 0
        self._pieces: list[str] = []
        self._taken_pieces = 0
        self._end_taken = False
        # Only with a parser: what it has made of the text.
        self._output: ParsedOutput | None = None

    @property
    def finished(self) -> bool:
        return bool(self.finish_reason)

    @property
    def unread(self) -> int:
        """Number of tokens that may be taken."""
        return self._ready - self._taken_tokens

    @property
    def _ready(self) -> int:
        """Tokens that may be taken, or have been. With log-probabilities not those whose text may become a
        stop string's: they would tell what the text does not."""
        if not self._begins or self.finish_reason:
            return len(self.token_ids)
        return bisect_left(self._begins, self._shown)

    @property
    def text(self) -> str:
        """All that the model wrote so far, without what is held back."""
        return "".join(self._pieces)

    @property
    def stop_matched(self) -> str:
        return self._matcher.matched

    @property
    def has_parsed(self) -> bool:
        """A parser has found something that is not taken."""
        return self._output is not None and self._output.fresh

    @property
    def ended_early(self) -> bool:
        """The gateway has ended the choice: the decode node goes on until it is cancelled."""
        return bool(self.stop_matched) or (self._output is not None and self._output.complete)

    @property
    def reasoning_tokens(self) -> int:
        return self._output.reasoning_tokens if self._output is not None else 0

    def begin(
        self, vocabulary: Vocabulary, prompt_ids: Sequence[int], output: ParsedOutput | None = None
    ) -> None:
        """Tokens that are pushed from now on are the vocabulary's. output: takes reasoning and tool calls
        out of the text."""
        keep = vocabulary.special_tokens(output.special) if output is not None else frozenset[int]()
        self._detokenizer = Detokenizer(vocabulary, prompt_ids[-CONTEXT_TOKENS:], keep=keep)
        self._output = output
        self._one_by_one = self._one_by_one or output is not None

    def push(
        self,
        token_ids: Sequence[int],
        logprobs: Sequence[common_pb2.PositionLogprobs],
        finish_reason: common_pb2.FinishReason,
    ) -> None:
        """Appends tokens of a decode node with their text. Tokens after a stop string are dropped: the
        node continues until the whole request is cancelled."""
        if not self._one_by_one or len(token_ids) <= 1:
            if not self.finish_reason:
                self._detokenize(token_ids, logprobs, finish_reason)
            return
        last = len(token_ids) - 1
        for index, token in enumerate(token_ids):
            if self.finish_reason:
                return
            reason = finish_reason if index == last else common_pb2.FINISH_REASON_UNSPECIFIED
            self._detokenize([token], logprobs[index : index + 1], reason)

    def _detokenize(
        self,
        token_ids: Sequence[int],
        logprobs: Sequence[common_pb2.PositionLogprobs],
        finish_reason: common_pb2.FinishReason,
    ) -> None:
        detokenizer = self._detokenizer
        assert detokenizer is not None, "not begun"
        if not finish_reason:
            text = detokenizer.feed(token_ids)
        else:
            # A token that ends the output (its own end of sequence, or one of stop_token_ids) has no text.
            ended_by_token = finish_reason == common_pb2.FINISH_REASON_STOP
            text = detokenizer.feed(token_ids[:-1] if ended_by_token else token_ids) + detokenizer.finish()
        if logprobs:
            fill_token_bytes(logprobs, detokenizer.vocabulary)
        self.append(token_ids, text, logprobs, finish_reason)

    def append(
        self,
        token_ids: Sequence[int],
        text: str,
        logprobs: Sequence[common_pb2.PositionLogprobs] = (),
        finish_reason: common_pb2.FinishReason = common_pb2.FINISH_REASON_UNSPECIFIED,
    ) -> None:
        """Appends tokens and the text that became certain with them.

        With stop strings, one token at a time, so that the token that completes a stop string is known; it is
        the choice's last. No stop string is looked for in the text of the first min_tokens tokens.
        """
        if self.finish_reason:
            raise RuntimeError("a finished choice takes no more tokens")
        self.token_ids.extend(token_ids)
        if logprobs:
            self._logprobs.extend(logprobs)
            if self._stops:
                self._begins += [self._fed] * len(token_ids)
        matching = self._one_by_one and len(self.token_ids) > self._min_tokens
        shown = self._matcher.feed(text) if matching else text
        if self._matcher.matched:
            self.finish_reason = common_pb2.FINISH_REASON_STOP
        elif finish_reason:
            shown += self._matcher.flush()
            self.finish_reason = finish_reason
        self._fed += len(text)
        self._shown += len(shown)
        if shown:
            self._pieces.append(shown)
        if self._output is not None:
            cut = bool(self.stop_matched) or self.finish_reason == common_pb2.FINISH_REASON_LENGTH
            self._output.add(shown, len(token_ids), ended=bool(self.finish_reason), cut=cut)
            if self._output.complete and not self.finish_reason:
                self.finish_reason = common_pb2.FINISH_REASON_STOP

    def take(self, id: str, include_token_ids: bool) -> inference_pb2.GenerateResponse | None:
        """New output since the last call, merged into a delta of request `id`; None if there is none."""
        start, end = self._taken_tokens, self._ready
        if self._logprobs:
            end = min(end, start + LOGPROBS_PER_DELTA)
        last = self.finished and end == len(self.token_ids) and not self._end_taken
        visible = start < end and (include_token_ids or self._logprobs)
        output = self._output
        fresh = output.fresh if output is not None else self._taken_pieces < len(self._pieces)
        if not (visible or fresh or last):
            self._taken_tokens = end
            return None
        response = inference_pb2.GenerateResponse(id=id)
        delta = response.delta  # filled in place: a message given to another one is copied
        if self.index:
            delta.choice = self.index
        if output is not None:
            output.fill(delta)
            if output.fresh:  # the last of these deltas has the tokens, so that none come before their end
                end = start
        else:
            delta.text = "".join(self._pieces[self._taken_pieces :])
        self._taken_tokens = end
        if include_token_ids:
            delta.token_ids.extend(self.token_ids[start:end])
        if self._logprobs:
            known = bisect_left(self._begins, self._shown) if self.stop_matched else end
            delta.logprobs.extend(self._logprobs[start : min(end, known)])
        if last and not self.has_parsed:
            self._end_taken = True
            delta.finish_reason = self.finish_reason
            if output is not None and output.calls and self.finish_reason == common_pb2.FINISH_REASON_STOP:
                delta.finish_reason = common_pb2.FINISH_REASON_TOOL_CALLS
            delta.stop_matched = self.stop_matched
        self._taken_pieces = len(self._pieces)
        return response


class TokenLog:
    """A request's prompt, output and terminal event.

    The log is the buffer between the decode node and the client: a slow client reads later, in larger deltas,
    and with too much unread the request pauses (`backpressure`). `take` hands out every event exactly once:
    accepted, deltas, and at last the one terminal event.
    """

    def __init__(
        self,
        id: str,
        *,
        n: int = 1,
        stop: Sequence[str] = (),
        min_tokens: int = 0,
        include_token_ids: bool = True,
        await_prompt_logprobs: bool = False,
    ) -> None:
        self.id = id
        self.prompt_ids: list[int] = []
        self.cached_tokens = 0
        self.image_tokens = 0
        """Those of prompt_ids that stand for images."""
        self.choices = [ChoiceLog(index, stop, min_tokens) for index in range(n)]
        self.terminal: inference_pb2.Finished | status_pb2.Status | None = None
        self._include_token_ids = include_token_ids
        self._accepted: inference_pb2.Accepted | None = None
        self._prompt_logprobs: Sequence[common_pb2.PositionLogprobs] | None = None
        self._prompt_logprobs_due = await_prompt_logprobs
        self._terminal_taken = False

    def begin(
        self, vocabulary: Vocabulary, prompt_ids: list[int], parsers: OutputParsers | None, name: str
    ) -> None:
        """name: the request's first one, from which calls of tools have their ids."""
        self.prompt_ids = prompt_ids
        for choice in self.choices:
            output = parsers.make(f"{name} {choice.index}") if parsers is not None else None
            choice.begin(vocabulary, prompt_ids, output)

    @property
    def output_tokens(self) -> int:
        return sum(len(choice.token_ids) for choice in self.choices)

    @property
    def has_output(self) -> bool:
        """A decode node has sent tokens."""
        return any(choice.token_ids for choice in self.choices)

    @property
    def unread(self) -> int:
        """Output tokens that have not been taken."""
        unread = 0
        for choice in self.choices:
            unread += choice.unread
        return unread

    @property
    def complete(self) -> bool:
        """All choices have finished."""
        for choice in self.choices:  # noqa: SIM110 - asked at each token, and three times as fast
            if not choice.finish_reason:
                return False
        return True

    @property
    def more(self) -> bool:
        """Whether `take` has more: one call returns a bounded amount."""
        return self.unread > 0 or (self.terminal is not None and not self._terminal_taken)

    @property
    def drained(self) -> bool:
        """Everything, the terminal event included, has been taken."""
        return self._terminal_taken

    def wrong(
        self,
        number: int,
        token_ids: Sequence[int],
        max_tokens: int,
        vocab_size: int,
        logprobs: int | None = None,
    ) -> str:
        """Why these cannot be the next tokens of choice `number`; empty: they can. logprobs: how many came
        with them; None: none are asked for."""
        if number >= len(self.choices):
            return "an unknown choice"
        choice = self.choices[number]
        if choice.finish_reason and not choice.ended_early:
            return "tokens after a choice's last"
        if len(choice.token_ids) + len(token_ids) > max_tokens:
            return "more tokens than max_tokens"
        if token_ids and max(token_ids) >= vocab_size:
            return f"token {max(token_ids)} of a vocabulary of {vocab_size}"
        if logprobs is not None and logprobs != len(token_ids):
            return f"{logprobs} log-probabilities for {len(token_ids)} tokens"
        return ""

    def accept(self, accepted: inference_pb2.Accepted) -> None:
        self._accepted = accepted

    def set_prompt_logprobs(self, logprobs: Sequence[common_pb2.PositionLogprobs]) -> None:
        """They go into the first delta; no delta is taken before they arrive."""
        self._prompt_logprobs = logprobs

    def finish(self, finished: inference_pb2.Finished) -> bool:
        """Finishes the request. Returns False and changes nothing if it has ended before."""
        return self._end(finished)

    def fail(self, status: status_pb2.Status) -> bool:
        """Fails the request. Returns False and changes nothing if it has ended before."""
        return self._end(status)

    def _end(self, terminal: inference_pb2.Finished | status_pb2.Status) -> bool:
        if self.terminal is not None:
            return False
        self.terminal = terminal
        return True

    def take(self) -> list[inference_pb2.GenerateResponse]:
        """The events since the last call, in order; large ones in pieces: call again while it has `more`."""
        events: list[inference_pb2.GenerateResponse] = []
        if self._accepted is not None:
            events.append(inference_pb2.GenerateResponse(id=self.id, accepted=self._accepted))
            self._accepted = None
        deltas = self._take_deltas()
        events += deltas
        if self.terminal is None or self._terminal_taken or (deltas and self.unread):
            return events
        self._terminal_taken = True
        if isinstance(self.terminal, status_pb2.Status):
            events.append(inference_pb2.GenerateResponse(id=self.id, failed=self.terminal))
        else:
            events.append(inference_pb2.GenerateResponse(id=self.id, finished=self.terminal))
        return events

    def _take_deltas(self) -> list[inference_pb2.GenerateResponse]:
        if self._prompt_logprobs_due and self._prompt_logprobs is None:
            return []
        deltas = []
        for choice in self.choices:
            delta = choice.take(self.id, self._include_token_ids)
            while delta is not None:
                deltas.append(delta)
                more = choice.has_parsed
                delta = choice.take(self.id, self._include_token_ids) if more else None
        if self._prompt_logprobs is not None and deltas:
            deltas[0].delta.prompt_logprobs.extend(self._prompt_logprobs)
            self._prompt_logprobs, self._prompt_logprobs_due = None, False
        return deltas


def fill_token_bytes(logprobs: Sequence[common_pb2.PositionLogprobs], vocabulary: Vocabulary) -> None:
    """Fills in the bytes of the tokens."""
    for position in logprobs:
        if position.HasField("chosen"):
            position.chosen.token_bytes = vocabulary.bytes_of(position.chosen.token_id)
        for entry in position.top:
            entry.token_bytes = vocabulary.bytes_of(entry.token_id)


def new_log(start: inference_pb2.GenerateStart) -> TokenLog:
    """The token log of an unchecked request; what the log keeps is bounded here."""
    sampling = start.sampling
    return TokenLog(
        start.id,
        n=min(start.n, MAX_CHOICES) if start.HasField("n") else 1,
        stop=[text[:MAX_STOP_CHARACTERS] for text in sampling.stop[:MAX_STOP_STRINGS]],
        min_tokens=sampling.min_tokens,
        include_token_ids=start.include_token_ids if start.HasField("include_token_ids") else True,
        await_prompt_logprobs=sampling.HasField("prompt_logprobs"),
    )
