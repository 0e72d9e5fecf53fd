"""What a prefill node does with messages of its callers, around prefill.core."""

from __future__ import annotations

import sys
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import asdict, replace
from itertools import chain

from baton.config import PrefillConfig
from baton.handoff.messages import (
    ChunkAnnounced,
    FetchEffect,
    FirstSampled,
    LeaseFinished,
    PrefillFailed,
    PrefillOutput,
    RecentNames,
)
from baton.kvcache import KvCacheManager
from baton.rpc.errors import BatonError, failed_precondition, invalid, to_status, unavailable
from baton.rpc.message_size import MAX_ANSWER_BYTES, cut
from baton.rpc.outbox import Outbox, byte_size
from baton.tracing.recorder import EventKind
from baton.v1 import common_pb2, node_pb2, prefill_pb2
from baton.worker.caller_stream import CallerStream
from baton.worker.convert import (
    check_start,
    layout_difference,
    logprobs_to,
    name_from,
    name_to,
    prompt_logprobs_to,
    request_from,
    sampling_from,
    status_of,
)
from baton.worker.prefill.core import PrefillCore, PrefillOutputs
from baton.worker.shell import WorkerShell

FULL_STEP = 1024
"""Tokens from which on a GPU's time per token no longer falls (measured on an H200, 8B)."""


class PrefillStream(CallerStream):
    """One stream, and the names that were started on it."""

    def __init__(self, incarnation: int) -> None:
        super().__init__(incarnation, Outbox(_merge, size_of=byte_size))
        self.names = RecentNames()
        self.chunk_groups = False
        """As in PrefillHello."""

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


def _events(output: PrefillOutput, chunk_groups: bool) -> Iterator[prefill_pb2.PrefillEvent]:
    """More than one where log-probabilities are too large for one message.

    chunk_groups: as in PrefillHello."""
    event = prefill_pb2.PrefillEvent(attempt=name_to(output.name))
    if isinstance(output, ChunkAnnounced):
        chunk = event.chunk
        chunk.last, chunk.step = output.last, output.step
        for number, each in enumerate(output.groups):
            of_group = chunk.groups.add() if chunk_groups else chunk.more.add() if number else chunk
            of_group.first_page = each.first
            of_group.page_ids.extend(each.pages)
            of_group.generations.extend(each.generations)
    elif isinstance(output, FirstSampled):
        *first, last = cut(prompt_logprobs_to(output.prompt_logprobs or None))
        for run in first:
            positions = common_pb2.PromptLogprobs(positions=run)
            yield prefill_pb2.PrefillEvent(attempt=event.attempt, prompt_logprobs=positions)
        event.first.cached_tokens = output.cached_tokens
        event.first.prompt_logprobs.extend(last)
        for token, logprobs in output.tokens:
            sampled = event.first.tokens.add(token_id=token)
            if logprobs is not None:
                sampled.logprobs.CopyFrom(logprobs_to(logprobs))
    elif isinstance(output, LeaseFinished):
        event.finished.stood = output.stood
    elif isinstance(output, PrefillFailed):
        event.failed.CopyFrom(status_of(output.code, output.reason, output.message))
    yield event


