"""One stream of Decode.Generate: its running requests and its unsent messages."""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict, deque
from collections.abc import AsyncIterator, Iterable, Iterator, Set
from itertools import chain

from google.rpc import status_pb2

from baton.rpc.errors import BatonError, not_found, to_status
from baton.rpc.message_size import MAX_ANSWER_BYTES, PIECE_BYTES, cut
from baton.rpc.outbox import Outbox, byte_size
from baton.rpc.tasks import wait_at_most
from baton.v1 import common_pb2, decode_pb2
from baton.worker.caller_stream import CallerStream
from baton.worker.convert import FINISH_REASONS, logprobs_to, prompt_logprobs_to, status_of
from baton.worker.decode.types import (
    Admitted,
    DecodeOutput,
    DoneOutput,
    FailedOutput,
    PromptOutput,
    TokensOutput,
    Turn,
)

REMEMBERED = 8192
"""Number of ended requests per stream that are remembered; late cancels of these are expected."""


MAX_FINISHED_BYTES = 2**18
"""Bytes of logs of requests that have finished."""
MAX_LOGPROBS = 4096
"""Positions of a choice that a log keeps: with 20 alternatives 2 MB. What has more cannot be taken over."""


class DecodeStream(CallerStream):
    """One stream. Used on the event loop; the object itself is the stream's key in the core."""

    def __init__(self, incarnation: int, gather: float = 0.0) -> None:
        """`gather`: seconds between two messages with tokens, see `leaving`."""
        super().__init__(incarnation, Outbox(merge, size_of=byte_size))
        self._gather = gather
        self._due = 0.0  # from then on tokens that are not urgent may leave
        self._running: dict[int, int] = {}
        self._ended: OrderedDict[int, None] = OrderedDict()
        self._half_closed = False
        self._tokenless: set[int] = set()  # running requests of which no token has come yet
        self._urgent: set[int] = set()  # requests whose unsent messages do not wait
        self._news = asyncio.Event()  # set: the outbox holds something urgent
        self.logs: dict[int, decode_pb2.DecodeLog] = {}
        """Logs of requests with `keep_log` that run or have just finished: what has been sent may be lost
        with the caller."""
        self._finished_logs: deque[tuple[int, int]] = deque()  # their requests and sizes, oldest first
        self.orphaned = False
        """The caller is gone, and requests of it go on."""

    def begin(self, request: int, attempt: int) -> None:
        self._running[request] = attempt
        self._tokenless.add(request)

    def begin_log(self, start: decode_pb2.DecodeStart) -> None:
        """With what earlier attempts have delivered, of which there are no log-probabilities."""
        log = self.logs[start.request] = decode_pb2.DecodeLog()
        for index in range(start.n or 1):
            had = start.choices[index].token_ids if start.choices else ()
            log.choices.add(token_ids=had)

    def attempt_of(self, request: int) -> int | None:
        """The running attempt at a request; None when it is not running here."""
        return self._running.get(request)

    def has_ended(self, request: int) -> bool:
        return request in self._ended

    def runs(self, request: int, attempt: int) -> bool:
        """Whether this attempt runs. If it ended recently, the message was under way and is dropped; any
        other unknown attempt is refused."""
        known = self.attempt_of(request)
        if known == attempt:
            return True
        if known is not None or not self.has_ended(request):
            text = f"no attempt {attempt} of request {request} is running on this stream"
            self.refuse(request, attempt, not_found(text, "UNKNOWN_ATTEMPT"))
        return False

    def half_closed(self) -> None:
        """The caller sends no more. Its running requests are still answered, then the stream ends."""
        self._half_closed = True
        self._close_if_done()

    def close(self, error: BatonError | None = None) -> None:
        super().close(error)
        self._news.set()

    async def messages(self) -> AsyncIterator[decode_pb2.StepEvents]:
        """Yields the messages to write, until the outbox is closed and empty."""
        async for message in self.outbox:
            for piece in pieces(self.leaving(message, time.monotonic())):
                yield piece
            await self._wait()

    def due(self, now: float) -> float:
        """From when on what is unsent may leave."""
        return now if self._urgent or self.outbox.closed else self._due

    def leaving(self, message: decode_pb2.StepEvents, now: float) -> decode_pb2.StepEvents:
        """What leaves of a message that has been taken out of the outbox.

        After a message with tokens, the next tokens gather in the outbox, which merges them, for `gather`
        seconds. Events and first tokens do not wait. They leave together with the unsent tokens of their own
        requests, so that the order stays; tokens of other requests keep gathering. A message with urgent
        requests only does not start a new gathering time.
        """
        urgent, self._urgent = self._urgent, set()
        if now < self._due and urgent and not self.outbox.closed:
            rest = split(message, urgent)
            if rest.tokens:
                self.outbox.put(rest)
        elif any(delta.request not in urgent for delta in message.tokens):
            self._due = now + self._gather
        return message

    async def _wait(self) -> None:
        now = time.monotonic()
        seconds = self.due(now) - now
        if seconds <= 0:
            return
        self._news.clear()
        await wait_at_most(seconds, self._news)

    def _hurry(self, request: int) -> None:
        self._urgent.add(request)
        self._news.set()

    def send(self, message: decode_pb2.StepEvents) -> bool:
        """Returns False if the caller does not read. Its stream then ends, and its requests are to be
        cancelled."""
        if self.logs:
            self._log(message)
        if self.orphaned:
            return True
        if self._tokenless:
            for delta in message.tokens:
                if delta.request in self._tokenless:
                    self._tokenless.discard(delta.request)
                    self._hurry(delta.request)
        for event in message.events:
            self._hurry(event.request)
            kind = event.WhichOneof("kind")
            if kind in ("finished", "failed"):
                self._end(event.request, finished=kind == "finished")
        taken = self.put(message)
        self._close_if_done()
        return taken

    def _log(self, message: decode_pb2.StepEvents) -> None:
        for delta in message.tokens:
            if (log := self.logs.get(delta.request)) is None:
                continue
            choice = log.choices[delta.choice]
            choice.token_ids.extend(delta.token_ids)
            choice.logprobs.extend(delta.logprobs)
            choice.finish_reason = delta.finish_reason or choice.finish_reason
            if len(choice.logprobs) > MAX_LOGPROBS:
                del self.logs[delta.request]

    def refuse(self, request: int, attempt: int, error: BatonError) -> None:
        """Answers a message of the caller, which thus has not closed its side yet."""
        event = decode_pb2.DecodeEvent(request=request, attempt=attempt, failed=to_status(error))
        if self._running.get(request) == attempt:
            self._end(request)
        self._hurry(request)
        self.put(decode_pb2.StepEvents(events=[event]))

    def _end(self, request: int, *, finished: bool = False) -> None:
        self._running.pop(request, None)
        self._tokenless.discard(request)
        if not finished:
            self.logs.pop(request, None)
        elif (log := self.logs.get(request)) is not None:
            self._finished_logs.append((request, byte_size(log)))
            while sum(size for _, size in self._finished_logs) > MAX_FINISHED_BYTES:
                self.logs.pop(self._finished_logs.popleft()[0], None)
        self._ended[request] = None
        while len(self._ended) > REMEMBERED:
            self._ended.popitem(last=False)

    def _close_if_done(self) -> None:
        if self._half_closed and not self._running:
            self.close()


