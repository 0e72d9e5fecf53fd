"""Prompts that prefill nodes compute for a decode node.

    begin -> asked -> first tokens, and all pages here -> arrive
       \\________\\__________________\\
            lost (see handoff.fetch): requeued, for the next candidate
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from baton.config import DecodeConfig
from baton.engine.draft.paged_drafter import PagedDrafter
from baton.engine.request import Sequence
from baton.engine.scheduler import Scheduler
from baton.handoff.fetch import Fetch, Fetches
from baton.handoff.messages import (
    AttemptName,
    DraftsAnnounced,
    FirstSampled,
    HandoffNames,
    PrefillOutput,
    StartPrefill,
)
from baton.kvcache import BlockTable
from baton.tracing.recorder import EventKind
from baton.worker.decode.draft_pulls import DraftPulls, PulledDrafts
from baton.worker.decode.request_recording import RequestRecording
from baton.worker.decode.types import STEP_FAILURES, DecodeRequest, Key

CANCEL_SECONDS = 2.0
"""How long a prompt waits for a prefill node to answer the cancel of a hand-off that failed on this side."""


@dataclass(slots=True, eq=False, kw_only=True)
class Handoff(Fetch):
    """A prompt that a prefill node computes, and the fetch of its pages."""

    leader: Sequence
    tokens: int
    """Whose KV the pages hold: all but those sampled there."""
    drafts: PulledDrafts | None = None
    """What has come, or is coming, of the drafter's pages."""


