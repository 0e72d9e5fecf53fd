"""One choice on its way from its decode nodes through a detokenizer into the token log."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from baton.gateway.token_log import ChoiceLog
from baton.gateway.tokenizer import Tokenizer
from baton.rpc.errors import BatonError, from_status, internal
from baton.v1 import common_pb2, decode_pb2, tokenizer_pb2

CONTEXT_TOKENS = 32
"""Of what comes before: enough for a character that lies across the border, special tokens between its bytes
included. So a detokenizer that begins after any token goes on as the one before it would have."""


@dataclass(slots=True)
class _Item:
    """What was sent to the detokenizer and not yet answered."""

    token_ids: Sequence[int]
    logprobs: Sequence[common_pb2.PositionLogprobs]
    finish_reason: common_pb2.FinishReason
    on_answer: Callable[[], None] | None = None


class ChoiceStream:
    """Tokens go out to the detokenizer in order and enter the log, with their text, as the answers come.

    The log and the items that are not answered yet are all that is needed to go on: with other decode nodes,
    and with another tokenizer.

    one_by_one: every token is an item of its own, so that the text of each is known (stop strings).
    on_progress: the log has new tokens. on_error: the choice cannot go on.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        log: ChoiceLog,
        prompt_ids: Sequence[int],
        *,
        one_by_one: bool,
        on_progress: Callable[[], None],
        on_error: Callable[[BatonError], None],
    ) -> None:
        self.log = log
        self._tokenizer = tokenizer
        self._before = prompt_ids[-CONTEXT_TOKENS:]
        self._opened = False
        """The detokenizer has been given the context."""
        self._one_by_one = one_by_one
        self._on_progress = on_progress
        self._on_error = on_error
        self._pending: deque[_Item] = deque()
        self._id = tokenizer.open(self)

    def wrong(self, delta: decode_pb2.TokenDelta, sampling: common_pb2.SamplingParams) -> str:
        """What a decode node must not send; empty: nothing is wrong."""
        if self.log.ended:
            return "tokens after a choice's last"
        if len(self.log.received) + len(delta.token_ids) > sampling.max_tokens:
            return "more tokens than max_tokens"
        if sampling.HasField("logprobs") and len(delta.logprobs) != len(delta.token_ids):
            return f"{len(delta.logprobs)} log-probabilities for {len(delta.token_ids)} tokens"
        return ""

    def push(self, delta: decode_pb2.TokenDelta) -> None:
        """Takes tokens from a decode node."""
        if self.log.finished:
            return  # by a stop string: the node goes on until all of the request is cancelled
        token_ids, logprobs, finish_reason = delta.token_ids[:], delta.logprobs[:], delta.finish_reason
        self.log.receive(token_ids, bool(finish_reason))
        if not self._one_by_one or len(token_ids) <= 1:
            self._send(_Item(token_ids, logprobs, finish_reason))
            return
        for index in range(len(token_ids)):
            last = index + 1 == len(token_ids)
            reason = finish_reason if last else common_pb2.FINISH_REASON_UNSPECIFIED
            self._send(_Item(token_ids[index : index + 1], logprobs[index : index + 1], reason))

    def fill_token_bytes(
        self, logprobs: Sequence[common_pb2.PositionLogprobs], on_answer: Callable[[], None]
    ) -> None:
        """Fills the token_bytes of positions outside the output, then calls on_answer."""
        self._send(_Item((), logprobs, common_pb2.FINISH_REASON_UNSPECIFIED, on_answer))

    def close(self) -> None:
        self._pending.clear()
        self._tokenizer.close_stream(self._id, self)

    def on_text(self, output: tokenizer_pb2.DetokenizeOutput) -> None:
        if output.HasField("error"):
            error = from_status(output.error)
            self._on_error(internal(f"the decode node's tokens have no text: {error.message}", "BAD_TOKENS"))
            return
        if not self._pending:
            return
        item = self._pending.popleft()
        if item.logprobs:
            for entry, token_bytes in zip(_entries(item.logprobs), output.token_bytes, strict=False):
                entry.token_bytes = token_bytes
        if item.on_answer is not None:
            item.on_answer()
            return
        self.log.append(item.token_ids, output.text, item.logprobs, item.finish_reason)
        if self.log.stop_matched:
            self.close()
        self._on_progress()

    def on_tokenizer_changed(self) -> None:
        self._opened = False
        self._id = self._tokenizer.open(self)
        for item in self._pending:
            self._push(item)

    def on_detokenizer_lost(self, error: BatonError) -> None:
        self._on_error(error)

    def _send(self, item: _Item) -> None:
        self._pending.append(item)
        self._push(item)

    def _push(self, item: _Item) -> None:
        # A token that ends the output (its own end of sequence, or one of stop_token_ids) has no text.
        ended_by_token = item.finish_reason == common_pb2.FINISH_REASON_STOP
        request = self._tokenizer.push(self._id)
        if request is None:
            return
        request.token_ids.extend(item.token_ids[:-1] if ended_by_token else item.token_ids)
        if item.finish_reason:
            request.finish = True
        if item.logprobs:
            request.token_bytes_of.extend([entry.token_id for entry in _entries(item.logprobs)])
        if not self._opened:
            self._opened = True
            request.context.extend([*self._before, *self.log.token_ids[-CONTEXT_TOKENS:]])


def _entries(logprobs: Iterable[common_pb2.PositionLogprobs]) -> Iterable[common_pb2.TokenLogprob]:
    for position in logprobs:
        if position.HasField("chosen"):
            yield position.chosen
        yield from position.top
