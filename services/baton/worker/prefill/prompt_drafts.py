"""What drafters of decode nodes will attend to of prompts: computed, and lent under the prompts' leases.

A GPU gets it enqueued behind the chunk that it follows on, before that has been read. Until then nobody else
finds it or hears of it, so that a step that fails takes it along. A CPU computes it once the chunk's first
token is on its way.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch

from baton.engine.draft.kv_slots import DraftKv
from baton.engine.draft.paged_drafter import PagedDrafter
from baton.engine.launched_step import LaunchedStep
from baton.engine.request import EngineRequest
from baton.engine.step_builder import Record, Step
from baton.handoff.messages import DraftsAnnounced, GroupPages

if TYPE_CHECKING:
    from baton.worker.prefill.core import Attempt


@dataclass(slots=True)
class _Filled:
    """What a step has left of a prompt."""

    record: Record
    kv: DraftKv | None = None
    """None: nothing."""
    entries: int = 0


@dataclass(slots=True)
class _Launched:
    """What follows on a step."""

    filled: dict[Attempt, _Filled] = field(default_factory=dict)
    hidden: dict[Attempt, torch.Tensor] = field(default_factory=dict)
    """Hidden states that the step leaves of each, until they are computed with."""
    done: torch.cuda.Event | None = None
    """That it has been computed; None on a CPU, where it has."""


class PromptDrafts:
    """Every attempt with `lends_drafts` gets an announcement, of nothing if need be. What fails here costs
    drafts, not prompts."""

    def __init__(self, drafter: PagedDrafter) -> None:
        self.broken = ""
        """Why nothing is computed any more; empty: it is."""
        self._drafter, self._early = drafter, drafter.device.type == "cuda"
        """Whether it is enqueued, rather than computed at once."""
        self._launched: dict[int, _Launched] = {}
        """By the number of the step, which has not been read."""
        self._read: list[_Launched] = []

    def launched(
        self, step: Step, launched: LaunchedStep, attempt_of: Callable[[EngineRequest], Attempt | None]
    ) -> None:
        behind = _Launched()
        for index, record in enumerate(step.records):
            attempt = attempt_of(record.sequence.request)
            if attempt is not None and attempt.lends_drafts:
                behind.filled[attempt] = _Filled(record)
                if index in launched.hidden:
                    behind.hidden[attempt] = launched.hidden[index]
        if behind.filled:
            self._launched[step.plan.number] = behind
            if not self.broken and self._early:
                with self._guarded():
                    self._fill(behind)

    def _fill(self, behind: _Launched) -> None:
        drafter, records = self._drafter, [each.record for each in behind.filled.values()]
        for attempt, each in behind.filled.items():
            if (states := behind.hidden.pop(attempt, None)) is not None:
                drafter.observe(each.record.sequence, each.record.end - len(states), states)
        drafter.fill([(record.sequence, record.end) for record in records])
        for attempt, each in behind.filled.items():
            sequence = each.record.sequence
            each.kv, each.entries = drafter.filled(sequence) or (None, 0)
            if each.record.targets:
                # Now: it makes no room for prompts of the next step, which is launched before this is read.
                attempt.drafts = drafter.lend(sequence)
        if drafter.device.type == "cuda":
            behind.done = torch.cuda.Event()  # type: ignore[no-untyped-call]
            behind.done.record()

    def committed(self, step: Step) -> None:
        """The step has been read."""
        behind = self._launched.pop(step.plan.number, None)
        if behind is not None:
            self._read.append(behind)

    def failed(self, step: Step) -> None:
        self._launched.pop(step.plan.number, None)

    def announce(self) -> None:
        """Waits for the device, but for no step that has not been read. To be called when what has been said
        of the last step is on its way."""
        read, self._read = self._read, []
        for behind in read:
            complete = [attempt for attempt in behind.filled if attempt.complete_since is not None]
            if not self.broken:
                with self._guarded():
                    if not self._early:  # the first token waits for no pass
                        self._fill(behind)
                    self._keep(behind)
                    if complete and behind.done is not None:
                        behind.done.synchronize()
            for attempt in complete:
                self._announce(attempt, behind.filled[attempt].entries)

    def _keep(self, behind: _Launched) -> None:
        for attempt, each in behind.filled.items():
            kv, record = each.kv, each.record
            if kv is not None and (kv.slot >= 0 or attempt.drafts is kv.block_table):  # else it has made room
                self._drafter.keep(record.sequence, kv, each.entries, record.end)

    @contextmanager
    def _guarded(self) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            self.broken = f"the drafter failed, and decode nodes draft without it: {error!r}"

    def _announce(self, attempt: Attempt, entries: int) -> None:
        cache = self._drafter.slots.cache
        groups: tuple[GroupPages, ...] = ()
        if self.broken or attempt.drafts is None:
            entries = 0
        else:
            rows = -(-entries // cache.page_size)
            tables = [tuple(table[:rows]) for table in attempt.drafts.tables]
            groups = tuple(GroupPages(0, table, tuple(map(cache.generation, table))) for table in tables)
        attempt.core.leases.outputs.append((attempt.holder, DraftsAnnounced(attempt.name, groups, entries)))

    def ended(self, attempt: Attempt) -> None:
        """Gives back what was lent; the device may still write it, before what anybody else has it write."""
        for behind in (*self._launched.values(), *self._read):
            behind.filled.pop(attempt, None)
        if attempt.drafts is not None:
            self._drafter.slots.cache.release(attempt.drafts, 0)
