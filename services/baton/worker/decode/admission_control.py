"""Predicts which waiting requests would miss their deadlines. Pure.

A sequence holds a row from its admission to its last token: the time to its first token (measured: queues,
prompt and hand-off together), then one step for each token. Rows become free one after the other, so the
sequences ahead in the queue delay a request by the sum of their times divided by the number of rows. An
output is assumed to be as long as recent ones, at most max_tokens.

A request that need not wait is never refused: partial output is better than none.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from baton.engine.request import Sequence
from baton.engine.scheduler import Scheduler
from baton.engine.step_builder import Step
from baton.engine.step_stats import MovingAverage, StepStats

MARGIN = 1.15
"""Factor on the predicted wait: a request that misses its deadline wastes time of others."""
FORECAST_SECONDS = 0.2
"""The prediction runs this often, and whenever a request has arrived."""
REQUEST_WEIGHT = 0.1


@dataclass(frozen=True, slots=True)
class Rates:
    """Measured values. 0: not known, counts as no time."""

    step: float
    """Seconds of a step."""
    first: float
    """Seconds from admission to the first token."""
    output: float
    """Output tokens of a choice."""

    def seconds(self, sequence: Sequence) -> float:
        """Predicted seconds for which the sequence holds its row, from now or from its admission."""
        return self._tokens(sequence) * self.step + (0.0 if sequence.num_output else self.first)

    def _tokens(self, sequence: Sequence) -> float:
        params, done = sequence.request.params, sequence.num_output
        left = max(1, params.max_tokens - done)
        # Without stop tokens an output has max_tokens.
        return min(left, max(1.0, self.output - done)) if params.stop_token_ids else left


@dataclass(slots=True)
class Forecast:
    wait: float = 0.0
    """Predicted seconds that a new request would wait for a row."""
    refused: list[tuple[Sequence, float]] = field(default_factory=list)
    """Waiting sequences that would miss their deadline, and after how many seconds a retry makes sense."""


def forecast(
    waiting: Iterable[Sequence],
    admitted: Iterable[Sequence],
    rows: int,
    free: int,
    rates: Rates,
    now: float,
) -> Forecast:
    """`waiting`: in queue order. `admitted`: sequences that hold rows. `rows`: how many sequences can run at
    a time. `free`: rows free now."""
    soonest = min((rates.seconds(sequence) for sequence in admitted), default=0.0)
    result, ahead = Forecast(), 0.0
    for sequence in waiting:
        if free > 0:
            free -= 1
            continue
        compute, wait = rates.seconds(sequence), soonest + ahead / max(1, rows)
        late = MARGIN * wait + compute - (sequence.request.deadline - now)
        # A request whose client has tokens of any choice continues until its deadline. Others wait as one
        # sequence, so that no request is refused twice.
        begun = sequence.num_output or sequence.request.delivered
        if wait > 0 and late > 0 and not begun:
            result.refused.append((sequence, late))
        else:
            ahead += compute
    if free <= 0:
        result.wait = soonest + ahead / max(1, rows)
    return result


class AdmissionControl:
    def __init__(self, scheduler: Scheduler) -> None:
        self.step_stats = StepStats(scheduler.config.token_budget)
        self.first_token = MovingAverage(REQUEST_WEIGHT)
        """Seconds from a request's admission to its first token."""
        self.output = MovingAverage(REQUEST_WEIGHT)
        """Output tokens of a choice that has finished."""
        self.wait = 0.0
        """Predicted seconds that a new request would wait for a row."""
        self._scheduler = scheduler
        self._next = 0.0
        self.blocked = False
        """Whether requests waited for rows or pages at the last plan."""

    def arrived(self) -> None:
        self._next = 0.0

    def planned(self, step: Step | None, now: float) -> None:
        self.blocked = bool(self._waiting())
        if step is not None:
            self.step_stats.planned(step, now)

    def _waiting(self) -> list[Sequence]:
        """Sequences that wait for rows or pages: not for another suspect, nor for their grammar."""
        waiting = ((sequence, sequence.request) for sequence in self._scheduler.waiting)
        return [each for each, r in waiting if not (r.failed_steps or r.suspect or r.blocked)]

    def late(self, now: float) -> list[tuple[Sequence, float]]:
        """Waiting sequences that would end after their deadline, and by how much. Called in each iteration of
        the step loop."""
        if now < self._next:
            return []
        self._next = now + FORECAST_SECONDS
        scheduler = self._scheduler
        admitted = [*scheduler.running, *scheduler.prompts, *scheduler.handoffs]
        # If pages are short, no more sequences can run than do now.
        free = 0 if self.blocked else scheduler.slots.free
        rows = scheduler.slots.in_use if self.blocked else scheduler.slots.count
        rates = Rates(self.step_stats.step.value, self.first_token.value, self.output.value)
        found = forecast(self._waiting(), admitted, rows, free, rates, now)
        self.wait = found.wait
        return found.refused
