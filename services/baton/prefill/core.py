"""Drives the prefill side of the hand-off from the step loop."""

from __future__ import annotations

import sys
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field

from baton.engine.batch import Step
from baton.engine.meter import Meter
from baton.engine.plan import StepResult
from baton.engine.scheduler import Scheduler
from baton.handoff.messages import Alive, PrefillOutput
from baton.handoff.prefill_side import PrefillSide

FULL_STEP = 1024
"""Tokens: a GPU computes so many as fast, each, as it does more of them (measured on an H200, 8B)."""


def full_step(device: str) -> int:
    """SchedulerConfig.full_step of a prefill node on a device of this type."""
    return sys.maxsize if device == "cpu" else FULL_STEP


Flush = Callable[[int, list[tuple[Hashable, PrefillOutput | Alive]]], None]


@dataclass(slots=True, eq=False)
class PrefillCore:
    """A core for engine.loop.StepLoop. `flush_to` passes outputs to the shell; `observe` is called after it.
    `retire` publishes the number of a retired step to receivers before anything else."""

    side: PrefillSide
    flush_to: Flush
    observe: Callable[[], None]
    retire: Callable[[int], None]
    meter: Meter = field(init=False)
    _presses: bool = False
    _closing: dict[Hashable, Callable[[], None]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.meter = Meter(self.scheduler.config.token_budget)

    @property
    def scheduler(self) -> Scheduler:
        return self.side.scheduler

    @property
    def requests(self) -> int:
        return self.side.requests

    @property
    def expecting(self) -> bool:
        """A prefill node cannot know that a prompt will arrive."""
        return False

    @property
    def pressing(self) -> bool:
        """All but the announcement of pages, which has as long as their step takes."""
        return self._presses

    def close_when_idle(self, holder: Hashable, close: Callable[[], None]) -> None:
        """Calls `close` once nothing of the holder's is left."""
        self._closing[holder] = close

    def tick(self, now: float) -> None:
        self.side.tick(now)

    def admit(self, now: float) -> None:
        """Nothing: of a prompt that waits until a step has room, more may be cached by then."""

    def plan(self, now: float) -> Step | None:
        self._presses = bool(self.side.outputs)
        step = self.side.plan(now)
        if step is not None:
            self.meter.planned(step, now)
        return step

    def commit(self, step: Step, result: StepResult, now: float) -> None:
        self.retire(step.plan.number)
        self.meter.ended(step, now)
        self.side.commit(step, result, now)

    def fail_step(self, step: Step, message: str) -> None:
        # What waits for it would wait for ever. The pages are of no use to anybody: their prompts fail.
        self.retire(step.plan.number)
        self.meter.failed(step)
        self.side.fail_step(step, message)

    def node_failed(self, message: str) -> None:
        self.side.outputs.clear()
        self.side.node_failed(message)
        self.flush_to(0, self.side.outputs)

    def flush(self, step: int) -> None:
        if self.side.outputs:
            outputs, self.side.outputs = self.side.outputs, []
            self.flush_to(step, outputs)
        for holder in [h for h in self._closing if not self.side.holds(h)]:
            self._closing.pop(holder)()
        self.observe()
