"""Messages of the simulated streams besides those of handoff/ and decode/."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from baton.engine.sampling import SamplingParams


@dataclass(frozen=True, slots=True)
class Hello:
    incarnation: int


@dataclass(frozen=True, slots=True)
class Welcome:
    incarnation: int
    lease_grace: float = 0.0
    pool: Any = None
    """A prefill node's pool, for a receiver that shares its memory."""


@dataclass(frozen=True, slots=True)
class StartDecode:
    request: int
    attempt: int
    prompt: tuple[int, ...]
    delivered: tuple[tuple[int, ...] | None, ...]
    params: SamplingParams
    n: int
    namespace: str
    priority: int
    seconds: float
    """Time left."""
    prefill: tuple[str, ...]
    failed_steps: int = 0


@dataclass(frozen=True, slots=True)
class Heartbeat:
    """To a decode node's step thread, which answers with nothing."""


@dataclass(frozen=True, slots=True)
class Draining:
    """From a decode node: it takes no more requests."""


@dataclass(frozen=True, slots=True)
class CancelDecode:
    request: int
    attempt: int
