"""The streams of Decode.Generate as seen from inside: what each has started and must still be told."""

from __future__ import annotations

import asyncio
from collections import OrderedDict

from google.rpc import status_pb2

from baton.decode.outputs import Done, Failed, Output, Prompt, Tokens
from baton.rpc.errors import BatonError, exhausted, not_found, to_status
from baton.rpc.outbox import Outbox, OutboxFull, byte_size
from baton.v1 import decode_pb2
from baton.worker.convert import FINISH_REASONS, logprobs_to, prompt_logprobs_to
from baton.worker.node import status_of

REMEMBERED = 8192
"""Ended requests per stream whose late cancels are expected."""


class Caller:
    """One stream. Used on the event loop; its identity names it to the core."""

    def __init__(self, incarnation: int) -> None:
        self.incarnation = incarnation
        self.outbox: Outbox[decode_pb2.StepEvents] = Outbox(merge, size_of=byte_size)
        self.error: BatonError | None = None
        self._running: dict[int, int] = {}
        self._ended: OrderedDict[int, None] = OrderedDict()
        self._half_closed = False
        self._urgent = asyncio.Event()

    def begin(self, request: int, attempt: int) -> None:
        self._running[request] = attempt

    def attempt_of(self, request: int) -> int | None:
        """The running attempt at a request; None when it is not running here."""
        return self._running.get(request)

    def has_ended(self, request: int) -> bool:
        return request in self._ended

    def runs(self, request: int, attempt: int) -> bool:
        """Whether a message about this attempt can be acted on. One that its terminal event has crossed is
        expected; any other is refused."""
        known = self.attempt_of(request)
        if known == attempt:
            return True
        if known is not None or not self.has_ended(request):
            text = f"no attempt {attempt} of request {request} is running on this stream"
            self.refuse(request, attempt, not_found(text, "UNKNOWN_ATTEMPT"))
        return False

    def half_closed(self) -> None:
        """The caller sends no more; what it has started is still answered, then the stream ends."""
        self._half_closed = True
        self._close_if_done()

    async def pause(self, seconds: float) -> None:
        """Lets tokens gather in the outbox, which merges them, for so long at most: a message with events (a
        request's first token, its end) ends the pause."""
        self._urgent.clear()
        try:
            async with asyncio.timeout(seconds):
                await self._urgent.wait()
        except TimeoutError:
            return

    def send(self, message: decode_pb2.StepEvents) -> bool:
        """False: the caller does not read, and its stream ends; what it has started is of no use any more."""
        if message.events:
            self._urgent.set()
        for event in message.events:
            if event.WhichOneof("kind") in ("finished", "failed"):
                self._end(event.request)
        taken = self._put(message)
        self._close_if_done()
        return taken

    def refuse(self, request: int, attempt: int, error: BatonError) -> None:
        event = decode_pb2.DecodeEvent(request=request, attempt=attempt, failed=to_status(error))
        if self._running.get(request) == attempt:
            self._end(request)
        self._urgent.set()
        self._put(decode_pb2.StepEvents(events=[event]))
        self._close_if_done()

    def _put(self, message: decode_pb2.StepEvents) -> bool:
        try:
            return self.outbox.put(message)
        except OutboxFull as full:
            self.error = exhausted(f"the caller does not read: {full}", "SLOW_READER")
            self.outbox.close()
            return False

    def _end(self, request: int) -> None:
        self._running.pop(request, None)
        self._ended[request] = None
        while len(self._ended) > REMEMBERED:
            self._ended.popitem(last=False)

    def _close_if_done(self) -> None:
        if self._half_closed and not self._running:
            self.outbox.close()


def merge(unsent: decode_pb2.StepEvents, new: decode_pb2.StepEvents) -> decode_pb2.StepEvents:
    """One message for two steps: tokens of one choice are joined, so the tokens bound its size."""
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


def add_output(message: decode_pb2.StepEvents, output: Output, page_bytes: int) -> None:
    """Appends what the core says to a message."""
    if isinstance(output, Tokens):
        delta = message.tokens.add(
            request=output.request, attempt=output.attempt, choice=output.choice, token_ids=[output.token]
        )
        if output.logprobs is not None:
            delta.logprobs.append(logprobs_to(output.logprobs))
        if output.finish is not None:
            delta.finish_reason = FINISH_REASONS[output.finish]
        return
    event = message.events.add(request=output.request, attempt=output.attempt)
    if isinstance(output, Prompt):
        event.prompt.cached_tokens = output.cached_tokens
        event.prompt.prompt_logprobs.extend(prompt_logprobs_to(output.logprobs))
    elif isinstance(output, Done):
        stats = output.stats
        event.finished.stats.CopyFrom(
            decode_pb2.RequestStats(
                prompt_tokens=stats.prompt_tokens,
                cached_tokens=stats.cached_tokens,
                output_tokens=stats.output_tokens,
                pulled_pages=stats.pulled_pages,
                pulled_bytes=stats.pulled_pages * page_bytes,
                transport=stats.transport,
                prefill_address=stats.prefill_address,
                retractions=stats.retractions,
                handoff_retries=stats.handoff_retries,
            )
        )
    elif isinstance(output, Failed):
        event.failed.CopyFrom(_status(output))


def _status(failed: Failed) -> status_pb2.Status:
    return status_of(failed.code, failed.reason, failed.message, failed.field, failed.retry_after_ms)
