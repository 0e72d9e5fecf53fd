"""Measured step times of a decode node, and refusal of requests that would miss their deadlines."""

from __future__ import annotations

from baton.decode.forecast import Rates, forecast
from baton.engine.batch import Step
from baton.engine.meter import Average, Meter
from baton.engine.request import Sequence
from baton.engine.scheduler import Scheduler

FORECAST_SECONDS = 0.2
"""The prediction runs this often, and whenever a request has arrived."""
REQUEST_WEIGHT = 0.1


class Overload:
    def __init__(self, scheduler: Scheduler) -> None:
        self.meter = Meter(scheduler.config.token_budget)
        self.first_token = Average(REQUEST_WEIGHT)
        """Seconds from a request's admission to its first token."""
        self.output = Average(REQUEST_WEIGHT)
        """Output tokens of a choice that has finished."""
        self.wait = 0.0
        """Predicted seconds that a new request would wait for a row."""
        self._scheduler = scheduler
        self._next = 0.0
        self._blocked = False

    def arrived(self) -> None:
        self._next = 0.0

    def planned(self, step: Step | None, now: float) -> None:
        self._blocked = bool(self._waiting())
        if step is not None:
            self.meter.planned(step, now)

    def _waiting(self) -> list[Sequence]:
        """Sequences that wait for rows or pages, not for another suspect of a failed step."""
        return [sequence for sequence in self._scheduler.waiting if not sequence.request.failed_steps]

    def late(self, now: float) -> list[tuple[Sequence, float]]:
        """Waiting sequences that would end after their deadline, and by how much. Called in each iteration of
        the step loop."""
        if now < self._next:
            return []
        self._next = now + FORECAST_SECONDS
        scheduler = self._scheduler
        admitted = [*scheduler.running, *scheduler.prompts, *scheduler.handoffs]
        # If pages are short, no more sequences can run than do now.
        free = 0 if self._blocked else scheduler.slots.free
        rows = scheduler.slots.in_use if self._blocked else scheduler.slots.count
        rates = Rates(self.meter.step.value, self.first_token.value, self.output.value)
        found = forecast(self._waiting(), admitted, rows, free, rates, now)
        self.wait = found.wait
        return found.refused
