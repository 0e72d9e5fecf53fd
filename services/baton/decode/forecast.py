"""Which waiting requests could not end within their time any more. Pure.

A sequence holds a row from its admission to its last token: the time to its first token (measured: queues,
prompt and hand-off together), then one step a token. Rows become free one after the other, so those ahead in
the queue delay a request by the sum of their times, divided by the rows. How long an output becomes nobody
knows: as long as those that ended lately, max_tokens at most.

Nobody is refused who need not wait: what there is time for is then worth having.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from baton.engine.request import Sequence

MARGIN = 1.15
"""A wait is taken to be so much longer than reckoned: who ends too late has cost others their time."""


@dataclass(frozen=True, slots=True)
class Rates:
    """Measured. A value of 0 is not known, and counts as nothing."""

    step: float
    """Seconds of a step."""
    first: float
    """Seconds from admission to the first token."""
    output: float
    """Output tokens of a choice."""

    def seconds(self, sequence: Sequence) -> float:
        """For which it will hold its row from now on, or from its admission on."""
        return self._tokens(sequence) * self.step + (0.0 if sequence.num_output else self.first)

    def _tokens(self, sequence: Sequence) -> float:
        params, done = sequence.request.params, sequence.num_output
        left = max(1, params.max_tokens - done)
        # Without a token that ends it, an output is as long as it may be.
        return min(left, max(1.0, self.output - done)) if params.stop_token_ids else left


@dataclass(slots=True)
class Forecast:
    wait: float = 0.0
    """Seconds that a request that came now would wait for a row."""
    refused: list[tuple[Sequence, float]] = field(default_factory=list)
    """Waiting sequences that would end too late, and in how many seconds asking again makes sense."""


def forecast(
    waiting: Iterable[Sequence],
    admitted: Iterable[Sequence],
    rows: int,
    free: int,
    rates: Rates,
    now: float,
) -> Forecast:
    """`waiting`: in their order. `admitted`: those that hold rows. `rows`: how many sequences can run at a
    time. `free`: how many of the rows can be had at once."""
    soonest = min((rates.seconds(sequence) for sequence in admitted), default=0.0)
    result, ahead = Forecast(), 0.0
    for sequence in waiting:
        if free > 0:
            free -= 1
            continue
        own, wait = rates.seconds(sequence), soonest + ahead / max(1, rows)
        late = MARGIN * wait + own - (sequence.request.deadline - now)
        # Whose client has tokens already, of whichever choice, goes on until its time is over. Others wait as
        # one sequence, so that no request is refused twice.
        begun = sequence.num_output or sequence.request.delivered
        if wait > 0 and late > 0 and not begun:
            result.refused.append((sequence, late))
        else:
            ahead += own
    if free <= 0:
        result.wait = soonest + ahead / max(1, rows)
    return result
