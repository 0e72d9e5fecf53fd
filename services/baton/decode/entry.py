"""Plain data of a decode node's core: requests, prefill nodes, counters, policy."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass

from baton.engine.request import Request


@dataclass(frozen=True, slots=True)
class Key:
    """A request's name at this node: the caller's stream and the number the caller gave."""

    caller: Hashable
    request: int


@dataclass(slots=True, eq=False)
class Entry:
    """State of a request from its start to its terminal event."""

    key: Key
    gateway: int
    attempt: int
    request: Request
    candidates: tuple[str, ...]
    local_tokens: int
    """A prompt with at most this many uncached tokens is prefilled here."""
    tried: int = 0
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
    """With which of STEP_FAILURES a prefill node last failed it."""
    admitted: float | None = None
    """When its admission was last decided on, less the seconds that steps had stalled by then."""


@dataclass(frozen=True, slots=True)
class Peer:
    """Last known state of a prefill node."""

    up: bool
    since: float
    transport: str = ""
    shares_gpu: bool = False
    """Whether it runs on this node's GPU."""


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


@dataclass(frozen=True, slots=True)
class DecodePolicy:
    local_prefill_tokens: int | None
    """A prompt with at most this many uncached tokens is prefilled here. None: callers decide."""
    fallback_tokens: int
    """Limit of prompt tokens prefilled here at a time because no prefill node could be used."""
    silence_seconds: float
    pull_seconds: float
    """A pull that takes longer is given up."""
