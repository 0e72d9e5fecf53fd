"""What a worker's core shares of prefix trees, whatever its role. Pure."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import Protocol

from baton.engine.scheduler import Scheduler
from baton.engine.step_stats import StepStats
from baton.handoff.messages import Alive, FetchEffect, PrefillOutput
from baton.kvcache.page_map import PageUse, mark
from baton.tracing.recorder import Recorder
from baton.worker.sources.borrower import Borrower
from baton.worker.sources.lender import CacheLender

GRACE_SECONDS = 10.0
"""What is lent outlives its holder's last heartbeat by so long."""
SILENCE_SECONDS = 10.0
PULL_SECONDS = 60.0
"""See Fetches. What is borrowed is given up much earlier; this is when its pages are quarantined."""

LeaseOutputs = dict[Hashable, list[PrefillOutput]]
"""Outputs by holder of a lease; an empty list answers a heartbeat."""


class SharingShell(Protocol):
    """The part of the shell that it needs. Called in the step thread; must not block."""

    def share(self, lent: LeaseOutputs, effects: Sequence[FetchEffect]) -> None:
        """Sends what borrowers are told and what sources are asked."""


class CacheSharing:
    def __init__(
        self,
        scheduler: Scheduler,
        stats: Callable[[], StepStats],
        recorder: Recorder,
        *,
        pull_seconds: float = PULL_SECONDS,
        grace: float = GRACE_SECONDS,
    ) -> None:
        self.lender = CacheLender(scheduler, grace)
        self.borrower = Borrower(
            scheduler, stats, recorder, silence=SILENCE_SECONDS, pull_seconds=pull_seconds
        )

    @property
    def pressing(self) -> bool:
        """Whether something must be sent before the next launch."""
        return bool(self.lender.leases.outputs or self.borrower.fetches.effects)

    def mark(self, uses: bytearray) -> None:
        """Notes what is lent and what is being pulled in a map of the pool's PageUses."""
        mark(uses, self.lender.leases.pages(), PageUse.LEASED)
        mark(uses, self.borrower.fetches.pulls.targets(), PageUse.PULLING)

    def tick(self, now: float, blocked: bool) -> None:
        """`blocked`: whether work of this worker waits for pages."""
        self.lender.tick(now)
        self.lender.leases.revoke_under_pressure(blocked, now)
        self.borrower.tick(now)

    def flush(self, shell: SharingShell) -> None:
        if not self.pressing:
            return
        leases, fetches = self.lender.leases, self.borrower.fetches
        outputs, leases.outputs = leases.outputs, []
        effects, fetches.effects = fetches.effects, []
        shell.share(by_holder(outputs), effects)


def by_holder(outputs: Sequence[tuple[Hashable, PrefillOutput | Alive]]) -> LeaseOutputs:
    found: LeaseOutputs = {}
    for holder, output in outputs:
        messages = found.setdefault(holder, [])
        if not isinstance(output, Alive):
            messages.append(output)
    return found