def merge(unsent: decode_pb2.StepEvents, new: decode_pb2.StepEvents) -> decode_pb2.StepEvents:
    """One message for two steps: tokens of one choice are joined. It leaves in `pieces`."""
    known = {(delta.request, delta.choice): delta for delta in unsent.tokens}
    for delta in new.tokens:
        into = known.get((delta.request, delta.choice))
        if into is None:
            unsent.tokens.append(delta)
        else:
            into.MergeFrom(delta)
    unsent.events.extend(new.events)
    unsent.step = new.step or unsent.step
    return unsent


def split(message: decode_pb2.StepEvents, requests: Set[int]) -> decode_pb2.StepEvents:
    """Leaves the events and the tokens of these requests in the message; returns the others' tokens."""
    rest = decode_pb2.StepEvents(step=message.step)
    rest.tokens.extend(delta for delta in message.tokens if delta.request not in requests)
    kept = [delta for delta in message.tokens if delta.request in requests]
    del message.tokens[:]
    message.tokens.extend(kept)
    return rest


def add_output(message: decode_pb2.StepEvents, output: DecodeOutput, page_bytes: int) -> None:
    """Appends an output of the core to a message."""
    if isinstance(output, TokensOutput):
        delta = message.tokens.add(
            request=output.request, attempt=output.attempt, choice=output.choice, token_ids=[output.token]
        )
        if output.logprobs is not None:
            delta.logprobs.append(logprobs_to(output.logprobs))
        if output.finish is not None:
            delta.finish_reason = FINISH_REASONS[output.finish]
        return
    if isinstance(output, PromptOutput):
        logprobs = prompt_logprobs_to(output.logprobs)
        add_prompt(message, output.request, output.attempt, output.cached_tokens, logprobs)
        return
    event = message.events.add(request=output.request, attempt=output.attempt)
    if isinstance(output, Admitted):
        event.admitted.SetInParent()
    elif isinstance(output, Turn):
        event.turn.SetInParent()
    elif isinstance(output, DoneOutput):
        event.finished.stats.CopyFrom(output.stats)
        event.finished.stats.pulled_bytes = output.stats.pulled_pages * page_bytes
    elif isinstance(output, FailedOutput):
        event.failed.CopyFrom(_status(output))


