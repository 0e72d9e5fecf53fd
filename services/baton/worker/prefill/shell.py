"""What a prefill node does with messages of its callers, around prefill.core."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from itertools import chain

from baton.config import PrefillConfig
from baton.engine.draft.paged_drafter import PagedDrafter
from baton.engine.request import EngineRequest
from baton.handoff.messages import AttemptName, FetchEffect
from baton.kvcache import KvCacheManager
from baton.rpc.errors import BatonError, failed_precondition, invalid, to_status, unavailable
from baton.tracing.recorder import EventKind
from baton.v1 import node_pb2, prefill_pb2
from baton.worker.convert import check_start, layout_difference, name_from, request_from, sampling_from
from baton.worker.hidden_states import layers_from
from baton.worker.lease_stream import LeaseStream, events_of
from baton.worker.prefill.core import PrefillCore
from baton.worker.prefill.prompt_drafts import PromptDrafts
from baton.worker.shell import WorkerShell
from baton.worker.sources.sharing import LeaseOutputs
from baton.worker.sources.shell import sources_from

FULL_STEP = 1024
"""Tokens from which on a GPU's time per token no longer falls (measured on an H200, 8B)."""


class PrefillShell(WorkerShell[PrefillCore]):
    config: PrefillConfig

    def make_core(self, cache: KvCacheManager) -> PrefillCore:
        scheduling = replace(
            self.limits(),
            max_waiting=self.config.max_waiting,
            policy=self.config.policy,
            full_step=sys.maxsize if self.device == "cpu" else FULL_STEP,
        )
        drafter = self.make_prompt_drafter()
        drafts = PromptDrafts(drafter) if drafter is not None else None
        return PrefillCore(cache, scheduling, self.config, self, self.recorder, drafts)

    def make_prompt_drafter(self) -> PagedDrafter | None:
        """None: nothing is computed of prompts for drafters."""
        return None

    def make_stream(self, incarnation: int) -> LeaseStream:
        """For a caller that has connected."""
        raise NotImplementedError

    # --- what the core has decided ----------------------------------------------------------------------

    def send(self, step: int, outputs: LeaseOutputs, effects: Sequence[FetchEffect]) -> None:
        self.post(self._deliver, outputs)

    def _deliver(self, outputs: LeaseOutputs) -> None:
        for holder, sent in outputs.items():
            assert isinstance(holder, LeaseStream)
            events = chain.from_iterable(events_of(output) for output in sent)
            if not holder.put(prefill_pb2.PrefillResponse(events=events)):
                self.drop(holder)

    # --- what callers say: worker.caller_stream.Service -------------------------------------------------

    def open(self, hello: prefill_pb2.PrefillHello) -> LeaseStream:
        if hello.HasField("layout"):
            difference = layout_difference(self.layout, hello.layout)
            if difference is not None:
                raise failed_precondition(difference, "LAYOUT_MISMATCH")
        self.require_turning()
        layers = layers_from(hello.hidden_layers)
        stream = self.make_stream(hello.incarnation)
        stream.drafts = self.has_drafts_of(hello)
        if self.device == "cpu" or stream.drafts:  # a CUDA graph leaves those of its own drafter
            stream.hidden_layers = layers
        self.steps.call(lambda core, now: core.leases.connect(stream, now))
        return stream

    def several(self, message: prefill_pb2.PrefillRequest) -> Sequence[prefill_pb2.PrefillRequest]:
        return message.several.requests

    def half_closed(self, stream: LeaseStream) -> None:
        """The caller cannot release any more: only prompts without `keep_pages` continue."""
        self.steps.call(lambda core, now: core.close_when_idle(stream, lambda: self.post(stream.close)))

    def drop(self, stream: LeaseStream) -> None:
        self.steps.call(lambda core, _: core.disconnect(stream))

    def handle_command(self, request: prefill_pb2.PrefillRequest, caller: LeaseStream) -> None:
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

    def _start(self, start: prefill_pb2.PrefillStart, caller: LeaseStream) -> None:
        name = name_from(start.attempt)
        if name in caller.names:
            raise invalid(
                "start.attempt", f"attempt {name} was started twice on this stream", "DUPLICATE_ATTEMPT"
            )
        caller.names.add(name)
        trace = ""
        if start.traceparent:
            trace = self.recorder.begin_span(*name, operation="prefill", traceparent=start.traceparent)
        self.recorder.add(EventKind.RECEIVED, *name)
        n = start.n if start.HasField("n") else 1
        info = self.model_info
        try:
            if self.draining:
                raise unavailable("this node is draining; use another prefill node", "DRAINING")
            check_start(start, n, info)
            sources = self.sources.lenders(sources_from(start.sources))
        except BatonError as error:
            event = prefill_pb2.PrefillEvent(attempt=start.attempt, failed=to_status(error))
            caller.put(prefill_pb2.PrefillResponse(events=[event]))
            self.recorder.add(EventKind.ENDED, *name, text=error.reason)
            return
        delivered = tuple(start.token_ids[len(start.token_ids) - start.delivered :])
        params = sampling_from(start.sampling, info.eos_token_ids, info.context_length)
        choices = (delivered,) if delivered else ()
        request = request_from(start, name, n, choices, params, self.clock(), self.config.request_seconds)
        request.hidden_layers, request.trace = caller.hidden_layers, trace
        keep = start.keep_pages if start.HasField("keep_pages") else True
        ahead = start.announce_ahead
        self.steps.call(
            lambda core, now: core.start(
                caller, name, request, keep, now, ahead, sources, drafts=caller.drafts
            )
        )
        if params.grammar is not None:
            self.compile_grammar(
                params.grammar,
                lambda outcome: self.steps.call(lambda core, now: core.compiled(name, request, outcome)),
            )

    def name_of(self, request: EngineRequest) -> AttemptName:
        assert isinstance(request.key, AttemptName)
        return request.key

    def welcome(self) -> list[prefill_pb2.PrefillResponse]:
        welcome = prefill_pb2.PrefillWelcome(
            incarnation=self.incarnation,
            layout=self.layout,
            endpoints=self.endpoints(),
            lease_grace_ms=int(self.config.lease_grace_seconds * 1000),
            grammars=self.model_info.grammars,
            images=self.model_info.images,
        )
        if self.draft_layout is not None:
            welcome.draft_layout.CopyFrom(self.draft_layout)
            welcome.draft_endpoints.extend(self.endpoints(pool=1))
        return [prefill_pb2.PrefillResponse(events=[prefill_pb2.PrefillEvent(welcome=welcome)])]

    def problems(self, load: node_pb2.Load) -> Iterator[node_pb2.Problem]:
        yield from super().problems(load)
        drafts = self.core_or_none.prompt_drafts if self.core_or_none is not None else None
        if drafts is not None and drafts.broken:
            yield node_pb2.Problem(reason="DRAFTER_FAILED", message=drafts.broken)

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
