"""The pure core of a prefill node: computes prompts for holders and lends them the pages.

    start -> queued -> computing -> complete -> released
                 \\         \\            \\
                  +---------+------------+--> failed: see handoff.lease

A cancelled prompt gives up its pages at once. If a step with it is in flight, the answer waits for the step:
it may fail, and the holder must know that the prompt was in it.

Pages are announced once the step that writes them has retired; to holders that can wait for that themselves
(`ahead`) when it is planned, with its number, and cached ones, which are final, at once.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from baton.config import PrefillConfig
from baton.engine.plan import Logprobs, StepResult
from baton.engine.request import (
    ChunkEvent,
    EngineRequest,
    FailedEvent,
    PromptEvent,
    Refused,
    SequencePhase,
    TokenEvent,
)
from baton.engine.scheduler import Scheduler
from baton.engine.scheduler_config import SchedulerConfig
from baton.engine.step_builder import Step
from baton.engine.step_stats import StepStats
from baton.grammar.base import CompiledGrammar, GrammarBusy, GrammarError
from baton.handoff.lease import Lease, Leases
from baton.handoff.messages import AttemptName, FirstSampled, PromptSource
from baton.kvcache import BlockTable, KvCacheManager
from baton.kvcache.page_map import PageUse, mark
from baton.tracing.recorder import EventKind, Recorder
from baton.worker.core import CoreShell, FetchedImages, NoImages
from baton.worker.hidden_states import last_rows
from baton.worker.prefill.cancelled import CancelledInFlight
from baton.worker.prefill.prompt_drafts import PromptDrafts
from baton.worker.sources.sharing import CacheSharing, LeaseOutputs, by_holder


@dataclass(slots=True, eq=False, kw_only=True)
class Attempt(Lease):
    """State of one requested prompt, and the lease of its pages."""

    request: EngineRequest
    core: PrefillCore
    keep_pages: bool
    ahead: bool
    """Pages are announced before their step has retired."""
    lends_drafts: bool = False
    """The holder wants pages of the drafter, too."""
    drafts: BlockTable | None = None
    """These, in the drafter's pool."""
    first: list[tuple[int, Logprobs | None]] = field(default_factory=list)

    @property
    def importance(self) -> tuple[int, int]:
        return self.request.priority, -self.request.order

    @property
    def tables(self) -> Sequence[Sequence[int]] | None:
        block_table = self.request.sequences[0].block_table
        return block_table.tables if block_table is not None and self.keep_pages else None

    def free(self) -> None:
        if self.core.prompt_drafts is not None:
            self.core.prompt_drafts.ended(self)
        self.core.sharing.borrower.ended(self.request)
        self.core.scheduler.close(self.request)


@dataclass(slots=True)
class PrefillCounters:
    prompt_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0


