"""The pure core of a decode node: requests, where their prompts are computed, and outputs to callers."""

from __future__ import annotations

import math
from collections.abc import Collection, Hashable, Iterable
from dataclasses import dataclass, field
from typing import Any

from baton.config import DecodeConfig
from baton.engine.draft.base import Drafter
from baton.engine.plan import StepResult
from baton.engine.request import (
    ChunkEvent,
    EngineEvent,
    EngineRequest,
    FailedEvent,
    FinishedEvent,
    PromptEvent,
    Refused,
    Sequence,
    TokenEvent,
)
from baton.engine.scheduler import Scheduler
from baton.engine.scheduler_config import PromptRoute, SchedulerConfig
from baton.engine.step_builder import Step
from baton.engine.step_stats import StepStats
from baton.grammar.base import CompiledGrammar, GrammarBusy, GrammarError
from baton.handoff.fetch import Fetches
from baton.handoff.messages import PrefillOutput, PromptSource, ReleaseLease
from baton.kvcache import KvCacheManager
from baton.kvcache.page_map import PageUse, mark
from baton.tracing.recorder import TOKENS_EVERY, EventKind, Recorder
from baton.worker.core import CoreShell, FetchedImages, NoImages
from baton.worker.decode.admission_control import AdmissionControl
from baton.worker.decode.prompt_routing import LOCAL_PREFILL_TOKENS, PromptRouting, Unroutable
from baton.worker.decode.remote_prefill import Handoff, RemotePrefill
from baton.worker.decode.request_recording import RequestRecording
from baton.worker.decode.suspects import SuspectTurns
from baton.worker.decode.types import (
    Admitted,
    DecodeCounters,
    DecodeOutput,
    DecodeRequest,
    DoneOutput,
    FailedOutput,
    Key,
    Peer,
    PromptOutput,
    TokensOutput,
)
from baton.worker.sources.sharing import CacheSharing

DecodeOutputs = list[tuple[Hashable, DecodeOutput]]
"""Outputs with their callers."""


