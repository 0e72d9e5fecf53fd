"""What timelines are made of, as plain data."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from baton.tracing.recorder import Event


@dataclass(frozen=True, slots=True)
class TimelineProcess:
    role: str
    address: str = ""
    """host:port; empty: the gateway."""


GATEWAY = TimelineProcess("gateway")


@dataclass(frozen=True, slots=True)
class Recorded:
    """One request's events in one process, oldest first. offset: measured, in seconds; added to the process's
    clock it gives the gateway's."""

    process: TimelineProcess
    events: Sequence[Event]
    offset: float = 0.0


@dataclass(slots=True)
class TimelinePhase:
    """Seconds since the request was received. end None: it lasts."""

    name: str
    process: TimelineProcess
    start: float
    end: float | None = None
    detail: str = ""


@dataclass(frozen=True, slots=True)
class TimedEvent:
    """An event of a process. at: seconds since the request was received."""

    at: float
    process: TimelineProcess
    event: Event


@dataclass(slots=True)
class Timeline:
    gateway: int
    request: int
    received: float
    """On the gateway's clock."""
    total: float = 0.0
    """Seconds until its end, or until now."""
    ttft: float | None = None
    outcome: str = ""
    """finished, cancelled or failed; empty: it runs."""
    reason: str = ""
    prompt_tokens: int = 0
    output_tokens: int = 0
    phases: list[TimelinePhase] = field(default_factory=list)
    work: list[TimelinePhase] = field(default_factory=list)
    events: list[TimedEvent] = field(default_factory=list)

    @property
    def id(self) -> str:
        return f"{self.gateway:016x}-{self.request}"


def parse_id(id: str) -> tuple[int, int] | None:
    """Gateway and request of a name such as Timeline.id; None: it is none."""
    gateway, _, request = id.partition("-")
    try:
        found = int(gateway, 16), int(request)
    except ValueError:
        return None
    return found if 0 < found[0] < 2**64 and 0 < found[1] < 2**64 else None