@dataclass(slots=True, eq=False)
class PrefillCore:
    """Driven by a step loop."""

    cache: KvCacheManager
    scheduling: SchedulerConfig
    config: PrefillConfig
    shell: CoreShell[LeaseOutputs]
    recorder: Recorder = field(default_factory=lambda: Recorder(0))
    prompt_drafts: PromptDrafts | None = None
    counters: PrefillCounters = field(default_factory=PrefillCounters)
    scheduler: Scheduler = field(init=False)
    leases: Leases[Attempt] = field(init=False)
    sharing: CacheSharing = field(init=False)
    step_stats: StepStats = field(init=False)
    _now: float = 0.0
    _cancelled: CancelledInFlight = field(default_factory=CancelledInFlight)
    _presses: bool = False
    _closing: dict[Hashable, Callable[[], None]] = field(default_factory=dict)
    _handed_back: bool = False

    def __post_init__(self) -> None:
        limits = replace(self.scheduling, prompt_only=True)
        self.scheduler = Scheduler(
            self.cache,
            limits,
            may_admit=self.may_admit,
            record=self._record,
            want_images=self.shell.want_images,
        )
        most = int(self.cache.counts().total * self.config.max_leased_fraction)
        grace = self.config.lease_grace_seconds
        self.leases = Leases(self.cache, grace=grace, max_pages=most, recorder=self.recorder)
        self.step_stats = StepStats(limits.token_budget)
        self.sharing = CacheSharing(self.scheduler, lambda: self.step_stats, self.recorder, grace=grace)

    @property
    def requests(self) -> int:
        return len(self.leases.running)

    def page_uses(self) -> bytearray:
        """A PageUse for each page of the pool."""
        uses = self.cache.states()
        self.sharing.mark(uses)
        mark(uses, self.leases.pages(), PageUse.LEASED)
        return uses

    @property
    def expecting(self) -> bool:
        """A prefill node cannot know that a prompt will arrive."""
        return False

    @property
    def pressing(self) -> bool:
        """Whether something must be sent before the next launch. Announcements of pages can wait: they
        have as long as their step takes."""
        return self._presses

    # --- what holders ask; heartbeats and releases are the leases' ---------------------------------------

    def start(
        self,
        holder: Hashable,
        name: AttemptName,
        request: EngineRequest,
        keep_pages: bool,
        now: float,
        ahead: bool = False,
        sources: tuple[PromptSource, ...] = (),
        drafts: bool = False,
    ) -> None:
        """`drafts`: the holder has this node's drafter. Raises nothing."""
        attempt = Attempt(
            name=name,
            holder=holder,
            tokens=len(request.sequences[0].tokens),
            deadline=request.deadline,
            request=request,
            core=self,
            keep_pages=keep_pages,
            ahead=ahead,
            lends_drafts=drafts and keep_pages and not request.images,
        )
        if not self.leases.begin(attempt, now):
            return
        try:
            self.scheduler.submit(request)
        except Refused as refusal:
            code = "INVALID_ARGUMENT" if refusal.field else "RESOURCE_EXHAUSTED"
            self.leases.fail(attempt, code, refusal.reason, refusal.message)
            return
        self.counters.prompt_tokens += len(request.prompt)
        self.sharing.borrower.want(request, sources, lambda: name, now)

    def compiled(
        self, name: AttemptName, request: EngineRequest, outcome: CompiledGrammar | GrammarError
    ) -> None:
        """An attempt's grammar is compiled, or cannot be. The attempt may have ended meanwhile."""
        attempt = self.leases.running.get(name)
        if attempt is None or attempt.request is not request:
            return
        if isinstance(outcome, GrammarError):
            words = ("INVALID_ARGUMENT", "INVALID_GRAMMAR")
            if isinstance(outcome, GrammarBusy):
                words = ("RESOURCE_EXHAUSTED", "GRAMMARS_BUSY")
            self.leases.fail(attempt, *words, str(outcome))
        else:
            request.grammar = outcome

    def images_fetched(self, request: EngineRequest, outcome: FetchedImages) -> None:
        attempt = self._attempt_of(request)
        if attempt is None or attempt.request is not request:
            return
        if isinstance(outcome, NoImages):
            self.leases.fail(attempt, outcome.code, outcome.reason, outcome.message)
        else:
            self.scheduler.images.here(request, outcome)

    def cancel(self, holder: Hashable, name: AttemptName) -> None:
        attempt = self.leases.cancel(holder, name)
        if attempt is not None and not self._cancelled.hold(attempt):
            self._answer_cancelled(attempt)

    def _answer_cancelled(self, attempt: Attempt) -> None:
        if self._handed_back:
            text = "the node drains; ask another prefill node"
            self.leases.say_failed(attempt, "UNAVAILABLE", "DRAINING", text)
        else:
            self.leases.say_failed(attempt, "CANCELLED", "CANCELLED", "cancelled by its holder")

    def hand_back(self) -> None:
        """Those in a step in flight are answered when it has ended, as a cancel is."""
        self._handed_back = True
        for attempt in list(self.leases.running.values()):
            self.cancel(attempt.holder, attempt.name)

    def disconnect(self, holder: Hashable) -> None:
        """The holder's stream has ended: drops everything that it held, without a message."""
        self.leases.disconnect(holder)
        self._cancelled.forget(holder)

    def holds(self, holder: Hashable) -> bool:
        """Whether the holder has an attempt here, or is still to be told of the end of one."""
        return self.leases.holds(holder) or any(each.holder == holder for each in self._cancelled)

    def close_when_idle(self, holder: Hashable, close: Callable[[], None]) -> None:
        """Calls `close` once the holder has no attempt left."""
        self._closing[holder] = close

    # --- the step loop ----------------------------------------------------------------------------------

    def tick(self, now: float) -> None:
        self._now = now
        if self.cache.tier is not None:
            self.cache.tier.tick(now)
        self.leases.tick(now)
        borrows = self.sharing.borrower.waits
        waits = any(not (s.request.blocked or borrows(s.request)) for s in self.scheduler.waiting)
        blocked = waits and not self.scheduler.prompts
        self.leases.revoke_under_pressure(blocked, now)
        self.sharing.tick(now, blocked)

    def admit(self, now: float) -> None:
        """Does nothing: while a prompt waits for room in a step, more of it may be cached."""

    def plan(self, now: float) -> Step | None:
        self._now = now
        step = self.scheduler.plan()
        self._presses = bool(self.leases.outputs) or self.sharing.pressing
        if step is None:
            return None
        self._cancelled.launched(step)
        for record in step.records:
            attempt = self._attempt_of(record.sequence.request)
            if attempt is not None and attempt.ahead:
                leader = record.sequence
                if leader.retired:
                    self.leases.announce(attempt, leader.retired, False, now)
                self.leases.announce(attempt, record.end, bool(record.targets), now, step.plan.number)
        self.step_stats.planned(step, now)
        return step

    def launched(self, step: Step, launched: Any) -> None:
        if self.prompt_drafts is not None:
            self.prompt_drafts.launched(step, launched, self._attempt_of)

    def commit(self, step: Step, result: StepResult, now: float) -> None:
        self.shell.retire(step.plan.number)  # before anything else: receivers wait for it
        self.step_stats.ended(step, now)
        self.scheduler.commit(step, result)
        self._take_events(now)
        if self.prompt_drafts is not None:
            self.prompt_drafts.committed(step)
        for attempt in self._cancelled.ended(step):
            self._answer_cancelled(attempt)

    def fail_step(self, step: Step, message: str) -> None:
        # The step is never retired: its prompts fail, which stops the pulls that wait for it.
        self.step_stats.failed(step)
        if self.prompt_drafts is not None:
            self.prompt_drafts.failed(step)
        self.scheduler.fail_step(step, message)
        self._take_events(0.0)
        for attempt in self._cancelled.ended(step, failed=True):
            self.leases.say_failed(attempt, "UNAVAILABLE", "STEP_FAILED", message)

    def node_failed(self, message: str) -> None:
        """An error has escaped the core, and the process ends: fails the prompts that were being computed.
        Changes nothing else, because the state cannot be relied on."""
        self.leases.outputs.clear()
        attempts = self.leases.running.values()
        computed = [a for a in attempts if a.request.sequences[0].phase is SequencePhase.PROMPT]
        for attempt in computed + self._cancelled:
            self.leases.say_failed(attempt, "UNAVAILABLE", "NODE_FAILED", message)
        self._send_outputs(0)

    def flush(self, step: int) -> None:
        self._send_outputs(step)
        if self.prompt_drafts is not None:
            self.prompt_drafts.announce()
            self._send_outputs(step)
        self.sharing.flush(self.shell)
        for holder in [h for h in self._closing if not self.holds(h)]:
            self._closing.pop(holder)()
        self.shell.observe()

    def _send_outputs(self, step: int) -> None:
        if not self.leases.outputs:
            return
        outputs, self.leases.outputs = self.leases.outputs, []
        self.shell.send(step, by_holder(outputs), ())

    # --- what the scheduler says ------------------------------------------------------------------------

    def may_admit(self, request: EngineRequest) -> bool:
        """Whether the holder's finished but unpulled prompts leave room for another, and no pages of this one
        are under way."""
        attempt = self._attempt_of(request)
        if attempt is None:
            return True
        if not self.leases.may_lend(attempt.holder):
            return False
        return self.sharing.borrower.settled(request.sequences[0], self._now)

    def _record(self, request: EngineRequest, kind: EventKind, number: int, step: int) -> None:
        if isinstance(request.key, AttemptName):
            self.leases.note(request.key, kind, number, step)

    def _attempt_of(self, request: EngineRequest) -> Attempt | None:
        return self.leases.running.get(request.key) if isinstance(request.key, AttemptName) else None

    def _take_events(self, now: float) -> None:
        for event in self.scheduler.take_events():
            request = event.sequence.request if isinstance(event, ChunkEvent | TokenEvent) else event.request
            attempt = self._attempt_of(request)
            if attempt is None:
                continue
            if isinstance(event, FailedEvent):
                code = "INTERNAL" if event.reason == "BAD_LOGITS" else "UNAVAILABLE"
                self.leases.fail(attempt, code, event.reason, event.message)
            elif isinstance(event, ChunkEvent):
                leader = event.sequence
                if not attempt.ahead:
                    last = leader.phase is SequencePhase.LEASED
                    self.leases.announce(attempt, leader.retired, last, now)
            elif isinstance(event, TokenEvent):
                self._first_token(attempt, event, now)
            elif isinstance(event, PromptEvent):
                self.counters.cached_tokens += request.cached_tokens or 0

    def _first_token(self, attempt: Attempt, event: TokenEvent, now: float) -> None:
        request = attempt.request
        attempt.first.append((event.token, event.logprobs))
        if len(attempt.first) < request.n:
            return
        self.counters.output_tokens += request.n
        block_table = request.sequences[0].block_table
        self.leases.complete(attempt, block_table.held if block_table is not None else 0, now)
        first = FirstSampled(
            attempt.name,
            tuple(attempt.first),
            request.cached_tokens or 0,
            tuple(request.prompt_logprobs),
            None if request.hidden is None else last_rows(request.hidden),
            request.tiers,
        )
        request.hidden = None
        self.leases.outputs.append((attempt.holder, first))
        if not attempt.keep_pages:
            self.leases.finish(attempt)
