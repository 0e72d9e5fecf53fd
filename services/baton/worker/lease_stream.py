"""The streams of a worker's lease holders: of Prefill.Run and Cache.Lend."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator

from baton.handoff.messages import (
    ChunkAnnounced,
    DraftsAnnounced,
    FirstSampled,
    LeaseFinished,
    PrefillFailed,
    PrefillOutput,
    RecentNames,
)
from baton.rpc.message_size import MAX_ANSWER_BYTES, cut
from baton.rpc.outbox import Outbox, byte_size
from baton.v1 import common_pb2, prefill_pb2
from baton.worker.caller_stream import CallerStream
from baton.worker.convert import logprobs_to, name_to, prompt_logprobs_to, status_of, tiers_to
from baton.worker.hidden_states import hidden_to


class LeaseStream(CallerStream):
    """One stream, and the names that were started on it."""

    def __init__(self, incarnation: int) -> None:
        super().__init__(incarnation, Outbox(_merge, size_of=byte_size))
        self.names = RecentNames()
        self.hidden_layers: tuple[int, ...] = ()
        """HiddenTap.layers that the caller wants with first tokens."""
        self.drafts = False
        """Whether the caller has the drafter that this worker has."""

    async def messages(self) -> AsyncIterator[prefill_pb2.PrefillResponse]:
        async for message in self.outbox:
            if byte_size(message) <= MAX_ANSWER_BYTES:
                yield message
                continue
            for run in cut(message.events):
                yield prefill_pb2.PrefillResponse(events=run)


def _merge(
    unsent: prefill_pb2.PrefillResponse, new: prefill_pb2.PrefillResponse
) -> prefill_pb2.PrefillResponse:
    unsent.events.extend(new.events)
    return unsent


def events_of(output: PrefillOutput) -> Iterator[prefill_pb2.PrefillEvent]:
    """More than one where log-probabilities are too large for one message."""
    event = prefill_pb2.PrefillEvent(attempt=name_to(output.name))
    if isinstance(output, ChunkAnnounced):
        chunk = event.chunk
        chunk.last, chunk.step, chunk.content = output.last, output.step, output.content
        for each in output.groups:
            chunk.groups.add(first_page=each.first, page_ids=each.pages, generations=each.generations)
    elif isinstance(output, FirstSampled):
        *first, last = cut(prompt_logprobs_to(output.prompt_logprobs or None))
        for run in first:
            positions = common_pb2.PromptLogprobs(positions=run)
            yield prefill_pb2.PrefillEvent(attempt=event.attempt, prompt_logprobs=positions)
        event.first.cached_tokens = output.cached_tokens
        if (tiers := tiers_to(output.tiers)) is not None:
            event.first.cached_tiers.CopyFrom(tiers)
        event.first.prompt_logprobs.extend(last)
        if output.hidden is not None:
            event.first.hidden = hidden_to(output.hidden)
        for token, logprobs in output.tokens:
            sampled = event.first.tokens.add(token_id=token)
            if logprobs is not None:
                sampled.logprobs.CopyFrom(logprobs_to(logprobs))
    elif isinstance(output, DraftsAnnounced):
        event.drafts.entries = output.entries
        for each in output.groups:
            event.drafts.groups.add(page_ids=each.pages, generations=each.generations)
    elif isinstance(output, LeaseFinished):
        event.finished.stood = output.stood
    elif isinstance(output, PrefillFailed):
        event.failed.CopyFrom(status_of(output.code, output.reason, output.message))
    yield event
