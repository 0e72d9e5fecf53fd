"""Drives the prefill side of the hand-off from the step loop."""

from __future__ import annotations

import sys
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field, replace

from baton.config import PrefillConfig
from baton.engine.batch import Step
from baton.engine.plan import StepResult
from baton.engine.scheduler import Scheduler, SchedulerConfig
from baton.engine.step_stats import StepStats
from baton.handoff.lease import PrefillSide
from baton.handoff.messages import Alive, PrefillOutput
from baton.kvcache import KvCacheManager
from baton.kvcache.page_map import PageUse, mark
from baton.tracing.recorder import Recorder

FULL_STEP = 1024
"""Tokens from which on a GPU's time per token no longer falls (measured on an H200, 8B)."""


PrefillFlush = Callable[[dict[Hashable, list[PrefillOutput]]], None]
"""Outputs by holder; an empty list answers a heartbeat."""


@dataclass(slots=True, eq=False)
class PrefillCore:
    """Driven by a step loop. `flush_to` passes outputs to the shell; `observe` is called after it.
    `retire` publishes the number of a retired step to receivers before anything else."""

    cache: KvCacheManager
    config: SchedulerConfig
    lease_grace: float
    max_leased_pages: int
    flush_to: PrefillFlush
    retire: Callable[[int], None]
    observe: Callable[[], None] = lambda: None
    recorder: Recorder = field(default_factory=lambda: Recorder(0))
    scheduler: Scheduler = field(init=False)
    side: PrefillSide = field(init=False)
    step_stats: StepStats = field(init=False)
    _presses: bool = False
    _closing: dict[Hashable, Callable[[], None]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        config = replace(self.config, prompt_only=True)
        self.scheduler = Scheduler(
            self.cache,
            config,
            may_admit=lambda request: self.side.may_admit(request),
            record=lambda request, kind, number, step: self.side.record(request, kind, number, step),
        )
        self.side = PrefillSide(
            self.scheduler,
            lease_grace=self.lease_grace,
            max_leased_pages=self.max_leased_pages,
            recorder=self.recorder,
        )
        self.step_stats = StepStats(config.token_budget)

    @property
    def requests(self) -> int:
        return self.side.requests

    def page_uses(self) -> bytearray:
        """A PageUse for each page of the pool."""
        uses = self.cache.states()
        mark(uses, self.side.leased_pages(), PageUse.LEASED)
        return uses

    @property
    def expecting(self) -> bool:
        """A prefill node cannot know that a prompt will arrive."""
        return False

    @property
    def pressing(self) -> bool:
        """Whether something must be sent before the next launch. Announcements of pages can wait: they
        have as long as their step takes."""
        return self._presses

    def close_when_idle(self, holder: Hashable, close: Callable[[], None]) -> None:
        """Calls `close` once the holder has no attempt left."""
        self._closing[holder] = close

    def tick(self, now: float) -> None:
        self.side.tick(now)

    def admit(self, now: float) -> None:
        """Does nothing: while a prompt waits for room in a step, more of it may be cached."""

    def plan(self, now: float) -> Step | None:
        self._presses = bool(self.side.outputs)
        step = self.side.plan(now)
        if step is not None:
            self.step_stats.planned(step, now)
        return step

    def commit(self, step: Step, result: StepResult, now: float) -> None:
        self.retire(step.plan.number)
        self.step_stats.ended(step, now)
        self.side.commit(step, result, now)

    def fail_step(self, step: Step, message: str) -> None:
        # The step is never retired: its prompts fail, which stops the pulls that wait for it.
        self.step_stats.failed(step)
        self.side.fail_step(step, message)

    def node_failed(self, message: str) -> None:
        self.side.outputs.clear()
        self.side.node_failed(message)
        self._flush_outputs()

    def flush(self, step: int) -> None:
        self._flush_outputs()
        for holder in [h for h in self._closing if not self.side.holds(h)]:
            self._closing.pop(holder)()
        self.observe()

    def _flush_outputs(self) -> None:
        if not self.side.outputs:
            return
        outputs, self.side.outputs = self.side.outputs, []
        by_holder: dict[Hashable, list[PrefillOutput]] = {}
        for holder, output in outputs:
            messages = by_holder.setdefault(holder, [])
            if not isinstance(output, Alive):
                messages.append(output)
        self.flush_to(by_holder)


def make_core(
    config: PrefillConfig,
    limits: SchedulerConfig,
    device: str,
    cache: KvCacheManager,
    flush_to: PrefillFlush,
    retire: Callable[[int], None],
    observe: Callable[[], None] = lambda: None,
    recorder: Recorder | None = None,
) -> PrefillCore:
    """Makes the core of a node with this configuration. `limits`: limits of the engine; the other limits
    are set here. `device`: its type."""
    scheduling = replace(
        limits,
        max_waiting=config.max_waiting,
        policy=config.policy,
        full_step=sys.maxsize if device == "cpu" else FULL_STEP,
    )
    leased = int(cache.counts().total * config.max_leased_fraction)
    grace, recorder = config.lease_grace_seconds, recorder or Recorder(0)
    return PrefillCore(cache, scheduling, grace, leased, flush_to, retire, observe, recorder)