def _status(failed: FailedOutput) -> status_pb2.Status:
    return status_of(failed.code, failed.reason, failed.message, failed.field, failed.retry_after_ms)


TOKENS_PER_PIECE = PIECE_BYTES // 8
"""A token id takes up to five bytes."""
ENTRY_BYTES = 8
"""Bytes that a part adds to its message: its tag and its length."""
_BEFORE_TOKENS = ("prompt_logprobs", "prompt")


def pieces(message: decode_pb2.StepEvents) -> Iterator[decode_pb2.StepEvents]:
    """The message itself or, if it is too large, several that have the same effect one after another."""
    if byte_size(message) <= MAX_ANSWER_BYTES:
        yield message
        return
    before = [event for event in message.events if event.WhichOneof("kind") in _BEFORE_TOKENS]
    after = [event for event in message.events if event.WhichOneof("kind") not in _BEFORE_TOKENS]
    piece, size = decode_pb2.StepEvents(step=message.step), 0
    parts: Iterable[decode_pb2.DecodeEvent | decode_pb2.TokenDelta]
    parts = chain(before, chain.from_iterable(map(_cut_tokens, message.tokens)), after)
    for part in parts:
        more = byte_size(part) + ENTRY_BYTES
        if size and size + more > PIECE_BYTES:
            yield piece
            piece, size = decode_pb2.StepEvents(step=message.step), 0
        if isinstance(part, decode_pb2.TokenDelta):
            piece.tokens.append(part)
        else:
            piece.events.append(part)
        size += more
    yield piece


def _cut_tokens(delta: decode_pb2.TokenDelta) -> Iterator[decode_pb2.TokenDelta]:
    if byte_size(delta) <= PIECE_BYTES:
        yield delta
        return
    if delta.logprobs:
        counts = [len(run) for run in cut(delta.logprobs)]
    else:
        counts = [TOKENS_PER_PIECE] * (1 + (len(delta.token_ids) - 1) // TOKENS_PER_PIECE)
    first = 0
    for index, count in enumerate(counts):
        yield decode_pb2.TokenDelta(
            request=delta.request,
            attempt=delta.attempt,
            choice=delta.choice,
            token_ids=delta.token_ids[first : first + count],
            logprobs=delta.logprobs[first : first + count],
            finish_reason=delta.finish_reason if index == len(counts) - 1 else None,
        )
        first += count


def add_prompt(
    message: decode_pb2.StepEvents,
    request: int,
    attempt: int,
    cached_tokens: int,
    logprobs: list[common_pb2.PositionLogprobs],
) -> None:
    """Appends that the prompt is computed, in as many events as its log-probabilities need."""
    *first, last = cut(logprobs)
    for run in first:
        event = message.events.add(request=request, attempt=attempt)
        event.prompt_logprobs.positions.extend(run)
    event = message.events.add(request=request, attempt=attempt)
    event.prompt.cached_tokens = cached_tokens
    event.prompt.prompt_logprobs.extend(last)