@dataclass(slots=True, eq=False)
class RemotePrefill:
    """All hand-offs of one decode node; the FetchCore of their pages."""

    config: DecodeConfig
    scheduler: Scheduler
    unfinished: dict[Key, DecodeRequest]
    recording: RequestRecording
    fetches: Fetches[Handoff] = field(init=False)
    drafts: DraftPulls | None = field(init=False, default=None)
    """None: no drafter's pages come."""
    given_up: dict[AttemptName, tuple[DecodeRequest, str, float]] = field(default_factory=dict)
    """Hand-offs of unfinished requests that were given up and whose node (its address) has not answered, and
    until when the prompt waits for that."""
    _by_leader: dict[Sequence, Handoff] = field(default_factory=dict)
    _names: HandoffNames = field(default_factory=HandoffNames)

    def __post_init__(self) -> None:
        silence, pull_seconds = self.config.handoff_seconds, self.config.pull_seconds
        self.fetches = Fetches(self.scheduler.cache, self, silence=silence, pull_seconds=pull_seconds)
        planner, peers = self.scheduler.drafts, self.recording.peers
        if planner is not None and isinstance(planner.drafter, PagedDrafter):
            self.drafts = DraftPulls(planner, planner.drafter, self.fetches, peers, pull_seconds)

    def __contains__(self, leader: Sequence) -> bool:
        return leader in self._by_leader

    def address_of(self, leader: Sequence) -> str:
        """The node that computes the sequence's prompt; empty: it has no hand-off."""
        handoff = self._by_leader.get(leader)
        return handoff.address if handoff is not None else ""

    def awaits_answer(self, state: DecodeRequest, now: float) -> bool:
        """Whether the prompt waits until a node has answered the cancel of its last hand-off."""
        return any(each is state and now < until for each, _, until in self.given_up.values())

    def given_up_at(self, state: DecodeRequest) -> str:
        """Address of a node that may have the prompt in a step, though its hand-off was given up. Empty:
        none."""
        return next((at for each, at, until in self.given_up.values() if each is state and not until), "")

    def next_name(self, state: DecodeRequest) -> AttemptName:
        """For the request's next try."""
        number = state.gateway, state.key.request, state.attempt
        return self._names.next(*number, in_use=self.fetches.running.__contains__)

    def begin(self, leader: Sequence, address: str, now: float) -> None:
        """Asks the node at `address` for the prompt of an admitted sequence."""
        request, state, cache = leader.request, self._state(leader), self.scheduler.cache
        name = self.next_name(state)
        self.recording.sent(name, address)
        handoff = self._by_leader[leader] = Handoff(
            name=name,
            address=address,
            last_seen=now,
            rows=self.scheduler.rows(len(leader.tokens)),
            begins=[group.spec.keeps(len(leader.tokens), cache.page_size) for group in cache.groups],
            # If the first token is also the last, the pages are not needed here.
            pull_early=leader.num_output + 1 < request.params.max_tokens,
            leader=leader,
            tokens=len(leader.tokens),
        )
        if self.drafts is not None and handoff.pull_early and not request.images:
            handoff.waits = self.drafts.expected_from(address)
        self.fetches.begin(handoff)
        params = replace(request.params, seed=leader.seed)
        if not request.wants_prompt_logprobs:
            params = replace(params, prompt_logprobs=None)
        start = StartPrefill(
            address=address,
            name=name,
            request=request,
            params=params,
            token_ids=tuple(leader.tokens),
            delivered=len(leader.tokens) - len(request.prompt),
            n=1 + len(leader.followers),
            remaining=request.deadline - now,
            sources=state.sources,
        )
        self.fetches.effects.append(start)

    def receive(self, address: str, message: PrefillOutput, now: float) -> None:
        """What the node at `address` says."""
        handoff = self.fetches.of(address, message, now)
        if handoff is None:
            return
        if isinstance(message, FirstSampled):
            self._first(handoff, message, now)
        elif isinstance(message, DraftsAnnounced):
            if self.drafts is not None:
                self.drafts.announced(handoff, message, now)
        else:
            self.fetches.receive(handoff, message, now)

    def _first(self, handoff: Handoff, message: FirstSampled, now: float) -> None:
        leader = handoff.leader
        if handoff.done or len(message.tokens) != 1 + len(leader.followers):
            text = "first tokens came twice, or not one for each choice"
            self.fetches.lose(handoff, "PROTOCOL", text, now)
            return
        self.fetches.owner_done(handoff, now)
        request = leader.request
        if request.cached_tokens is None:
            request.cached_tokens = min(message.cached_tokens, len(leader.tokens))
            request.tiers = message.tiers
        if request.wants_prompt_logprobs:
            request.prompt_logprobs = list(message.prompt_logprobs)
        self.scheduler.first_tokens(leader, list(message.tokens), message.hidden)
        if leader in self:
            self.fetches.advance(handoff, now)

    def tick(self, now: float) -> None:
        self.fetches.tick(now)
        if self.drafts is not None:
            self.drafts.tick(now)

    def abandon(self, leader: Sequence) -> None:
        """The scheduler gives the hand-off up: the request has ended, or it is retracted."""
        handoff = self._by_leader.pop(leader, None)
        if handoff is not None and self.drafts is not None:
            self.drafts.forget(handoff)
        if handoff is None or not self.fetches.abandon(handoff):
            return
        state = self.unfinished.get(leader.request.key)  # type: ignore[call-overload]
        if state is not None:
            self.given_up[handoff.name] = state, handoff.address, 0.0

    def peer_down(self, address: str, reason: str) -> None:
        """It will answer nothing more."""
        self.fetches.peer_down(address, reason)
        self.given_up = {name: each for name, each in self.given_up.items() if each[1] != address}

    def ended(self, state: DecodeRequest) -> None:
        """The request has ended."""
        self.given_up = {name: each for name, each in self.given_up.items() if each[0] is not state}

    # --- FetchCore -------------------------------------------------------------------------------------

    def adopt_cached(self, fetch: Handoff) -> int:
        return self.scheduler.adopt_cached(fetch.leader, fetch.tokens)

    def make_room(self, fetch: Handoff, rows: int) -> BlockTable | None:
        return fetch.leader.block_table if self.scheduler.extend(fetch.leader, rows) else None

    def pull_changed(self, fetch: Handoff, kind: EventKind, pages: int, step: int, error: str | None) -> None:
        self.recording.pulled(kind, fetch.name, fetch.address, pages, step, error)

    def pulled(self, fetch: Handoff, pages: int) -> None:
        self._state(fetch.leader).pulled_pages += pages

    def arrived(self, fetch: Handoff) -> None:
        del self._by_leader[fetch.leader]
        if self.drafts is not None:
            self.drafts.arrived(fetch)
        self.scheduler.arrive(fetch.leader)

    def lost(self, fetch: Handoff, reason: str, message: str, told: float | None) -> None:
        """Requeues the sequence, so that another node is tried. A node that is told while it may still have
        the prompt in a step will answer; the prompt waits for that."""
        del self._by_leader[fetch.leader]
        if self.drafts is not None:
            self.drafts.forget(fetch)
        state = self._state(fetch.leader)
        self.recording.add(state, EventKind.RETRIED, text=reason)
        state.handoff_failed(fetch.address, reason, message)
        if told is not None and not fetch.done and reason != "SILENT":
            self.given_up[fetch.name] = state, fetch.address, told + CANCEL_SECONDS
        self.scheduler.requeue(fetch.leader)

    def failed_late(self, name: AttemptName, address: str, reason: str) -> None:
        """A step that failed with a hand-off that was given up counts: else the request would go there
        again."""
        state, asked, _ = self.given_up.get(name, (None, "", 0.0))
        if state is not None and asked == address:
            del self.given_up[name]
            if reason in STEP_FAILURES:
                state.count_try(address, reason)

    def _state(self, leader: Sequence) -> DecodeRequest:
        return self.unfinished[leader.request.key]  # type: ignore[index]
