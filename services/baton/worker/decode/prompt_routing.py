"""Chooses where the prompts of a decode node are computed: at a prefill node, or here."""

from __future__ import annotations

from dataclasses import dataclass, field

from baton.config import DecodeConfig
from baton.engine.request import Sequence
from baton.engine.scheduler import Scheduler
from baton.engine.scheduler_config import PromptRoute
from baton.worker.decode.remote_prefill import RemotePrefill
from baton.worker.decode.types import MAX_FAILED_STEPS, DecodeRequest, Key, Peer, repeated

LOCAL_PREFILL_TOKENS = 32
"""Prompts with at most this many uncached tokens are computed here if neither caller nor configuration sets a
limit."""
CONNECT_SECONDS = 2.0
"""How long a prompt waits for a connection to a prefill node that is being opened."""


@dataclass(frozen=True, slots=True)
class Unroutable(Exception):
    """The request fails. `code` is the name of a gRPC status code."""

    code: str
    reason: str
    message: str


@dataclass(slots=True, eq=False)
class PromptRouting:
    """A request that ends nodes must end as few as possible. So its prompt is in steps of one node at a time:
    until a prefill node has answered the cancel of a hand-off, a step with the prompt may be in flight there.
    After a retraction the prompt goes to that node again; after a failure, such as pages that could not be
    pulled, it waits for the answer, not for long (RemotePrefill)."""

    config: DecodeConfig
    peers: dict[str, Peer]
    unfinished: dict[Key, DecodeRequest]
    scheduler: Scheduler
    handoffs: RemotePrefill
    chosen: dict[Sequence, str] = field(default_factory=dict)
    """Prefill node of each sequence that is being admitted."""

    def route(self, leader: Sequence, uncached: int, now: float) -> PromptRoute:
        """Chooses the first candidate, in the caller's order, that is connected and has not failed this
        request; else this node. Raises Unroutable."""
        state = self.unfinished[leader.request.key]  # type: ignore[index]
        state.address, state.fallback = "", False
        if state.request.failed_steps >= MAX_FAILED_STEPS:
            raise Unroutable("INTERNAL", "REPEATED_STEP_FAILURE", repeated(state.last_failure))
        if self.handoffs.awaits_answer(state, now):
            return PromptRoute.DEFER
        if state.request.suspect:
            return PromptRoute.LOCAL  # it ends one process at most
        busy = self._busy_with(state)
        if busy not in state.left:
            busy = ""
        if not state.candidates or (uncached <= state.local_tokens and not busy):
            return PromptRoute.LOCAL
        connecting = False
        for address in sorted(state.left, key=lambda address: address != busy):
            peer = self.peers[address]
            if peer.up and state.request.grammar is not None and not peer.grammars:
                continue
            if peer.up and state.request.images and not peer.images:
                continue
            if peer.up and address not in self.handoffs.fetches.pulls.overdue:
                if self.scheduler.in_flight(leader):
                    return PromptRoute.DEFER
                state.address = self.chosen[leader] = address
                return PromptRoute.REMOTE
            connecting = connecting or now - peer.since < CONNECT_SECONDS
        if connecting:
            return PromptRoute.DEFER
        prompts = (s for s in self.scheduler.prompts if s.request.pooling is None)
        fallbacks = (s.missing for s in prompts if self.unfinished[s.request.key].fallback)  # type: ignore[index]
        under_way = sum(fallbacks)
        if under_way and under_way + uncached > self.config.fallback_tokens:
            text = state.last_failure or "none is connected"
            message = f"no prefill node could take the prompt ({text}), and this node prefills no more itself"
            # The caller is to count a step that failed, or to suspect the request, as well.
            code = "UNAVAILABLE" if state.step_failure else "RESOURCE_EXHAUSTED"
            raise Unroutable(code, state.step_failure or "NO_PREFILL_NODE", message)
        state.fallback = True
        return PromptRoute.LOCAL

    def _busy_with(self, state: DecodeRequest) -> str:
        """Address of a prefill node that may have the prompt in a step: of another choice, or of a hand-off
        that was given up. Empty: none."""
        for sequence in state.request.sequences:
            address = self.chosen.get(sequence) or self.handoffs.address_of(sequence)
            if address:
                return address
        return self.handoffs.given_up_at(state)
