"""The prefill side of the hand-off: attempts, announcements, leases.

    start -> queued -> computing -> complete -> released (finished: stood)
                 \\         \\            \\
                  +---------+------------+--> failed (cancelled, out of time, expired, revoked)

A cancelled prompt gives up its pages at once. If a step with it is in flight, the answer waits for the step:
it may fail, and the holder must know that the prompt was in it.

Pages are announced once the step that writes them has retired; to holders that can wait for that themselves
(`ahead`) when it is planned, with its number, and cached ones, which are final, at once.

A lease covers all pages of its prompt from the first announcement to the end of the attempt. It lives while
its holder's heartbeats arrive, plus a grace on this node's monotonic clock. When the holder's stream ends,
everything of the holder's is dropped, and nobody is told.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterator

from baton.engine.batch import Step
from baton.engine.plan import StepResult
from baton.engine.request import (
    ChunkEvent,
    EngineRequest,
    FailedEvent,
    PromptEvent,
    Refused,
    Sequence,
    SequencePhase,
    TokenEvent,
)
from baton.engine.scheduler import Scheduler
from baton.grammar.base import CompiledGrammar, GrammarBusy, GrammarError
from baton.handoff.messages import (
    Alive,
    AttemptName,
    ChunkAnnounced,
    FirstSampled,
    GroupPages,
    LeaseFinished,
    PrefillFailed,
    PrefillOutput,
    RecentNames,
)
from baton.handoff.prefill_attempt import Attempt, CancelledInFlight, PrefillCounters
from baton.tracing.recorder import EventKind, Recorder

REVOKE_AFTER_SECONDS = 2.0
"""A prompt that has waited this long for pages may take the pages of a lease that has been complete as
long."""


class PrefillSide:
    """Pure core of a prefill node. Outputs gather in `outputs`, as (holder, output)."""

    def __init__(
        self,
        scheduler: Scheduler,
        *,
        lease_grace: float,
        max_leased_pages: int,
        recorder: Recorder | None = None,
    ) -> None:
        self.scheduler = scheduler
        self._recorder = recorder or Recorder(0)
        self.outputs: list[tuple[Hashable, PrefillOutput | Alive]] = []
        self.counters = PrefillCounters()
        self._grace = lease_grace
        self._max_leased = max_leased_pages
        self._attempts: dict[AttemptName, Attempt] = {}
        self._ended = RecentNames()
        self._cancelled = CancelledInFlight()
        self._heard: dict[Hashable, float] = {}
        """Of every holder of an attempt, and of others that are connected."""
        self._leased: Counter[Hashable] = Counter()
        self._blocked_since: float | None = None

    # --- what holders ask -------------------------------------------------------------------------------

    def connect(self, holder: Hashable, now: float) -> None:
        self._heard[holder] = now

    def disconnect(self, holder: Hashable) -> None:
        """The holder's stream has ended: drops everything that it held, without a message."""
        self._heard.pop(holder, None)
        for attempt in [a for a in self._attempts.values() if a.holder == holder]:
            self.counters.cancelled += 1
            self._end(attempt, "cancelled")
        self._cancelled.forget(holder)

    def heartbeat(self, holder: Hashable, now: float) -> None:
        if holder in self._heard:
            self._heard[holder] = now
            self.outputs.append((holder, Alive()))

    def start(
        self,
        holder: Hashable,
        name: AttemptName,
        request: EngineRequest,
        keep_pages: bool,
        now: float,
        ahead: bool = False,
    ) -> None:
        """Raises nothing. A name in use is refused: it belongs to another holder, because the shell lets
        no holder use a name twice."""
        self._heard[holder] = now
        if name in self._attempts:
            self.counters.failed += 1
            self.scheduler.close(request)
            text = f"attempt {name} was started by another caller and is still running"
            self.outputs.append((holder, PrefillFailed(name, "INVALID_ARGUMENT", "DUPLICATE_ATTEMPT", text)))
            return
        length = len(request.sequences[0].tokens)
        attempt = Attempt(name, holder, request, keep_pages, ahead, length)
        try:
            self.scheduler.submit(request)
        except Refused as refusal:
            code = "INVALID_ARGUMENT" if refusal.field else "RESOURCE_EXHAUSTED"
            self.counters.failed += 1
            self._ended.add(name)
            self.scheduler.close(request)
            self.outputs.append((holder, PrefillFailed(name, code, refusal.reason, refusal.message)))
            self._note(name, EventKind.ENDED, text=refusal.reason)
            return
        self._attempts[name] = attempt
        self.counters.prompt_tokens += len(request.prompt)

    def compiled(
        self, name: AttemptName, request: EngineRequest, outcome: CompiledGrammar | GrammarError
    ) -> None:
        """Its grammar, or why there is none. The attempt may have ended meanwhile."""
        attempt = self._attempts.get(name)
        if attempt is None or attempt.request is not request:
            return
        if isinstance(outcome, GrammarError):
            self.counters.failed += 1
            words = ("INVALID_ARGUMENT", "INVALID_GRAMMAR")
            if isinstance(outcome, GrammarBusy):
                words = ("RESOURCE_EXHAUSTED", "GRAMMARS_BUSY")
            self._fail(attempt, *words, str(outcome))
        else:
            request.grammar = outcome

    def cancel(self, holder: Hashable, name: AttemptName) -> None:
        attempt = self._owned(holder, name)
        if attempt is not None:
            self.counters.cancelled += 1
            self._end(attempt, "cancelled")
            if not self._cancelled.hold(attempt):
                self._answer_cancelled(attempt)

    def release(self, holder: Hashable, name: AttemptName) -> None:
        """The holder has its copies. The answer confirms that the lease stood until now."""
        attempt = self._owned(holder, name)
        if attempt is not None:
            self._finish(attempt)

    def _owned(self, holder: Hashable, name: AttemptName) -> Attempt | None:
        attempt = self._attempts.get(name)
        if attempt is not None and attempt.holder == holder:
            return attempt
        if name not in self._ended:
            text = "no such attempt here; it may have been started at an earlier incarnation of this node"
            self.outputs.append((holder, PrefillFailed(name, "NOT_FOUND", "UNKNOWN_ATTEMPT", text)))
        return None

    # --- the step loop ----------------------------------------------------------------------------------

    def tick(self, now: float) -> None:
        for attempt in list(self._attempts.values()):
            if attempt.request.deadline <= now:
                self.counters.failed += 1
                self._fail(attempt, "DEADLINE_EXCEEDED", "DEADLINE_EXCEEDED", "the request's time is over")
            elif self._heard[attempt.holder] + self._grace <= now:
                self.counters.expired += 1
                text = f"no heartbeat for {self._grace:g} s"
                self._fail(attempt, "ABORTED", "LEASE_EXPIRED", text)
        self._revoke_under_pressure(now)

    def plan(self, now: float) -> Step | None:
        step = self.scheduler.plan()
        if step is None:
            return None
        self._cancelled.launched(step)
        for record in step.records:
            attempt = self._attempt_of(record.sequence.request)
            if attempt is not None and attempt.ahead:
                leader = record.sequence
                if leader.retired:
                    self._announce(attempt, leader, leader.retired, False, now)
                self._announce(attempt, leader, record.end, bool(record.targets), now, step.plan.number)
        return step

    def commit(self, step: Step, result: StepResult, now: float) -> None:
        self.scheduler.commit(step, result)
        self._take_events(now)
        for attempt in self._cancelled.ended(step):
            self._answer_cancelled(attempt)

    def fail_step(self, step: Step, message: str) -> None:
        self.scheduler.fail_step(step, message)
        self._take_events(0.0)
        for attempt in self._cancelled.ended(step, failed=True):
            failed = PrefillFailed(attempt.name, "UNAVAILABLE", "STEP_FAILED", message)
            self.outputs.append((attempt.holder, failed))

    def node_failed(self, message: str) -> None:
        """An error has escaped the core, and the process ends: fails the prompts that were being computed.
        Changes nothing else, because the state cannot be relied on."""
        computed = [
            a for a in self._attempts.values() if a.request.sequences[0].phase is SequencePhase.PROMPT
        ]
        for attempt in computed + self._cancelled:
            failed = PrefillFailed(attempt.name, "UNAVAILABLE", "NODE_FAILED", message)
            self.outputs.append((attempt.holder, failed))

    def may_admit(self, request: EngineRequest) -> bool:
        """Whether the holder's finished but unpulled prompts leave room for another."""
        attempt = self._attempt_of(request)
        return attempt is None or self._leased[attempt.holder] <= self._max_leased

    @property
    def leases(self) -> int:
        """May be asked from another thread than the core's."""
        return sum(1 for a in list(self._attempts.values()) if a.announced is not None)

    def oldest_lease(self, now: float) -> float:
        """Its age in seconds; 0 without one. May be asked from another thread than the core's."""
        since = [a.leased_since for a in list(self._attempts.values()) if a.leased_since is not None]
        return max(0.0, now - min(since)) if since else 0.0

    def leased_pages(self) -> Iterator[int]:
        """Pages that have been announced and may still be pulled; some of them twice."""
        for attempt in self._attempts.values():
            holding = attempt.request.sequences[0].holding
            if holding is not None and attempt.announced is not None:
                spans = zip(holding.tables, self._begins(attempt), attempt.announced, strict=True)
                for table, begin, end in spans:
                    yield from table[begin:end]

    def holds(self, holder: Hashable) -> bool:
        """Whether the holder has an attempt here, or is still to be told of the end of one."""
        return any(a.holder == holder for a in [*self._attempts.values(), *self._cancelled])

    def knows(self, name: AttemptName) -> bool:
        """Whether an attempt of this name is running here."""
        return name in self._attempts

    def under_way(self) -> list[tuple[AttemptName, Hashable]]:
        """Names and holders of the attempts that have not ended."""
        return [(attempt.name, attempt.holder) for attempt in self._attempts.values()]

    @property
    def requests(self) -> int:
        return len(self._attempts)

    def _take_events(self, now: float) -> None:
        for event in self.scheduler.take_events():
            request = event.sequence.request if isinstance(event, ChunkEvent | TokenEvent) else event.request
            attempt = self._attempt_of(request)
            if attempt is None:
                continue
            if isinstance(event, FailedEvent):
                self.counters.failed += 1
                code = "INTERNAL" if event.reason == "BAD_LOGITS" else "UNAVAILABLE"
                self._fail(attempt, code, event.reason, event.message)
            elif isinstance(event, ChunkEvent):
                leader = event.sequence
                if not attempt.ahead:
                    self._announce(attempt, leader, leader.retired, leader.phase is SequencePhase.LEASED, now)
            elif isinstance(event, TokenEvent):
                self._first_token(attempt, event, now)
            elif isinstance(event, PromptEvent):
                self.counters.cached_tokens += request.cached_tokens or 0

    def _attempt_of(self, request: EngineRequest) -> Attempt | None:
        return self._attempts.get(request.key) if isinstance(request.key, AttemptName) else None

    def _begins(self, attempt: Attempt) -> list[int]:
        """For each KV group the page index of the first page to be announced."""
        cache = self.scheduler.cache
        return [group.spec.keeps(attempt.length, cache.page_size) for group in cache.groups]

    def _announce(
        self, attempt: Attempt, leader: Sequence, tokens: int, last: bool, now: float, step: int = 0
    ) -> None:
        """The pages of the first `tokens` tokens, which are final once `step` has retired; of window groups
        those that are seen behind the prompt."""
        if not attempt.keep_pages or leader.holding is None:
            return
        cache = self.scheduler.cache
        upto = -(-tokens // cache.page_size) if last else tokens // cache.page_size
        announced = attempt.announced or self._begins(attempt)
        if upto > min(announced) or last:
            groups: list[GroupPages] = []
            for begin, table in zip(announced, leader.holding.tables, strict=True):
                pages = tuple(table[begin:upto])
                groups.append(GroupPages(begin, pages, tuple(map(cache.generation, pages))))
            chunk = ChunkAnnounced(attempt.name, tuple(groups), last, step)
            attempt.announced = [max(begin, upto) for begin in announced]
            if attempt.leased_since is None:
                attempt.leased_since = now
            self.outputs.append((attempt.holder, chunk))
            self._note(attempt.name, EventKind.ANNOUNCED, sum(len(each.pages) for each in groups), step)

    def _first_token(self, attempt: Attempt, event: TokenEvent, now: float) -> None:
        request = attempt.request
        attempt.first.append((event.token, event.logprobs))
        if len(attempt.first) < request.n:
            return
        self.counters.output_tokens += request.n
        attempt.complete_since = now
        if request.sequences[0].holding is not None:
            attempt.leased_pages = request.sequences[0].holding.held
            self._leased[attempt.holder] += attempt.leased_pages
        first = FirstSampled(
            attempt.name, tuple(attempt.first), request.cached_tokens or 0, tuple(request.prompt_logprobs)
        )
        self.outputs.append((attempt.holder, first))
        if not attempt.keep_pages:
            self._finish(attempt)

    # --- the recorder -----------------------------------------------------------------------------------

    def record(self, request: EngineRequest, kind: EventKind, number: int, step: int) -> None:
        """Records an event of the scheduler."""
        if isinstance(request.key, AttemptName):
            self._note(request.key, kind, number, step)

    def _note(
        self, name: AttemptName, kind: EventKind, number: int = 0, step: int = 0, text: str = ""
    ) -> None:
        self._recorder.add(
            kind, name.gateway, name.request, name.attempt, name.decode_try, number, step=step, text=text
        )

    # --- ends -------------------------------------------------------------------------------------------

    def _end(self, attempt: Attempt, text: str) -> None:
        self._note(attempt.name, EventKind.ENDED, text=text)
        del self._attempts[attempt.name]
        self._leased[attempt.holder] -= attempt.leased_pages
        if not self._leased[attempt.holder]:
            del self._leased[attempt.holder]
        self._ended.add(attempt.name)
        self.scheduler.close(attempt.request)

    def _finish(self, attempt: Attempt) -> None:
        self.counters.finished += 1
        self._end(attempt, "released")
        self.outputs.append((attempt.holder, LeaseFinished(attempt.name, stood=True)))

    def _answer_cancelled(self, attempt: Attempt) -> None:
        failed = PrefillFailed(attempt.name, "CANCELLED", "CANCELLED", "cancelled by its holder")
        self.outputs.append((attempt.holder, failed))

    def _fail(self, attempt: Attempt, code: str, reason: str, message: str) -> None:
        self._end(attempt, reason)
        self.outputs.append((attempt.holder, PrefillFailed(attempt.name, code, reason, message)))

    def _revoke_under_pressure(self, now: float) -> None:
        """A prompt that has been blocked for long takes the pages of the least important lease that is not
        being pulled.

        A request is revoked at most once: leases of second tries stay.
        """
        waits = any(not sequence.request.awaits_grammar for sequence in self.scheduler.waiting)
        blocked = waits and not self.scheduler.prompts
        if not blocked:
            self._blocked_since = None
            return
        if self._blocked_since is None:
            self._blocked_since = now
        if now - self._blocked_since < REVOKE_AFTER_SECONDS:
            return
        idle = [
            a
            for a in self._attempts.values()
            if a.complete_since is not None
            and now - a.complete_since >= REVOKE_AFTER_SECONDS
            and a.name.decode_try == 0
            and a.request.sequences[0].phase is SequencePhase.LEASED
        ]
        if idle:
            victim = min(idle, key=lambda a: (a.request.priority, -a.request.order))
            self.counters.revoked += 1
            self._blocked_since = now
            self._fail(victim, "ABORTED", "LEASE_REVOKED", "its pages were needed by a prompt that waited")
