"""A prompt that a prefill node computes for a holder, and its cancellation while a step with it runs."""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass, field

from baton.engine.batch import Step
from baton.engine.plan import Logprobs
from baton.engine.request import EngineRequest
from baton.engine.scheduler import Scheduler
from baton.handoff.lease import Lease


@dataclass(slots=True, eq=False, kw_only=True)
class Attempt(Lease):
    """State of one requested prompt, and the lease of its pages."""

    request: EngineRequest
    scheduler: Scheduler
    keep_pages: bool
    ahead: bool
    """Pages are announced before their step has retired."""
    first: list[tuple[int, Logprobs | None]] = field(default_factory=list)

    @property
    def importance(self) -> tuple[int, int]:
        return self.request.priority, -self.request.order

    @property
    def tables(self) -> Sequence[Sequence[int]] | None:
        holding = self.request.sequences[0].holding
        return holding.tables if holding is not None and self.keep_pages else None

    def free(self) -> None:
        self.scheduler.close(self.request)


@dataclass(slots=True)
class PrefillCounters:
    prompt_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0


class CancelledInFlight(list[Attempt]):
    """Attempts that were cancelled while a step with them was in flight: the answer waits for the step. If it
    fails, the holder must know that the prompt was in it, or would try one that ends nodes at one more."""

    def __init__(self) -> None:
        super().__init__()
        self._steps: list[Step] = []

    def launched(self, step: Step) -> None:
        self._steps.append(step)

    def ended(self, step: Step, failed: bool = False) -> Iterator[Attempt]:
        """Attempts that can be answered now: if `step` has failed, those that were in it, else those that
        no step in flight has any more."""
        self._steps.remove(step)
        for each in list(self):
            if _contains(step, each.request) if failed else not self._in_flight(each):
                self.remove(each)
                yield each

    def hold(self, attempt: Attempt) -> bool:
        """Whether a step with it is in flight; then it is kept until that has ended."""
        if self._in_flight(attempt):
            self.append(attempt)
            return True
        return False

    def forget(self, holder: Hashable) -> None:
        self[:] = [each for each in self if each.holder != holder]

    def _in_flight(self, attempt: Attempt) -> bool:
        return any(_contains(step, attempt.request) for step in self._steps)


def _contains(step: Step, request: EngineRequest) -> bool:
    return any(record.sequence.request is request for record in step.records)
