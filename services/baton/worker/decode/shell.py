"""What a decode node does with messages of callers and prefill nodes, around decode.core."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator, Sequence
from dataclasses import asdict, replace
from functools import cached_property

from baton.config import DecodeConfig
from baton.engine.draft.base import Drafter
from baton.engine.request import EngineRequest
from baton.handoff.messages import AttemptName, FetchEffect
from baton.kvcache import KvCacheManager
from baton.rpc.errors import BatonError, invalid, not_found, unavailable
from baton.rpc.validate import check_token_ids
from baton.tracing.recorder import EventKind
from baton.v1 import decode_pb2, node_pb2
from baton.worker.convert import check_start, delivered_from, request_from, sampling_from
from baton.worker.decode.core import DecodeCore, DecodeOutputs
from baton.worker.decode.kept_logs import KeptLogs
from baton.worker.decode.peers import PrefillPeers
from baton.worker.decode.stream import DecodeStream, add_output
from baton.worker.decode.types import Key
from baton.worker.hidden_states import HiddenForm
from baton.worker.peers import PageLink, PagePeer
from baton.worker.shell import WorkerShell
from baton.worker.sources.shell import sources_from

DRAINING = decode_pb2.DecodeEvent(draining=decode_pb2.DecodeDraining())


class DecodeShell(WorkerShell[DecodeCore]):
    config: DecodeConfig
    peers: PrefillPeers
    messages: int = 0
    """Sent to callers by steps."""

    @cached_property
    def kept(self) -> KeptLogs:
        return KeptLogs()

    def make_core(self, cache: KvCacheManager) -> DecodeCore:
        config = self.config
        scheduling = replace(
            self.limits(),
            max_waiting=config.max_waiting,
            policy=config.policy,
            output_margin=config.output_margin,
            watermark=int(cache.counts().total * config.watermark),
            draft_tokens=config.most_drafts,
            draft_adaptive=config.draft_tokens is None,
            draft_padding=self.device != "cpu",
            # A GPU samples all positions of a row before the host knows what its grammar allows there.
            draft_grammars=self.device == "cpu",
        )
        drafter = self.make_drafter()
        if drafter is not None and drafter.tap:
            self.hidden_form = HiddenForm.of(drafter.tap, self.model_info)
        return DecodeCore(cache, scheduling, config, self, self.recorder, self.page_bytes, drafter)

    def make_drafter(self) -> Drafter | None:
        """None: no row has drafts."""
        return None

    def make_link(self, address: str, peer: PagePeer) -> PageLink:
        """A stream to a prefill node, not yet started."""
        raise NotImplementedError

    def make_stream(self, incarnation: int) -> DecodeStream:
        """For a caller that has connected."""
        raise NotImplementedError

    def announce_drain(self) -> None:
        """Callers are told, so that they send no more."""
        super().announce_drain()
        for stream in list(self.streams.open):
            stream.send(decode_pb2.StepEvents(events=[DRAINING]))

    # --- what the core has decided ----------------------------------------------------------------------

    def send(self, step: int, outputs: DecodeOutputs, effects: Sequence[FetchEffect]) -> None:
        self.post(self._deliver, step, outputs, effects)

    def _deliver(self, step: int, outputs: DecodeOutputs, effects: Sequence[FetchEffect]) -> None:
        messages: dict[Hashable, decode_pb2.StepEvents] = {}
        for caller, output in outputs:
            message = messages.get(caller)
            if message is None:
                message = messages[caller] = decode_pb2.StepEvents(step=step)
            add_output(message, output, self.page_bytes)
        for caller, message in messages.items():
            assert isinstance(caller, DecodeStream)
            self.messages += 1
            if not caller.send(message):
                self.drop(caller)
        self.peers.perform(effects)

    # --- what callers say: worker.caller_stream.Service -------------------------------------------------

    def open(self, hello: decode_pb2.DecodeHello) -> DecodeStream:
        self.require_turning()
        self._cancel_all(self.kept.let_go(self.clock(), hello.incarnation))
        return self.make_stream(hello.incarnation)

    def welcome(self) -> list[decode_pb2.StepEvents]:
        welcome = decode_pb2.DecodeEvent(welcome=decode_pb2.DecodeWelcome(incarnation=self.incarnation))
        events = [welcome, DRAINING] if self.draining else [welcome]
        return [decode_pb2.StepEvents(events=[event]) for event in events]

    def several(self, message: decode_pb2.GenerateCommand) -> Sequence[decode_pb2.GenerateCommand]:
        return message.several.commands

    def half_closed(self, stream: DecodeStream) -> None:
        stream.half_closed()

    def drop(self, stream: DecodeStream) -> None:
        kept = self.kept.keep(stream, self.clock())
        stream.orphaned = bool(kept)

        def gone(core: DecodeCore, now: float) -> None:
            core.caller_gone(stream, kept)
            for request in kept:
                core.pause(Key(stream, request), False)

        self.steps.call(gone)
        self._cancel_all(self.kept.let_go(self.clock()))

    def let_logs_go(self) -> None:
        """Called every second, also while nothing runs: cancels what is kept no longer."""
        if len(self.kept):
            self._cancel_all(self.kept.let_go(self.clock()))

    def take_log(self, request: decode_pb2.TakeLogRequest) -> decode_pb2.DecodeLog:
        """Raises BatonError."""
        taken = self.kept.take((request.gateway, request.request), self.streams.open)
        if taken is None:
            text = f"no log of request {request.request} of {request.gateway:016x} is kept here"
            raise not_found(text, "UNKNOWN_LOG")
        key, log = taken
        self._cancel_all([key])
        return log

    def _cancel_all(self, keys: Iterable[Key]) -> None:
        def cancel(core: DecodeCore, now: float) -> None:
            for key in cancelled:
                core.cancel(key)

        if cancelled := list(keys):
            self.steps.call(cancel)

    def handle_command(self, command: decode_pb2.GenerateCommand, caller: DecodeStream) -> None:
        kind = command.WhichOneof("kind")
        if kind == "start":
            self._start(command.start, caller)
        elif kind == "cancel":
            self._cancel(command.cancel, caller)
        elif kind == "heartbeat":
            self._heartbeat(caller)
        elif kind == "pause":
            self._pause(command.pause, caller)
        elif kind == "begin":
            self._begin(command.begin, caller)
        else:
            kinds = "start, cancel, heartbeat, pause, begin, or several of these"
            raise invalid("kind", f"each message on Decode.Generate after `hello` sets {kinds}")

    def _cancel(self, cancel: decode_pb2.DecodeCancel, caller: DecodeStream) -> None:
        key = Key(caller, cancel.request)
        if caller.runs(cancel.request, cancel.attempt):
            self.steps.call(lambda core, _: core.cancel(key))

    def _heartbeat(self, caller: DecodeStream) -> None:
        """Answers at once while the step thread is within the time that its step may take; else leaves the
        answer to the step thread."""
        if self.stuck(floor=0.0):
            self.steps.call(lambda core, now: self.post(caller.send, decode_pb2.StepEvents()))
        else:
            caller.send(decode_pb2.StepEvents())

    def _pause(self, pause: decode_pb2.DecodePause, caller: DecodeStream) -> None:
        key = Key(caller, pause.request)
        if caller.runs(pause.request, pause.attempt):
            self.steps.call(lambda core, now: core.pause(key, pause.paused))

    def _start(self, start: decode_pb2.DecodeStart, caller: DecodeStream) -> None:
        if caller.attempt_of(start.request) is not None:
            text = f"request {start.request} is running on this stream"
            raise invalid("start.request", text, "DUPLICATE_REQUEST")
        n = start.n if start.HasField("n") else 1
        info = self.model_info
        caller.begin(start.request, start.attempt)
        name = (caller.incarnation, start.request, start.attempt)
        trace = ""
        if start.traceparent:
            trace = self.recorder.begin_span(*name, operation="decode", traceparent=start.traceparent)
        self.recorder.add(EventKind.RECEIVED, *name)
        try:
            self.peers.check_room(start.prefill)
            if self.draining:
                raise unavailable("this node is draining; use another decode node", "DRAINING")
            check_start(start, n, info)
            for index, choice in enumerate(start.choices):
                check_token_ids(choice.token_ids, info.vocab_size, f"choices[{index}].token_ids")
            delivered = delivered_from(start, n, info.context_length)
            sources = sources_from(start.sources)
        except BatonError as error:
            caller.refuse(start.request, start.attempt, error)
            self.recorder.add(EventKind.ENDED, *name, text=error.reason)
            return
        room = max(1, info.context_length - len(start.token_ids) + start.delivered)
        if start.keep_log:
            caller.begin_log(start)
        params = sampling_from(start.sampling, info.eos_token_ids, room)
        key = Key(caller, start.request)
        request = request_from(start, key, n, delivered, params, self.clock(), self.config.request_seconds)
        request.trace = trace
        candidates = tuple(dict.fromkeys(start.prefill)) or self.config.prefill
        for address in candidates:
            self.peers.connect(address)
        attempt, gateway = start.attempt, caller.incarnation
        local = start.local_prefill_tokens if start.HasField("local_prefill_tokens") else None
        announce, lenders = start.announce_admission, self.sources.lenders(sources)
        self.steps.call(
            lambda core, now: core.start(
                key,
                gateway,
                attempt,
                request,
                candidates,
                now,
                local,
                announce=announce,
                sources=sources,
                lenders=lenders,
            )
        )
        if not request.suspect:
            self._compile(key, request)

    def name_of(self, request: EngineRequest) -> AttemptName:
        assert isinstance(request.key, Key)
        caller, number = request.key.caller, request.key.request
        assert isinstance(caller, DecodeStream)
        return AttemptName(caller.incarnation, number, caller.attempt_of(number) or 0, 0)

    def _begin(self, begin: decode_pb2.DecodeBegin, caller: DecodeStream) -> None:
        def begun(core: DecodeCore, now: float) -> None:
            request = core.suspects.begin(core.unfinished.get(key))
            if request is not None:
                self.post(self._compile, key, request)

        key = Key(caller, begin.request)
        if caller.runs(begin.request, begin.attempt):
            self.steps.call(begun)

    def _compile(self, key: Key, request: EngineRequest) -> None:
        if request.params.grammar is not None:
            self.compile_grammar(
                request.params.grammar,
                lambda outcome: self.steps.call(lambda core, now: core.compiled(key, request, outcome)),
            )

    # --- its state --------------------------------------------------------------------------------------

    def problems(self, load: node_pb2.Load) -> Iterator[node_pb2.Problem]:
        yield from super().problems(load)
        overdue = self.core_or_none.fetches.pulls.overdue if self.core_or_none is not None else []
        if overdue:
            text = f"a copy of pages from {', '.join(overdue)} has been running for more than "
            text += f"{self.config.pull_seconds:g} s"
            alone = not self.peers.usable - set(overdue)
            yield node_pb2.Problem(reason="PULL_STUCK", message=text, stops_serving=alone)
        drafts = self.core_or_none.scheduler.drafts if self.core_or_none is not None else None
        if drafts is not None and drafts.broken:
            yield node_pb2.Problem(reason="DRAFTER_FAILED", message=drafts.broken)
        lost = self.peers.lost()
        if lost:
            text = f"prompts are not handed off to {'; '.join(lost)}"
            yield node_pb2.Problem(reason="PREFILL_LOST", message=text)

    def load(self) -> node_pb2.Load:
        load = super().load()
        core = self.core_or_none
        if core is not None:
            load.requests = self.requests
            fetches = core.fetches
            load.handing_off = len(fetches.running)
            load.pulls = len(fetches.pulls)
            load.pulled_pages = fetches.counters.pulled_pages
            load.pulled_bytes = fetches.counters.pulled_pages * self.page_bytes
            # Copied in one call, because the step thread may add reasons meanwhile.
            load.handoff_retry_reasons.update(dict(fetches.counters.retries))
            load.handoff_retries = sum(load.handoff_retry_reasons.values())
            load.messages = self.messages
            load.MergeFrom(node_pb2.Load(**asdict(core.counters)))
            load.local_prefills = core.scheduler.local_prompts
            load.paused = core.paused
            load.first_token_ms = int(1000 * core.overload.first_token.value)
            load.wait_ms = int(1000 * core.overload.wait)
            pull = self.peers.pull_meter.cost
            if pull is not None:
                load.pull_cost.CopyFrom(node_pb2.PullCost(fixed=pull.fixed, token=pull.token))
        return load
