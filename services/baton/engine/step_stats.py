"""Times of a node's steps, measured while it works: averages, the calibrated cost, a watchdog. Pure."""

from __future__ import annotations

from baton.engine.plan import step_load
from baton.engine.step_builder import Step
from baton.step_cost import CostCalibration

STEP_WEIGHT = 0.05
"""Weight of a new step in moving averages."""
STALL = 4.0
"""A value above this many times the average is an accident, such as a machine that slept, and is cut to
that."""
LOOK_SECONDS = 0.02
"""Steps without prompt tokens are used for calibration at most this often: they are many and similar."""
WATCHDOG_FACTOR = 4.0
"""A step is stuck after this many times its expected time: other programs use the machine, contexts grow."""
FIRST_STEP_SECONDS = 60.0
"""Limit of the first step: nothing is known of it, and kernels may be compiled in it."""


class MovingAverage:
    """An exponential moving average of values >= 0; 0 until there is one. They are cut to STALL times it."""

    def __init__(self, weight: float) -> None:
        self.value = 0.0
        self._weight = weight

    def add(self, value: float) -> None:
        if not self.value:
            self.value = value
        else:
            self.value += self._weight * (min(value, STALL * self.value) - self.value)


class StepWatchdog:
    """Says after how many seconds a step counts as stuck, from the times of earlier steps.

    It averages these by size, in powers of two. A step takes no longer than one of more tokens, nor than the
    smaller ones that together have its tokens.
    """

    def __init__(self) -> None:
        self._seconds: dict[int, float] = {}
        """Least tokens of a size -> moving average."""

    def add(self, tokens: int, seconds: float) -> None:
        """A step of `tokens` >= 1 tokens has ended."""
        size = 1 << (tokens.bit_length() - 1)
        known = self._seconds.get(size, seconds)
        self._seconds[size] = known + STEP_WEIGHT * (seconds - known)

    def limit(self, tokens: int, floor: float) -> float:
        """Seconds, at least `floor`, after which a step of `tokens` tokens is stuck. May be called in
        another thread than `add`."""
        if tokens <= 0:
            return floor
        bounds = [seconds * max(1.0, tokens / size) for size, seconds in list(self._seconds.items())]
        return max(floor, WATCHDOG_FACTOR * min(bounds) if bounds else FIRST_STEP_SECONDS)


class StepStats:
    """A node's statistics of its steps. Used in the step thread, except `limit`."""

    def __init__(self, token_budget: int) -> None:
        self.step = MovingAverage(STEP_WEIGHT)
        """Seconds of a step that has decode rows."""
        self.prompt_rate = MovingAverage(STEP_WEIGHT)
        """Prompt tokens per second in steps that are at least half full of them; in others the step's
        fixed cost dominates."""
        self.stalled = 0.0
        """Total seconds by which steps took longer than STALL times the usual."""
        self.calibration: CostCalibration | None = None
        """The calibrated step cost; None until it has been measured."""
        self._enough = token_budget / 2
        self._planned: dict[int, tuple[float, int]] = {}
        """Step -> time of its plan, and its tokens."""
        self._watchdog = StepWatchdog()
        self._last = 0.0
        self._look = 0.0

    def planned(self, step: Step, now: float) -> None:
        self._planned[step.plan.number] = now, step.plan.num_tokens

    def ended(self, step: Step, now: float) -> float:
        """The step's results have been read. Returns its seconds. Steps may overlap: its time begins when the
        one before it ended."""
        planned, tokens = self._planned.pop(step.plan.number, (now, 0))
        seconds = now - max(self._last, planned)
        self._last = now
        if seconds <= 0:
            return 0.0
        if tokens:
            self._watchdog.add(tokens, seconds)
        prompt = sum(row.count for row in step.plan.rows if row.tokens is not None)
        usual = 0.0 if prompt else self.step.value
        if self.calibration is not None and (prompt or now >= self._look):
            self._look = now + LOOK_SECONDS
            load = step_load(step.plan.rows)
            usual = usual or self.calibration.cost.seconds(load)
            self.calibration.add(load, seconds)
        if usual:
            self.stalled += max(0.0, seconds - STALL * usual)
        if any(row.tokens is None for row in step.plan.rows):
            self.step.add(seconds if self.step.value or not usual else min(seconds, STALL * usual))
        if prompt >= self._enough:
            self.prompt_rate.add(prompt / seconds)
        return seconds

    def limit(self, floor: float) -> float:
        """Seconds, at least `floor`, after which the steps in flight count as stuck. May be called from
        another thread."""
        return self._watchdog.limit(sum(tokens for _, tokens in list(self._planned.values())), floor)

    def failed(self, step: Step) -> None:
        self._planned.pop(step.plan.number, None)
