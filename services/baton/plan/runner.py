"""A device that exists in virtual time only."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from baton.engine.plan import PlanRow, RowResult, StepPlan, StepResult, step_load
from baton.stepcost import StepCost


@dataclass(slots=True)
class VirtualFlight:
    plan: StepPlan
    ends: float


class VirtualRunner:
    """Implements `engine.plan.Runner`: executes one step after the other, each in the time that it costs.
    `read` does not wait: whoever drives it reads a step when it has ended. All tokens are 0."""

    vocab_size = 1

    def __init__(self, cost: StepCost, max_slots: int, clock: Callable[[], float]) -> None:
        self.max_slots = max_slots
        self.busy = 0.0
        """Seconds of all steps so far, until `stop_counting`."""
        self._counting = True
        self._cost = cost
        self._clock = clock
        self._free = 0.0
        self._one_token = RowResult((0,))
        """Of most rows; nobody changes it."""

    def launch(self, plan: StepPlan) -> VirtualFlight:
        seconds = self._cost.seconds(step_load(plan.rows)) if plan.rows else 0.0
        if self._counting:
            self.busy += seconds
        self._free = max(self._clock(), self._free) + seconds
        return VirtualFlight(plan, self._free)

    def stop_counting(self) -> None:
        """Steps launched from now on do not count as busy, nor does what is left of those in flight."""
        self._counting = False
        self.busy -= max(0.0, self._free - self._clock())

    def done(self, flight: VirtualFlight) -> bool:
        return self._clock() >= flight.ends

    def read(self, flight: VirtualFlight) -> StepResult:
        return StepResult(flight.plan.number, tuple(self._result(row) for row in flight.plan.rows))

    def _result(self, row: PlanRow) -> RowResult:
        return self._one_token if len(row.sample) == 1 else RowResult((0,) * len(row.sample))
