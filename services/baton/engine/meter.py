"""How fast an engine is, measured while it works: moving averages. Pure."""

from __future__ import annotations

from baton.engine.batch import Step
from baton.engine.cost import StepLoad
from baton.engine.pace import Pace

STEP_WEIGHT = 0.05
LOOK_SECONDS = 0.02
"""Steps without prompt tokens teach the pace at most this often: they are many, and alike."""


class Average:
    """An exponential moving average; 0 until there is a value."""

    def __init__(self, weight: float) -> None:
        self.value = 0.0
        self._weight = weight

    def add(self, value: float) -> None:
        self.value = value if not self.value else self.value + self._weight * (value - self.value)


class Meter:
    def __init__(self, token_budget: int) -> None:
        self.step = Average(STEP_WEIGHT)
        """Seconds of a step that has decode rows."""
        self.prompt_rate = Average(STEP_WEIGHT)
        """Prompt tokens a second in steps that are at least half full of them; others tell of the step's own
        cost."""
        self.pace: Pace | None = None
        """What steps cost; None until that has been measured."""
        self._enough = token_budget / 2
        self._planned: dict[int, float] = {}
        self._last = 0.0
        self._look = 0.0

    def planned(self, step: Step, now: float) -> None:
        self._planned[step.plan.number] = now

    def ended(self, step: Step, now: float) -> None:
        """Its results have been read. Steps may overlap: its time begins where the one before it ended."""
        seconds = now - max(self._last, self._planned.pop(step.plan.number, now))
        self._last = now
        if seconds <= 0:
            return
        prompt = sum(row.count for row in step.plan.rows if row.tokens is not None)
        if any(row.tokens is None for row in step.plan.rows):
            self.step.add(seconds)
        if prompt >= self._enough:
            self.prompt_rate.add(prompt / seconds)
        if self.pace is not None and (prompt or now >= self._look):
            self._look = now + LOOK_SECONDS
            self.pace.add(StepLoad.of(step.plan.rows), seconds)

    def failed(self, step: Step) -> None:
        self._planned.pop(step.plan.number, None)
