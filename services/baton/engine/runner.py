"""The interface that executes the scheduler's plans."""

from __future__ import annotations

from typing import Protocol, TypeVar

from baton.engine.plan import StepPlan, StepResult

F = TypeVar("F")


class Runner(Protocol[F]):
    """Executes plans in the order of their launch. Used by one thread.

    `launch` enqueues and returns; `read` waits for the step and returns its tokens; `done` says whether
    `read` would return at once. A caller may launch step N+1 before it reads step N. On a CPU `launch` does
    all the work.
    """

    max_slots: int
    vocab_size: int

    def launch(self, plan: StepPlan) -> F:
        """F is the runner's record of a launched step."""
        ...

    def done(self, flight: F) -> bool: ...

    def read(self, flight: F) -> StepResult: ...