@dataclass(slots=True, eq=False)
class DecodeCore:
    """Driven by a step loop."""

    cache: KvCacheManager
    scheduling: SchedulerConfig
    config: DecodeConfig
    shell: CoreShell[DecodeOutputs]
    recorder: Recorder = field(default_factory=lambda: Recorder(0))
    page_bytes: int = 0
    """Bytes of a page, for the recorder."""
    drafter: Drafter | None = None
    unfinished: dict[Key, DecodeRequest] = field(default_factory=dict)
    peers: dict[str, Peer] = field(default_factory=dict)
    counters: DecodeCounters = field(default_factory=DecodeCounters)
    scheduler: Scheduler = field(init=False)
    handoffs: RemotePrefill = field(init=False)
    fetches: Fetches[Handoff] = field(init=False)
    routing: PromptRouting = field(init=False)
    suspects: SuspectTurns = field(init=False)
    sharing: CacheSharing = field(init=False)
    _outputs: DecodeOutputs = field(default_factory=list)
    _admitted: DecodeOutputs = field(default_factory=list)
    """Apart from the outputs: no launch waits for them (`pressing`)."""
    _now: float = 0.0
    overload: AdmissionControl = field(init=False)
    recording: RequestRecording = field(init=False)

    def __post_init__(self) -> None:
        self.recording = RequestRecording(self.recorder, self.unfinished, self.peers, self.page_bytes)
        self.scheduler = Scheduler(
            self.cache,
            self.scheduling,
            self._route,
            lambda leader: self.handoffs.abandon(leader),
            record=self._scheduled,
            ask_turn=lambda request: self.suspects.ask(self.unfinished[request.key]),  # type: ignore[index]
            drafter=self.drafter,
            want_images=self.shell.want_images,
        )
        self.handoffs = RemotePrefill(self.config, self.scheduler, self.unfinished, self.recording)
        self.fetches = self.handoffs.fetches
        self.routing = PromptRouting(self.config, self.peers, self.unfinished, self.scheduler, self.handoffs)
        self.overload = AdmissionControl(self.scheduler)
        stats, pull_seconds = (lambda: self.step_stats), self.config.pull_seconds
        self.sharing = CacheSharing(self.scheduler, stats, self.recorder, pull_seconds=pull_seconds)
        self.suspects = SuspectTurns(lambda *turn: self._outputs.append(turn))

    @property
    def step_stats(self) -> StepStats:
        return self.overload.step_stats

    @property
    def requests(self) -> int:
        return len(self.unfinished)

    def page_uses(self) -> bytearray:
        """A PageUse for each page of the pool."""
        uses = self.cache.states()
        self.sharing.mark(uses)
        mark(uses, self.fetches.pulls.targets(), PageUse.PULLING)
        return uses

    @property
    def expecting(self) -> bool:
        """Whether warm-up launches make sense now. Never while a prefill node shares this GPU: the GPU
        switches between the two processes, and warm-up work would take time from the prompt."""
        if not self.fetches.expecting:
            return False
        return not any(peer.up and peer.shares_gpu for peer in self.peers.values())

    @property
    def pressing(self) -> bool:
        """Whether something must be sent before the next launch. Releases that no request waits for can be
        sent later: sending one would delay the launch that uses its pages."""
        effects = self.fetches.effects
        idle = all(isinstance(effect, ReleaseLease) and not effect.awaited for effect in effects)
        return bool(self._outputs or self.scheduler.events or self.sharing.pressing or not idle)

    # --- what callers ask -------------------------------------------------------------------------------

    def start(
        self,
        key: Key,
        gateway: int,
        attempt: int,
        request: EngineRequest,
        candidates: tuple[str, ...],
        now: float,
        local_tokens: int | None = None,
        *,
        announce: bool = False,
        sources: tuple[PromptSource, ...] = (),
        lenders: tuple[PromptSource, ...] = (),
    ) -> None:
        """The shell must have refused a name in use (`unfinished`). `local_tokens`: the caller's limit for
        local prefill, which the configuration may override. `announce`: the caller wants to know when the
        request is admitted. `sources`: holders of the prompt's beginning, which a prefill node is told;
        this node may be one of them. `lenders`: those that it may borrow from itself."""
        limit = LOCAL_PREFILL_TOKENS if local_tokens is None else local_tokens
        configured = self.config.local_prefill_tokens
        state = DecodeRequest(
            key, gateway, attempt, request, candidates, limit if configured is None else configured
        )
        state.announce, state.sources = announce, sources
        self.unfinished[key] = state
        try:
            self.scheduler.submit(request)
        except Refused as refusal:
            code = "INVALID_ARGUMENT" if refusal.field else "RESOURCE_EXHAUSTED"
            retry = None if refusal.field else max(1.0, self.overload.wait)
            self._fail(state, code, refusal.reason, refusal.message, refusal.field, retry)
            return
        self.overload.arrived()
        self.counters.prompt_tokens += len(request.prompt)
        self.sharing.borrower.want(request, lenders, lambda: self.handoffs.next_name(state), now)
        for address in candidates:
            self.peers.setdefault(address, Peer(up=False, since=now))

    def compiled(self, key: Key, request: EngineRequest, outcome: CompiledGrammar | GrammarError) -> None:
        """A request's grammar is compiled, or cannot be. The request may have ended meanwhile."""
        state = self.unfinished.get(key)
        if state is None or state.request is not request:
            return
        if isinstance(outcome, GrammarBusy):
            self._fail(state, "RESOURCE_EXHAUSTED", "GRAMMARS_BUSY", f"the grammar: {outcome}", retry=1.0)
        elif isinstance(outcome, GrammarError):
            self._fail(state, "INVALID_ARGUMENT", "INVALID_GRAMMAR", f": {outcome}", "sampling.grammar")
        else:
            request.grammar = outcome

    def images_fetched(self, request: EngineRequest, outcome: FetchedImages) -> None:
        state = self.unfinished.get(request.key)  # type: ignore[call-overload]
        if state is None or state.request is not request:
            return
        if isinstance(outcome, NoImages):
            self._fail(state, outcome.code, outcome.reason, outcome.message)
        else:
            self.scheduler.images.here(request, outcome)

    def cancel(self, key: Key) -> None:
        """An unknown name has ended: its terminal event is under way to the caller."""
        state = self.unfinished.get(key)
        if state is not None:
            self.counters.cancelled += 1
            self._fail(state, "CANCELLED", "CANCELLED", "cancelled by its caller")

    def pause(self, key: Key, paused: bool) -> None:
        """A paused request keeps its rows and pages and gets no more tokens."""
        if (state := self.unfinished.get(key)) is not None:
            state.request.paused = paused

    @property
    def paused(self) -> int:
        """Number of paused requests."""
        return sum(state.request.paused for state in list(self.unfinished.values()))

    def caller_gone(self, caller: Hashable, going_on: Collection[int] = ()) -> None:
        left = [state for state in self.unfinished.values() if state.key.caller == caller]
        # A suspect would wait for its caller's `begin`, and others for it.
        for state in [s for s in left if s.key.request not in going_on or s.request.suspect]:
            self.counters.cancelled += 1
            self._remove(state)
            self.scheduler.close(state.request)
            self.recording.ended(state, "cancelled")

    def hand_back(self) -> None:
        for state in list(self.unfinished.values()):
            self._fail(state, "UNAVAILABLE", "DRAINING", "the node drains; the request may go on elsewhere")

    def receive(self, address: str, messages: Iterable[PrefillOutput], now: float) -> None:
        """What a prefill node says; nothing but that its step thread is alive, perhaps."""
        self.fetches.note_alive(address, now)
        for message in messages:
            self.handoffs.receive(address, message, now)

    def peer_changed(self, address: str, peer: Peer, reason: str) -> None:
        self.peers[address] = peer
        if not peer.up:
            self.handoffs.peer_down(address, reason)

    def forget_peer(self, address: str) -> None:
        """No recent request names the node; its connection has been closed."""
        self.peers.pop(address, None)
        self.handoffs.peer_down(address, "no longer in use")

    # --- the step loop ----------------------------------------------------------------------------------

    def tick(self, now: float) -> None:
        self._now = now
        if self.cache.tier is not None:
            self.cache.tier.tick(now)
        for state in [r for r in self.unfinished.values() if r.request.deadline <= now]:
            self._fail(state, "DEADLINE_EXCEEDED", "DEADLINE_EXCEEDED", "the request's time is over")
        self.handoffs.tick(now)
        self.sharing.tick(now, self.overload.blocked and not self.scheduler.prompts)
        for sequence, late in self.overload.late(now):
            self.counters.refused += 1
            text = f"too busy: the request would end {late:.1f} s after its deadline; ask again later"
            state = self._state(sequence)
            self._fail(state, "RESOURCE_EXHAUSTED", "WOULD_MISS_DEADLINE", text, retry=late)

    def admit(self, now: float) -> None:
        self._now = now
        self.scheduler.admit_elsewhere()
        self._begin_handoffs(now)

    def plan(self, now: float) -> Step | None:
        self._now = now
        step = self.scheduler.plan()
        self.overload.planned(step, now)
        self._begin_handoffs(now)
        return step

    def launched(self, step: Step, launched: Any) -> None:
        """Does nothing."""

    def _begin_handoffs(self, now: float) -> None:
        for leader in list(self.scheduler.handoffs):
            if leader not in self.handoffs:
                self.handoffs.begin(leader, self.routing.chosen[leader], now)
        self.routing.chosen.clear()

    def commit(self, step: Step, result: StepResult, now: float) -> None:
        self._now = now
        seconds = self.step_stats.ended(step, now)
        self.scheduler.commit(step, result, seconds)

    def fail_step(self, step: Step, message: str) -> None:
        self.overload.step_stats.failed(step)
        self.scheduler.fail_step(step, message)

    def flush(self, step: int) -> None:
        first_tokens: list[float] = []
        for event in self.scheduler.take_events():
            request = event.sequence.request if isinstance(event, ChunkEvent | TokenEvent) else event.request
            state = self.unfinished.get(request.key) if isinstance(request.key, Key) else None
            if state is not None:
                self._take_event(state, event, first_tokens)
        if first_tokens:
            # One value a step: many requests that waited through the same stall are one accident.
            self.overload.first_token.add(sum(first_tokens) / len(first_tokens))
        if self._outputs or self._admitted or self.fetches.effects:
            outputs, self._outputs = [*self._admitted, *self._outputs], []
            self._admitted.clear()
            effects, self.fetches.effects = self.fetches.effects, []
            self.shell.send(step, outputs, effects)
        self.sharing.flush(self.shell)
        self.shell.observe()

    def _take_event(self, state: DecodeRequest, event: EngineEvent, first_tokens: list[float]) -> None:
        """Adds to `first_tokens` the seconds that the first token of a request took."""
        caller, number = state.key.caller, state.key.request
        if isinstance(event, TokenEvent):
            if not state.output_tokens and state.admitted is not None:
                # A stall may have begun before the admission, and count as a whole.
                first_tokens.append(max(0.0, self._now - self.step_stats.stalled - state.admitted))
            if event.finish is not None:
                self.overload.output.add(event.sequence.num_output)
            state.output_tokens += 1
            if not state.output_tokens % TOKENS_EVERY:
                self.recording.tokens(state)
            self.suspects.token(state)
            self.counters.output_tokens += 1
            index = event.sequence.index
            tokens = TokensOutput(number, state.attempt, index, event.token, event.logprobs, event.finish)
            self._outputs.append((caller, tokens))
        elif isinstance(event, PromptEvent):
            cached = state.request.cached_tokens or 0
            self.counters.cached_tokens += cached
            asked = state.request.params.prompt_logprobs is not None
            logprobs = tuple(state.request.prompt_logprobs) if asked else None
            self._outputs.append((caller, PromptOutput(number, state.attempt, cached, logprobs)))
        elif isinstance(event, FinishedEvent):
            self.counters.finished += 1
            self._remove(state)
            state.enter("", self.recorder.clock())
            self.recording.ended(state, "finished")
            stats = state.stats(self.peers.get(state.address))
            self._outputs.append((caller, DoneOutput(number, state.attempt, stats)))
        elif isinstance(event, FailedEvent) and event.reason == "STEP_FAILED":
            self._fail(state, *state.step_failed(event.reason, event.message))
        elif isinstance(event, FailedEvent):
            self._fail(state, "INTERNAL", event.reason, event.message)

    def _scheduled(self, request: EngineRequest, kind: EventKind, number: int, step: int) -> None:
        """The scheduler has done something to a request."""
        state = self.unfinished.get(request.key)  # type: ignore[call-overload]
        if state is None:
            return
        self.recording.add(state, kind, number, step=step)
        if state.announce and kind is EventKind.ADMITTED:
            state.announce = False  # a retracted request is admitted again
            self._admitted.append((state.key.caller, Admitted(state.key.request, state.attempt)))

    # --- where prompts are computed ---------------------------------------------------------------------

    def _route(self, leader: Sequence, uncached: int) -> PromptRoute:
        state = self._state(leader)
        state.admitted = self._now - self.step_stats.stalled
        try:
            route = self.routing.route(leader, uncached, self._now)
        except Unroutable as end:
            self._fail(state, end.code, end.reason, end.message)
            return PromptRoute.DEFER
        if route is PromptRoute.LOCAL and not self.sharing.borrower.settled(leader, self._now):
            return PromptRoute.DEFER
        return route

    def _state(self, leader: Sequence) -> DecodeRequest:
        return self.unfinished[leader.request.key]  # type: ignore[index]

    # --- ends -------------------------------------------------------------------------------------------

    def node_failed(self, message: str) -> None:
        """An error has escaped the core, and the process ends: fails all admitted requests, one of which
        may be the cause. Changes nothing else, because the state cannot be relied on."""
        scheduler = self.scheduler
        waiting = {each.request for each in scheduler.waiting if not scheduler.in_flight(each)}
        failed: DecodeOutputs = []
        for state in self.unfinished.values():
            if state.request not in waiting:
                words = state.step_failed("NODE_FAILED", message)
                failed.append((state.key.caller, FailedOutput(state.key.request, state.attempt, *words)))
        self.shell.send(0, failed, [])

    def _remove(self, state: DecodeRequest) -> None:
        """The request has ended."""
        self.unfinished.pop(state.key, None)
        self.handoffs.ended(state)
        self.suspects.ended(state)
        self.sharing.borrower.ended(state.request)

    def _fail(
        self,
        state: DecodeRequest,
        code: str,
        reason: str,
        message: str,
        field: str | None = None,
        retry: float | None = None,
    ) -> None:
        """`retry`: seconds after which asking again makes sense."""
        self._remove(state)
        self.scheduler.close(state.request)
        if code != "CANCELLED":
            self.counters.failed += 1
        self.recording.ended(state, reason if code != "CANCELLED" else "cancelled")
        retry_ms = math.ceil(1000 * retry) if retry is not None else None
        failed = FailedOutput(state.key.request, state.attempt, code, reason, message, field, retry_ms)
        self._outputs.append((state.key.caller, failed))
