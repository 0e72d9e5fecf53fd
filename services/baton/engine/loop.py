"""The step loop: the one thread that owns a node's core and its runner."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Any, Generic, Protocol, TypeVar

from baton.engine.batch import Step
from baton.engine.plan import StepResult
from baton.engine.runner import Runner

TICK_SECONDS = 0.5
"""An idle loop still looks at deadlines, leases and heartbeats this often."""


class Core(Protocol):
    """A node's pure core, driven by the loop. No method raises for what a peer sent."""

    def tick(self, now: float) -> None:
        """Looks at deadlines and heartbeats."""

    def plan(self, now: float) -> Step | None: ...

    def commit(self, step: Step, result: StepResult, now: float) -> None: ...

    def fail_step(self, step: Step, message: str) -> None: ...

    def flush(self, step: int) -> None:
        """Hands everything decided since the last call to the shell; must not block."""


C = TypeVar("C", bound=Core)


class StepLoop(Generic[C]):
    """Runs `core` in a thread of its own. Other threads reach it through `call` alone.

    With `overlap`, step N+1 is planned and launched before step N's tokens are read. `crashed` is called,
    in the step thread, when an error escapes the core: that is a bug, and the loop has ended.
    """

    def __init__(
        self,
        core: C,
        runner: Runner[Any],
        *,
        name: str,
        overlap: bool = False,
        clock: Callable[[], float] = time.monotonic,
        crashed: Callable[[BaseException], None],
    ) -> None:
        self._core = core
        self._runner = runner
        self._overlap = overlap
        self._clock = clock
        self._crashed = crashed
        self._inbox: deque[Callable[[C, float], None]] = deque()
        self._wake = threading.Event()
        self._stopping = False
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self.last_turn = clock()
        """When the loop last came round; an old value with work at hand means that it is stuck."""

    def start(self) -> None:
        self._thread.start()

    @property
    def alive(self) -> bool:
        return self._thread.is_alive()

    def call(self, function: Callable[[C, float], None]) -> None:
        """Runs `function(core, now)` in the step thread, between steps; in order, from any thread."""
        self._inbox.append(function)
        self._wake.set()

    def stop(self, timeout: float = 10.0) -> bool:
        """Ends the thread after the step in flight; False if it did not end in time."""
        self._stopping = True
        self._wake.set()
        if self._thread.ident is not None:
            self._thread.join(timeout)
        return not self._thread.is_alive()

    def _run(self) -> None:
        try:
            self._turn_until_stopped()
        except BaseException as error:
            self._crashed(error)

    def _turn_until_stopped(self) -> None:
        core = self._core
        pending: tuple[Step, Any] | None = None
        while not self._stopping:
            self._wake.clear()
            now = self.last_turn = self._clock()
            while self._inbox:
                self._inbox.popleft()(core, now)
            core.tick(now)
            step = core.plan(now)
            core.flush(0)
            launched = self._launch(step) if step is not None else None
            read = pending is not None
            if pending is not None:
                self._finish(*pending)
            pending = None
            if launched is not None:
                if self._overlap:
                    pending = launched
                else:
                    self._finish(*launched)
            # What has just been read may have freed what the next step lacked.
            if step is None and not read and not self._inbox:
                self._wake.wait(TICK_SECONDS)

    def _launch(self, step: Step) -> tuple[Step, Any] | None:
        try:
            return step, self._runner.launch(step.plan)
        except Exception as error:
            self._core.fail_step(step, f"the step could not be computed: {error}")
            return None

    def _finish(self, step: Step, flight: Any) -> None:
        try:
            result = self._runner.read(flight)
        except Exception as error:
            self._core.fail_step(step, f"the step's results could not be read: {error}")
        else:
            self._core.commit(step, result, self._clock())
        self._core.flush(step.plan.number)
