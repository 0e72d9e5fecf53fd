"""The scheduler: which tokens of which sequences the next step computes, and what becomes of its results.

Pure: no clock, no I/O, no device. The caller alternates `plan`, launching, reading and `commit`; with overlap
it plans and launches step N+1 before it commits step N. Page ownership goes through KvCache alone.

        submit            admit (here)              last chunk retired
    -> WAITING ---------------> PROMPT ---------------------------> RUNNING -> ENDED
         ^  |                                                        ^  |
         |  +---- admit (elsewhere) ----> HANDOFF --- arrive --------+  |
         +------------- retract, requeue -----------+-------------------+
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from enum import Enum, auto

from baton.engine.admission import Reservations, Slots, WaitingQueue
from baton.engine.batch import Copy, Step, build_step
from baton.engine.plan import StepResult
from baton.engine.progress import commit_rows
from baton.engine.request import (
    Event,
    FailedEvent,
    Phase,
    Refused,
    Request,
    Sequence,
)
from baton.kvcache import KvCache, OutOfPages


class Route(Enum):
    """Where an admitted prompt is computed."""

    LOCAL = auto()
    REMOTE = auto()
    DEFER = auto()
    """Not known yet; ask again."""


@dataclass(frozen=True, slots=True)
class SchedulerConfig:
    context_length: int
    """Tokens of prompt and output together."""
    token_budget: int
    """Tokens of a step: decode rows first, prompt chunks with the rest."""
    max_rows: int
    full_step: int = sys.maxsize
    """A step with so many tokens of prompts that end in it takes no younger prompt."""
    max_waiting: int = 1024
    policy: str = "fcfs"
    output_margin: int = 64
    """Output tokens per sequence for which pages are reserved at admission."""
    watermark: int = 0
    """Pages that admission leaves free while anything is running."""
    prompt_only: bool = False
    """A prefill node: a prompt's pages are kept (Phase.LEASED) once its first tokens have been sampled."""


