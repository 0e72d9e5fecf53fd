"""Plain data of a decode node: its requests, the prefill nodes it knows, and its outputs to callers."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, field

from baton.engine.plan import Logprobs
from baton.engine.request import EngineFinishReason, EngineRequest
from baton.handoff.messages import Peer as Peer
from baton.handoff.messages import PromptSource
from baton.tracing.recorder import EventKind
from baton.v1 import decode_pb2
from baton.worker.convert import tiers_to


@dataclass(frozen=True, slots=True)
class Key:
    """A request's name at this node: the caller's stream and the number the caller gave."""

    caller: Hashable
    request: int


PHASES = {
    EventKind.QUEUED: "queue",
    EventKind.ADMITTED: "prefill",
    EventKind.FIRST_TOKEN: "pull",
    EventKind.RUNNING: "decode",
    EventKind.RETRACTED: "queue",
    EventKind.RETRIED: "queue",
}
"""What a request does after an event."""


MAX_FAILED_STEPS = 2
"""A request that was in this many steps that failed, or that ended their node, counts as the cause."""
STEP_FAILURES = ("STEP_FAILED", "NODE_FAILED")
"""Reasons with which a prefill node fails prompts that were in such a step."""


@dataclass(slots=True, eq=False)
class DecodeRequest:
    """State of a request from its start to its terminal event."""

    key: Key
    gateway: int
    attempt: int
    request: EngineRequest
    candidates: tuple[str, ...]
    local_tokens: int
    """A prompt with at most this many uncached tokens is prefilled here."""
    sources: tuple[PromptSource, ...] = ()
    tried: set[str] = field(default_factory=set)
    """Candidates given up so far."""
    address: str = ""
    """Where the prompt is computed; empty: here."""
    fallback: bool = False
    """The prompt is computed here because no prefill node could be used."""
    retries: int = 0
    """Hand-offs that failed."""
    pulled_pages: int = 0
    output_tokens: int = 0
    last_failure: str = ""
    step_failure: str = ""
    """With which of STEP_FAILURES a prefill node last failed it; PREFILL_LOST: one was lost with it."""
    failed_at: set[str] = field(default_factory=set)
    """Prefill nodes that have."""
    spent: dict[str, float] = field(default_factory=dict)
    """Seconds by phase: queue, prefill, pull, decode."""
    phase: str = ""
    since: float = 0.0
    """When `phase` began, on the recorder's clock."""
    announce: bool = False
    """The caller wants to know when it is admitted, and has not been told."""
    admitted: float | None = None
    """When its admission was last decided on, less the seconds that steps had stalled by then."""

    def enter(self, phase: str, now: float) -> None:
        """The phase before ends."""
        if self.phase:
            self.spent[self.phase] = self.spent.get(self.phase, 0.0) + now - self.since
        self.phase, self.since = phase, now

    def step_failed(self, reason: str, message: str) -> tuple[str, str, str]:
        """Code, reason and message for a request of a failed step: it is retried elsewhere, once."""
        self.request.failed_steps += 1
        if self.request.failed_steps < MAX_FAILED_STEPS:
            return "UNAVAILABLE", reason, message
        return "INTERNAL", "REPEATED_STEP_FAILURE", repeated(message)

    def handoff_failed(self, address: str, reason: str, message: str) -> None:
        self.retries += 1
        self.last_failure = f"{address}: {reason}: {message}"
        if reason == "PEER_LOST" and not self.step_failure:
            self.step_failure = "PREFILL_LOST"
        self.count_try(address, reason)

    def count_try(self, address: str, reason: str) -> None:
        """The candidate at `address` has failed."""
        # Choices that are computed each by itself may have been in the same step there: it counts once.
        if reason in STEP_FAILURES and address not in self.failed_at:
            self.failed_at.add(address)
            self.step_failure = reason
            self.request.failed_steps += 1
        self.tried.add(address)

    @property
    def left(self) -> list[str]:
        """Candidates that have not failed, in the caller's order: those that were not connected too."""
        return [address for address in self.candidates if address not in self.tried]

    def stats(self, peer: Peer | None) -> decode_pb2.RequestStats:
        """`peer`: the node at `address`."""
        return decode_pb2.RequestStats(
            prompt_tokens=len(self.request.prompt),
            cached_tokens=self.request.cached_tokens or 0,
            cached_tiers=tiers_to(self.request.tiers),
            output_tokens=self.output_tokens,
            pulled_pages=self.pulled_pages,
            transport=peer.transport if peer is not None and self.pulled_pages else "",
            prefill_address=self.address,
            retractions=self.request.retractions,
            handoff_retries=self.retries,
            drafted_tokens=self.request.drafted_tokens,
            accepted_drafts=self.request.accepted_drafts,
            **{f"{phase}_us": max(0, int(1e6 * seconds)) for phase, seconds in self.spent.items()},
        )


def repeated(message: str) -> str:
    return f"the request was in {MAX_FAILED_STEPS} steps that failed, and is not tried again: {message}"


@dataclass(slots=True)
class DecodeCounters:
    prompt_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    finished: int = 0
    failed: int = 0
    cancelled: int = 0
    refused: int = 0
    """Refused because their deadline could not be met."""


# --- outputs to callers, which `stream` makes messages of ---


@dataclass(slots=True)
class TokensOutput:
    """Not frozen, for its number: see `engine.plan`."""

    request: int
    attempt: int
    choice: int
    token: int
    logprobs: Logprobs | None
    finish: EngineFinishReason | None


@dataclass(frozen=True, slots=True)
class Admitted:
    """A request has pages and rows."""

    request: int
    attempt: int


@dataclass(frozen=True, slots=True)
class PromptOutput:
    request: int
    attempt: int
    cached_tokens: int
    logprobs: tuple[Logprobs, ...] | None
    """None: not requested."""


@dataclass(frozen=True, slots=True)
class Turn:
    """The request is the next suspect: it waits for its caller's `begin`."""

    request: int
    attempt: int


@dataclass(frozen=True, slots=True)
class DoneOutput:
    """Terminal."""

    request: int
    attempt: int
    stats: decode_pb2.RequestStats
    """`pulled_bytes` is the shell's to set."""


@dataclass(frozen=True, slots=True)
class FailedOutput:
    """Terminal. `code` is the name of a gRPC status code."""

    request: int
    attempt: int
    code: str
    reason: str
    message: str
    field: str | None = None
    retry_after_ms: int | None = None


DecodeOutput = Admitted | TokensOutput | PromptOutput | Turn | DoneOutput | FailedOutput
