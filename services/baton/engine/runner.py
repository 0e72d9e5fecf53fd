"""The interface between the scheduler's plans and whatever executes them."""

from __future__ import annotations

from typing import Protocol

from baton.engine.plan import StepPlan, StepResult


class InFlight(Protocol):
    """A launched step."""

    number: int


class Runner(Protocol):
    """Executes plans in the order of their launch. Used by one thread.

    `launch` enqueues and returns; `read` waits for the step and yields its tokens. A caller may launch
    step N+1 before it reads step N; on a CPU `launch` does all the work.
    """

    max_slots: int
    vocab_size: int

    def launch(self, plan: StepPlan) -> InFlight: ...

    def read(self, flight: InFlight) -> StepResult: ...
