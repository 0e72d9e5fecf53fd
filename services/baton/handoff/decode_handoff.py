"""A hand-off as the decode node keeps it, and its counters of all."""

from __future__ import annotations

from dataclasses import dataclass, field

from baton.engine.request import Sequence
from baton.handoff.messages import AttemptName

MAX_REASONS = 32


@dataclass(slots=True, eq=False)
class Handoff:
    """State of one hand-off from a prefill node."""

    name: AttemptName
    address: str
    leader: Sequence
    heard: float
    begins: list[int]
    """For each KV group the page index with which its announcements begin."""
    pages: list[list[int]]
    """For each KV group the owner's page ids, as announced."""
    generations: list[list[int]]
    named: set[int] = field(default_factory=set)
    """All of those pages."""
    announced_all: bool = False
    step: int = 0
    """The pages announced so far are final once this step of the owner's has retired."""
    here: list[int] | None = None
    """For each KV group the page index up to which pages have arrived or were cached; None before the
    first announcement."""
    pull: int | None = None
    first: bool = False
    released: bool = False
    seen: bool = True
    """Whether generations were compared after every copy; else the answer to the release decides."""

    @property
    def announced(self) -> list[int]:
        """For each KV group the page index up to which pages have been announced."""
        return [begin + len(pages) for begin, pages in zip(self.begins, self.pages, strict=True)]


@dataclass(slots=True)
class HandoffCounters:
    pulled_pages: int = 0
    retries: dict[str, int] = field(default_factory=dict)
    """Number of retries by reason."""
    unknown: int = 0
    """Messages with an unknown name."""

    def count_retry(self, reason: str) -> None:
        """Peers may send any reason: those beyond MAX_REASONS count as OTHER."""
        if reason not in self.retries and len(self.retries) >= MAX_REASONS:
            reason = "OTHER"
        self.retries[reason] = self.retries.get(reason, 0) + 1
