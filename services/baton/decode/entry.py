"""What the core of a decode node keeps of a request, of prefill nodes and of itself. Plain data."""

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
    """A request from its start to its terminal event."""

    key: Key
    gateway: int
    attempt: int
    request: Request
    candidates: tuple[str, ...]
    local_tokens: int
    """At most so many tokens left to compute: prefilled here rather than handed off."""
    tried: int = 0
    """Candidates given up so far."""
    address: str = ""
    """Where the prompt is computed; empty: here."""
    fallback: bool = False
    """Its prompt is computed here because no prefill node could be had."""
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
    """A prefill node as the shell last saw it."""

    up: bool
    since: float
    transport: str = ""
    shares_gpu: bool = False
    """With this node."""


@dataclass(slots=True)
class DecodeCounters:
    prompt_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    finished: int = 0
    failed: int = 0
    cancelled: int = 0
    refused: int = 0
    """For want of time."""


@dataclass(frozen=True, slots=True)
class DecodePolicy:
    local_prefill_tokens: int | None
    """At most so many tokens left to compute: prefilled here rather than handed off. None: as callers say."""
    fallback_tokens: int
    """Tokens of prompts that may be prefilled here at a time because no prefill node could be had."""
    silence_seconds: float
    pull_seconds: float
    """A pull that takes longer is given up."""
