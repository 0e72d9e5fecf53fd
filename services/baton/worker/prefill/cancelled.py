"""Prompts that their holders have cancelled while a step computes them."""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from typing import TYPE_CHECKING

from baton.engine.request import EngineRequest
from baton.engine.step_builder import Step

if TYPE_CHECKING:
    from baton.worker.prefill.core import Attempt


class CancelledInFlight(list["Attempt"]):
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
