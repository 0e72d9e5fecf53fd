"""What drafters of decode nodes will attend to of prompts: computed, and lent under the prompts' leases."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from baton.engine.draft.paged_drafter import PagedDrafter
from baton.engine.plan import StepResult
from baton.engine.request import EngineRequest
from baton.engine.step_builder import Step
from baton.handoff.messages import DraftsAnnounced, GroupPages
from baton.layers.async_copy import beside_steps

if TYPE_CHECKING:
    from baton.worker.prefill.core import Attempt


class PromptDrafts:
    """Every attempt with `lends_drafts` gets an announcement, of nothing if need be. What fails here costs
    drafts, not prompts."""

    def __init__(self, drafter: PagedDrafter) -> None:
        self.broken = ""
        """Why nothing is computed any more; empty: it is."""
        self._drafter = drafter
        self._due: dict[Attempt, None] = {}
        """Attempts of which a step has computed tokens."""

    def committed(
        self, step: Step, result: StepResult, attempt_of: Callable[[EngineRequest], Attempt | None]
    ) -> None:
        for record, row in zip(step.records, result.rows, strict=True):
            attempt = attempt_of(record.sequence.request)
            if attempt is None or not attempt.lends_drafts:
                continue
            self._due[attempt] = None
            if row.hidden is not None and not self.broken:
                with self._guarded(), beside_steps(self._drafter.device):
                    self._drafter.observe(record.sequence, record.end - len(row.hidden), row.hidden)

    def compute(self) -> None:
        """Waits for the device, but for no step. To be called when what has been said of the last step is on
        its way."""
        due, self._due = list(self._due), {}
        if not self.broken:
            leaders = [each.request.sequences[0] for each in due]
            with self._guarded(), beside_steps(self._drafter.device):
                self._drafter.fill([(leader, leader.retired) for leader in leaders])
        for attempt in due:
            if attempt.complete_since is not None:
                self._announce(attempt)

    @contextmanager
    def _guarded(self) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            self.broken = f"the drafter failed, and decode nodes draft without it: {error!r}"

    def _announce(self, attempt: Attempt) -> None:
        cache, leader = self._drafter.slots.cache, attempt.request.sequences[0]
        groups: tuple[GroupPages, ...] = ()
        entries = 0
        if not self.broken and (lent := self._drafter.lend(leader)) is not None:
            attempt.drafts, entries = lent
            rows = -(-entries // cache.page_size)
            tables = [tuple(table[:rows]) for table in attempt.drafts.tables]
            groups = tuple(GroupPages(0, table, tuple(map(cache.generation, table))) for table in tables)
        attempt.core.leases.outputs.append((attempt.holder, DraftsAnnounced(attempt.name, groups, entries)))

    def ended(self, attempt: Attempt) -> None:
        self._due.pop(attempt, None)
        if attempt.drafts is not None:
            self._drafter.slots.cache.release(attempt.drafts, 0)