class Scheduler:
    """Moves requests from submission to their last token.

    `route` says where a prompt is computed; `abandon` is told before a sequence in HANDOFF loses its pages.
    """

    def __init__(
        self,
        cache: KvCache,
        config: SchedulerConfig,
        route: Callable[[Sequence, int], Route] = lambda sequence, uncached: Route.LOCAL,
        abandon: Callable[[Sequence], None] = lambda sequence: None,
        may_admit: Callable[[Request], bool] = lambda request: True,
    ) -> None:
        if config.token_budget < config.max_rows:
            raise ValueError("token_budget must be at least max_rows")
        self.cache = cache
        self.config = config
        self.slots = Slots(config.max_rows)
        self.reservations = Reservations(cache)
        self.requests: dict[Hashable, Request] = {}
        self.waiting = WaitingQueue(
            config.policy, lambda s: cache.match_length(s.tokens, s.request.namespace)
        )
        self.prompts: list[Sequence] = []
        self.running: list[Sequence] = []
        self.handoffs: list[Sequence] = []
        self.copies: list[Copy] = []
        self.events: list[Event] = []
        self.step_number = 0
        self.retractions = 0
        self.computed_tokens = 0
        self.local_prompts = 0
        """Prompts whose computation here has begun."""
        self._route = route
        self.abandon = abandon
        self._may_admit = may_admit
        self._arrivals = 0
        self._unentered: list[Sequence] = []
        """Their prompt is final and not yet in the prefix tree."""

    # --- entering and leaving ---------------------------------------------------------------------------

    def submit(self, request: Request) -> None:
        """Queues a request. Raises Refused when it could never run, or when too many wait."""
        config, size = self.config, self.cache.page_size
        known = max(len(sequence.tokens) for sequence in request.sequences)
        total = self.cache.counts().total
        room = min(config.context_length, total * size)
        if not request.prompt:
            raise Refused("EMPTY_PROMPT", "the prompt has no tokens", "token_ids")
        if known + (0 if config.prompt_only else 1) > room:
            raise Refused("PROMPT_TOO_LONG", f"{known} tokens; this node holds at most {room}", "token_ids")
        if not config.prompt_only and len(request.prompt) + request.params.max_tokens > room:
            wanted = f"prompt ({len(request.prompt)}) and max_tokens ({request.params.max_tokens})"
            text = f"{wanted} exceed {room} tokens"
            raise Refused("TOO_MANY_TOKENS", text, "sampling.max_tokens")
        if request.n > self.slots.count:
            raise Refused("TOO_MANY_CHOICES", f"n must be at most {self.slots.count}", "n")
        if request.key in self.requests:
            raise Refused("DUPLICATE_REQUEST", "a request of this name is running", "request")
        if len(self.waiting) >= config.max_waiting:
            raise Refused("QUEUE_FULL", f"{config.max_waiting} requests are waiting")
        self._arrivals += 1
        request.order = self._arrivals
        request.forked = request.n == 1 or bool(request.delivered)
        self.requests[request.key] = request
        for sequence in request.sequences if request.forked else request.sequences[:1]:
            if sequence.phase is Phase.WAITING:
                self.waiting.add(sequence)

    def close(self, request: Request) -> None:
        """Ends the request wherever it is (cancelled, out of time, lease over); no event follows."""
        for sequence in request.sequences:
            if sequence.phase is Phase.HANDOFF and sequence in self.handoffs:
                self.abandon(sequence)
            self.end(sequence)
        self.forget(request)

    def forget(self, request: Request) -> bool:
        """All its sequences have ended. Unties it from them, so that it goes with the last reference to it,
        prompt and all, rather than with a garbage collection. Returns whether it had been submitted."""
        request.sequences.clear()
        submitted = self.requests.get(request.key) is request
        if submitted:
            del self.requests[request.key]
        return submitted

    def fail(self, request: Request, reason: str, message: str) -> None:
        self.close(request)
        self.events.append(FailedEvent(request, reason, message))

    def take_events(self) -> list[Event]:
        events, self.events = self.events, []
        return events

    @property
    def queued_tokens(self) -> int:
        """Prompt tokens still to be computed here. Of waiting ones all, as nobody has looked what is cached;
        none where they may yet be computed elsewhere."""
        waiting = sum(len(s.tokens) for s in self.waiting) if self.config.prompt_only else 0
        return waiting + sum(sequence.missing for sequence in self.prompts)

    # --- admission --------------------------------------------------------------------------------------

    def admit_elsewhere(self) -> None:
        """Admits what is computed elsewhere, first come first served; `plan` does the rest.

        What is computed here waits for it, and all that came later with it: of a prompt more may be cached
        by then. Under another policy all do, to be put in order among those that have come by then.
        """
        if self.config.policy == "fcfs":
            self._admit(elsewhere=True)

    def _admit(self, elsewhere: bool = False) -> None:
        if not self.slots.free or not self.waiting:
            return
        self._enter_rest()
        for sequence in self.waiting.in_order():
            if not self._may_admit(sequence.request) or self._tries_other_suspect(sequence.request):
                continue
            if sequence.phase is Phase.WAITING and not self._try_admit(sequence, elsewhere):
                # Nobody overtakes for want of room: small requests must not starve a large one.
                break

    def _tries_other_suspect(self, request: Request) -> bool:
        """Whether the request waits for another one that may also have made a step fail: when the next step
        fails, at most one of them was in it."""
        admitted = (*self.prompts, *self.handoffs, *self.running) if request.failed_steps else ()
        return any(s.request.failed_steps and s.request is not request for s in admitted)

    def _try_admit(self, leader: Sequence, elsewhere: bool) -> bool:
        """False: there is no room for it now, or it is computed here and `elsewhere` is wanted. True:
        admitted, or not to be admitted for another reason."""
        request, config, size = leader.request, self.config, self.cache.page_size
        followers = [] if request.forked else request.sequences[1:]
        if self.slots.free < 1 + len(followers):
            return False
        known = len(leader.tokens)
        # At least one token is computed, for its logits; all of them where the prompt's logits are wanted.
        limit = 0 if request.wants_prompt_logprobs else (known - 1) // size
        uncached = known - self.cache.match_length(leader.tokens, request.namespace, limit)
        route = self._route(leader, uncached)
        if route is Route.DEFER or leader.phase is not Phase.WAITING:
            return True
        if elsewhere and route is Route.LOCAL:
            return False
        margin = 0 if config.prompt_only else min(config.output_margin, request.params.max_tokens)
        need = self.pages(known + margin) + len(followers) * (
            0 if config.prompt_only else 1 + self.pages(margin)
        )
        need = min(need, self.cache.counts().total)
        floor = config.watermark if self.prompts or self.running or self.handoffs else 0
        if route is Route.LOCAL:
            holding = self.cache.hold(leader.tokens, request.namespace, limit)
            if self.reservations.headroom - floor < need - len(holding.pages):
                self.cache.release(holding, 0)
                return False
            leader.holding = holding
            need -= len(holding.pages)
            leader.computed = leader.retired = len(holding.pages) * size
            if request.cached_tokens is None:
                request.cached_tokens = leader.computed
                self.local_prompts += 1
        elif self.reservations.headroom - floor < need:
            return False
        self.waiting.remove(leader)
        self.reservations.set(leader, need)
        leader.followers = followers
        for sequence in (leader, *followers):
            sequence.phase = Phase.PROMPT if route is Route.LOCAL else Phase.HANDOFF
            sequence.slot = self.slots.take()
            sequence.slot_ready = False
        (self.prompts if route is Route.LOCAL else self.handoffs).append(leader)
        return True

    def pages(self, tokens: int) -> int:
        return -(-tokens // self.cache.page_size)

    # --- pages under way --------------------------------------------------------------------------------

    def extend(self, sequence: Sequence, pages: int) -> bool:
        """Brings an admitted sequence's page table to `pages` pages; False: there are none to be had now.

        A sequence takes from its own reservation first and beyond it only what nobody has been promised.
        """
        assert sequence.holding is not None
        count = pages - len(sequence.holding.pages)
        if count <= 0:
            return True
        if count > sequence.reserved + max(0, self.reservations.headroom):
            return False
        try:
            self.cache.extend(sequence.holding, count)
        except OutOfPages:
            return False
        self.reservations.use(sequence, count)
        return True

    def adopt_cached(self, sequence: Sequence, tokens: int) -> int:
        """Gives a sequence in HANDOFF the pages that the prefix tree holds of its first `tokens` tokens.

        Returns their number; what they cost is taken out of the reservation, which covers the whole prompt.
        """
        self._enter_rest()
        request = sequence.request
        known = sequence.tokens[:tokens]
        sequence.holding = self.cache.hold(known, request.namespace, tokens // self.cache.page_size)
        self.reservations.use(sequence, len(sequence.holding.pages))
        return len(sequence.holding.pages)

    def enter(self, sequence: Sequence) -> None:
        """Enters the full pages of the sequence's final tokens into the prefix tree: all of them, or none
        while that would lock pages that have been promised to others."""
        assert sequence.holding is not None
        tokens, spare = sequence.tokens[: sequence.retired], max(0, self.reservations.headroom)
        self.cache.commit(sequence.holding, tokens, sequence.request.namespace, spare)

    def enter_later(self, sequence: Sequence) -> None:
        """As `enter`, but before the next prompt is matched or the next results are taken in: what is under
        way now, first tokens and a launch, is not to wait for it."""
        self._unentered.append(sequence)

    def _enter_rest(self) -> None:
        unentered, self._unentered = self._unentered, []
        for sequence in unentered:
            self.enter(sequence)

    def extend_or_retract(self, sequence: Sequence, pages: int) -> bool:
        """Like `extend`, at the cost of younger sequences. False: the sequence sits out this step."""
        while not self.extend(sequence, pages):
            if self.cache.pending:
                return False  # pages are about to come back; retracting more would be rash
            victim = max([*self.running, *self.prompts, *self.handoffs], key=lambda s: s.age)
            self.retractions += 1
            victim.request.retractions += 1
            self.requeue(victim)
            if victim is sequence:
                return False
        return True

    def requeue(self, leader: Sequence) -> None:
        """Takes an admitted sequence's pages and slot away; it waits to be admitted and computed again."""
        if leader.phase is Phase.HANDOFF:
            self.abandon(leader)
        group = [leader, *leader.followers]
        if not leader.request.reported:
            leader.request.prompt_logprobs.clear()
        for sequence in group:
            self._vacate(sequence)
            sequence.phase = Phase.WAITING
        # Before the fork the followers have no life of their own.
        for sequence in group if leader.request.forked else [leader]:
            if sequence.finish is not None:
                sequence.phase = Phase.ENDED
            else:
                self.waiting.add(sequence)

    def _vacate(self, sequence: Sequence) -> None:
        for queue in (self.prompts, self.running, self.handoffs):
            if sequence in queue:
                queue.remove(sequence)
        if sequence.holding is not None:
            if sequence.phase is not Phase.HANDOFF and sequence.retired:
                self.enter(sequence)
            if sequence in self._unentered:
                self._unentered.remove(sequence)
            self.cache.release(sequence.holding, sequence.last_step)
            sequence.holding = None
        if sequence.slot is not None:
            self.slots.give_back(sequence.slot, sequence.last_step)
            sequence.slot = None
        self.reservations.set(sequence, 0)
        sequence.followers = []
        sequence.slot_ready = False
        sequence.computed = sequence.retired = sequence.unread = 0
        sequence.epoch += 1

    def end(self, sequence: Sequence) -> None:
        if sequence.phase is Phase.ENDED:
            return
        if sequence.phase is Phase.WAITING and sequence in list(self.waiting):
            self.waiting.remove(sequence)
        self._vacate(sequence)
        sequence.phase = Phase.ENDED

    # --- steps ------------------------------------------------------------------------------------------

    def plan(self) -> Step | None:
        """The next step, or None when there is nothing to compute."""
        self._admit()
        return build_step(self)

    def commit(self, step: Step, result: StepResult) -> None:
        """Takes in a step's results and gives back what it was the last to use."""
        self._enter_rest()
        self.cache.retire(step.plan.number)
        self.slots.retire(step.plan.number)
        for holding in step.pinned:
            self.cache.unpin(holding)
        commit_rows(self, step, result)

    def fail_step(self, step: Step, message: str) -> None:
        """The step could not be executed: everything in it fails."""
        self._enter_rest()
        self.cache.retire(step.plan.number)
        self.slots.retire(step.plan.number)
        for holding in step.pinned:
            self.cache.unpin(holding)
        for request in {id(r.sequence.request): r.sequence.request for r in step.records}.values():
            if self.requests.get(request.key) is request:
                self.fail(request, "STEP_FAILED", message)