class PrefillShell(WorkerShell[PrefillCore]):
    config: PrefillConfig

    def make_core(self, cache: KvCacheManager) -> PrefillCore:
        scheduling = replace(
            self.limits(),
            max_waiting=self.config.max_waiting,
            policy=self.config.policy,
            full_step=sys.maxsize if self.device == "cpu" else FULL_STEP,
        )
        return PrefillCore(cache, scheduling, self.config, self, self.recorder)

    def make_stream(self, incarnation: int) -> PrefillStream:
        """For a caller that has connected."""
        raise NotImplementedError

    # --- what the core has decided ----------------------------------------------------------------------

    def send(self, step: int, outputs: PrefillOutputs, effects: Sequence[FetchEffect]) -> None:
        self.post(self._deliver, outputs)

    def _deliver(self, outputs: PrefillOutputs) -> None:
        for holder, sent in outputs.items():
            assert isinstance(holder, PrefillStream)
            events = chain.from_iterable(_events(output, holder.chunk_groups) for output in sent)
            if not holder.put(prefill_pb2.PrefillResponse(events=events)):
                self.drop(holder)

    # --- what callers say: worker.caller_stream.Service -------------------------------------------------

    def open(self, hello: prefill_pb2.PrefillHello) -> PrefillStream:
        if hello.HasField("layout"):
            difference = layout_difference(self.layout, hello.layout)
            if difference is not None:
                raise failed_precondition(difference, "LAYOUT_MISMATCH")
        self.require_turning()
        stream = self.make_stream(hello.incarnation)
        stream.chunk_groups = hello.chunk_groups
        self.steps.call(lambda core, now: core.leases.connect(stream, now))
        return stream

    def several(self, message: prefill_pb2.PrefillRequest) -> Sequence[prefill_pb2.PrefillRequest]:
        return message.several.requests

    def half_closed(self, stream: PrefillStream) -> None:
        """The caller cannot release any more: only prompts without `keep_pages` continue."""
        self.steps.call(lambda core, now: core.close_when_idle(stream, lambda: self.post(stream.close)))

    def drop(self, stream: PrefillStream) -> None:
        self.steps.call(lambda core, _: core.disconnect(stream))

    def handle_command(self, request: prefill_pb2.PrefillRequest, caller: PrefillStream) -> None:
        kind = request.WhichOneof("kind")
        if kind == "start":
            self._start(request.start, caller)
        elif kind == "cancel":
            cancelled = name_from(request.cancel.attempt)
            self.steps.call(lambda core, _: core.cancel(caller, cancelled))
        elif kind == "release":
            released = name_from(request.release.attempt)
            self.steps.call(lambda core, _: core.leases.release(caller, released))
        elif kind == "heartbeat":
            self.steps.call(lambda core, now: core.leases.heartbeat(caller, now))
        else:
            kinds = "start, cancel, release, heartbeat, or several of these"
            raise invalid("kind", f"each message on Prefill.Run after `hello` sets {kinds}")

    def _start(self, start: prefill_pb2.PrefillStart, caller: PrefillStream) -> None:
        name = name_from(start.attempt)
        if name in caller.names:
            raise invalid(
                "start.attempt", f"attempt {name} was started twice on this stream", "DUPLICATE_ATTEMPT"
            )
        caller.names.add(name)
        if start.traceparent:
            self.recorder.begin_span(*name, operation="prefill", traceparent=start.traceparent)
        self.recorder.add(EventKind.RECEIVED, *name)
        n = start.n if start.HasField("n") else 1
        info = self.model_info
        try:
            if self.draining:
                raise unavailable("this node is draining; use another prefill node", "DRAINING")
            check_start(start.token_ids, start.delivered, start.sampling, n, info)
        except BatonError as error:
            event = prefill_pb2.PrefillEvent(attempt=start.attempt, failed=to_status(error))
            caller.put(prefill_pb2.PrefillResponse(events=[event]))
            self.recorder.add(EventKind.ENDED, *name, text=error.reason)
            return
        delivered = tuple(start.token_ids[len(start.token_ids) - start.delivered :])
        params = sampling_from(start.sampling, info.eos_token_ids, info.context_length)
        choices = (delivered,) if delivered else ()
        request = request_from(start, name, n, choices, params, self.clock(), self.config.request_seconds)
        keep = start.keep_pages if start.HasField("keep_pages") else True
        ahead = start.announce_ahead
        self.steps.call(lambda core, now: core.start(caller, name, request, keep, now, ahead))
        if params.grammar is not None:
            self.compile_grammar(
                params.grammar,
                lambda outcome: self.steps.call(lambda core, now: core.compiled(name, request, outcome)),
            )

    def welcome(self) -> list[prefill_pb2.PrefillResponse]:
        welcome = prefill_pb2.PrefillWelcome(
            incarnation=self.incarnation,
            layout=self.layout,
            endpoints=self.endpoints(),
            lease_grace_ms=int(self.config.lease_grace_seconds * 1000),
            grammars=self.model_info.grammars,
        )
        return [prefill_pb2.PrefillResponse(events=[prefill_pb2.PrefillEvent(welcome=welcome)])]

    def load(self) -> node_pb2.Load:
        load = super().load()
        core = self.core_or_none
        if core is not None:
            leases = core.leases
            load.leases = leases.announced
            load.oldest_lease_ms = int(1000 * leases.oldest(self.clock()))
            load.requests = self.requests
            load.MergeFrom(node_pb2.Load(**asdict(core.counters)))
            load.MergeFrom(node_pb2.Load(**asdict(leases.counters)))
        return load
