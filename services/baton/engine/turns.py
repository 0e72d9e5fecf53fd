"""What a step loop does, without the thread: one turn after the other, around a core and its runner."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any, Generic, Protocol, TypeVar

from baton.engine.batch import Step
from baton.engine.plan import StepResult
from baton.engine.runner import Runner


class Core(Protocol):
    """A node's pure core, driven by the loop. No method raises for what a peer sent."""

    @property
    def expecting(self) -> bool:
        """Whether a step may be wanted within milliseconds, though there is none yet, and the device is to be
        kept warm for it."""

    @property
    def pressing(self) -> bool:
        """Whether anything that `flush` would hand over should not wait for a launch."""

    def tick(self, now: float) -> None:
        """Looks at deadlines and heartbeats."""

    def admit(self, now: float) -> None:
        """Admits what need not wait for the next step's plan; a step is under way."""

    def plan(self, now: float) -> Step | None: ...

    def commit(self, step: Step, result: StepResult, now: float) -> None: ...

    def fail_step(self, step: Step, message: str) -> None: ...

    def flush(self, step: int) -> None:
        """Hands everything decided since the last call to the shell; must not block."""


C = TypeVar("C", bound=Core)

CALLS_SECONDS = 0.5
"""Calls are made for so long while a step is awaited. A device that takes longer may hang: peers that ask its
node for a sign of life get none then."""

MAX_FAILED_STEPS = 3
"""Steps that fail one after the other: the device, rather than a request, is taken to be at fault."""

Launched = tuple[Step, Any]
"""A step and the runner's record of it."""


class Turns(Generic[C]):
    """A turn is `begin`, then, where that returns something, `finish` of it.

    With `overlap`, step N+1 is planned and launched before step N's tokens are read: whoever waits for a step
    need not read it at once, and may call `between` meanwhile.
    """

    def __init__(self, core: C, runner: Runner[Any], overlap: bool, clock: Callable[[], float]) -> None:
        self.core = core
        self.inbox: deque[Callable[[C, float], None]] = deque()
        """Calls into the core, made at the beginning of the next turn or by `between`, in order."""
        self.idle = False
        """The last turn found nothing to do: without a new call, the next may wait."""
        self.overlap = overlap
        self._runner = runner
        self._clock = clock
        self._pending: Launched | None = None
        self.broken = ""
        """Why further steps would fail too; empty: they may succeed."""
        self._failed_steps = 0
        """Steps that failed since one succeeded."""
        self._unlaunched: tuple[Step, str] | None = None
        """A step whose launch failed while the one before it is in flight: it fails after that has retired,
        for what it would have used may be in use by the other."""

    def begin(self) -> Launched | None:
        """Calls, deadlines, the next step's launch. Returns the step to be read before the next turn."""
        core, now = self.core, self._take_calls()
        core.tick(now)
        step = core.plan(now)
        # Without overlap the launch may be the whole step.
        first = step is None or core.pressing or not self.overlap
        if first:
            core.flush(0)
        launched = self._launch(step) if step is not None else None
        if not first:
            core.flush(0)
        due = launched
        if self.overlap:
            due, self._pending = self._pending, launched
        if due is None:
            self._fail_unlaunched()
        # What is about to be read may free what the next step lacked.
        self.idle = step is None and due is None
        return due

    @property
    def ahead(self) -> bool:
        """Whether a step is launched behind the one that is to be read next: the device has work."""
        return self._pending is not None

    def ended(self, launched: Launched) -> bool:
        """Whether `finish` would not wait."""
        try:
            return self._runner.done(launched[1])
        except Exception:
            return True  # reading it will say what is wrong

    def between(self) -> None:
        """Makes the calls, and tells at once what follows from them: a prompt that another node is to
        compute, or its first token, would else wait here for up to a step."""
        now = self._take_calls()
        self.core.admit(now)
        self.core.flush(0)

    def finish(self, launched: Launched) -> None:
        """Reads a step's results, which waits for the device, and commits them."""
        step, flight = launched
        try:
            result = self._runner.read(flight)
        except Exception as error:
            self._count_failure(error)
            self.core.fail_step(step, f"the step's results could not be read: {error}")
        else:
            self._failed_steps = 0
            self.core.commit(step, result, self._clock())
        self._fail_unlaunched()
        self.core.flush(step.plan.number)

    def _take_calls(self) -> float:
        now = self._clock()
        while self.inbox:
            self.inbox.popleft()(self.core, now)
        return now

    def _launch(self, step: Step) -> Launched | None:
        try:
            return step, self._runner.launch(step.plan)
        except Exception as error:
            self._count_failure(error)
            self._unlaunched = (step, f"the step could not be computed: {error}")
            return None

    def _count_failure(self, error: Exception) -> None:
        self._failed_steps += 1
        text = str(error)
        # After such an error every call into CUDA fails until the process ends; not so for want of memory.
        lost = "CUDA error" in text and "out of memory" not in text
        if lost or self._failed_steps >= MAX_FAILED_STEPS:
            what = "the device is lost" if lost else f"{self._failed_steps} steps failed one after the other"
            self.broken = f"{what}: {text}"

    def _fail_unlaunched(self) -> None:
        if self._unlaunched is not None:
            unlaunched, self._unlaunched = self._unlaunched, None
            self.core.fail_step(*unlaunched)
