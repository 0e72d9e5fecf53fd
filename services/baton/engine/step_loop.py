"""The step loop: the thread that owns a node's core and its runner, and the pipeline of steps it drives."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Any, Generic, Protocol, TypeVar

from baton.engine.plan import Runner, StepResult
from baton.engine.step_builder import Step

TICK_SECONDS = 0.5
"""An idle loop checks deadlines, leases and heartbeats this often."""
POLL_SECONDS = 2e-4
"""While a step runs, the loop polls this often whether it has ended."""
REST_SECONDS = 5e-4
"""Rest after a step that the loop has waited for, if another step is queued on the device. Planning and
launching the next one keep the interpreter for milliseconds; the step's messages leave before."""
REST_SHARE = 0.25
"""Upper limit of the rest, as a fraction of the time waited: short steps leave no time."""
EXPECT_SECONDS = 0.05
"""An idle loop that expects a step checks them this often."""
WARM_SECONDS = 2e-3
"""While pages are expected, the loop runs a warm-up this often. After a pause of 10 ms or more a launch
takes the host two to five times as long, because its caches are cold."""


class Core(Protocol):
    """A node's pure core, driven by the loop. No method raises for what a peer sent."""

    @property
    def expecting(self) -> bool:
        """Whether a step is expected within milliseconds, so that the device should be kept warm."""

    @property
    def pressing(self) -> bool:
        """Whether `flush` has something that should not wait for a launch."""

    def tick(self, now: float) -> None:
        """Checks deadlines and heartbeats."""

    def admit(self, now: float) -> None:
        """Admits what need not wait for the next plan, while a step runs."""

    def plan(self, now: float) -> Step | None: ...

    def launched(self, step: Step, launched: Any) -> None:
        """The step is under way: `launched` is the runner's record of it."""

    def commit(self, step: Step, result: StepResult, now: float) -> None: ...

    def fail_step(self, step: Step, message: str) -> None: ...

    def flush(self, step: int) -> None:
        """Passes all outputs since the last call to the shell; must not block."""


C = TypeVar("C", bound=Core)

CALLS_SECONDS = 0.5
"""Calls are made for at most this long while a step is awaited. If the device takes longer it may hang:
heartbeats are then left unanswered."""

MAX_FAILED_STEPS = 3
"""After this many failed steps in a row the device, not a request, counts as the cause."""

Launched = tuple[Step, Any]
"""A step and the runner's record of it."""


class StepPipeline(Generic[C]):
    """What the step loop does, without its thread: `begin`, then, if that returns something, `finish` of it.

    With `overlap`, step N+1 is planned and launched before step N's tokens are read. Before it reads a step,
    the caller may call `between`.
    """

    def __init__(self, core: C, runner: Runner[Any], overlap: bool, clock: Callable[[], float]) -> None:
        self.core = core
        self.inbox: deque[Callable[[C, float], None]] = deque()
        """Calls into the core, made at the next `begin` or by `between`, in order."""
        self.idle = False
        """The last `begin` found nothing to do: without a new call, the next may wait."""
        self.overlap = overlap
        self._runner = runner
        self._clock = clock
        self._pending: Launched | None = None
        self.broken = ""
        """Why further steps would fail too; empty: they may succeed."""
        self._failed_steps = 0
        """Steps that failed since one succeeded."""
        self._unlaunched: tuple[Step, str] | None = None
        """A step whose launch failed while the step before it is in flight. It fails after that step has
        retired, because they may use the same pages."""

    def begin(self) -> Launched | None:
        """Calls, deadlines, the next step's launch. Returns the step to be read before the next `begin`."""
        core, now = self.core, self._take_calls()
        core.tick(now)
        step = core.plan(now)
        # Without overlap the launch may run the whole step.
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
        # The step about to be read may free what the next step lacked.
        self.idle = step is None and due is None
        return due

    @property
    def ahead(self) -> bool:
        """Whether another step is launched behind the one to be read next."""
        return self._pending is not None

    def ended(self, launched: Launched) -> bool:
        """Whether `finish` would return without waiting."""
        try:
            return self._runner.done(launched[1])
        except Exception:
            return True  # reading it will raise the error

    def between(self) -> None:
        """Makes the calls and flushes at once: a prompt for another node, or its first token, would
        otherwise wait for up to a step."""
        now = self._take_calls()
        self.core.admit(now)
        self.core.flush(0)

    def finish(self, launched: Launched) -> None:
        """Reads a step's results, which waits for the device, and commits them."""
        step, launched_step = launched
        try:
            result = self._runner.read(launched_step)
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
            launched = self._runner.launch(step.plan)
        except Exception as error:
            self._count_failure(error)
            self._unlaunched = (step, f"the step could not be computed: {error}")
            return None
        self.core.launched(step, launched)
        return step, launched

    def _count_failure(self, error: Exception) -> None:
        self._failed_steps += 1
        text = str(error)
        # After such an error every CUDA call fails until the process ends, except after out of memory.
        lost = "CUDA error" in text and "out of memory" not in text
        if lost or self._failed_steps >= MAX_FAILED_STEPS:
            what = "the device is lost" if lost else f"{self._failed_steps} steps failed one after the other"
            self.broken = f"{what}: {text}"

    def _fail_unlaunched(self) -> None:
        if self._unlaunched is not None:
            unlaunched, self._unlaunched = self._unlaunched, None
            self.core.fail_step(*unlaunched)


class StepLoop(Generic[C]):
    """Runs `core` in its own thread. Other threads reach it only through `call`.

    With `overlap`, step N+1 is planned and launched before step N's tokens are read. `crashed` is called in
    the step thread when an error escapes the core. That is a bug, and the loop has ended.
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
        warm: Callable[[], None] | None = None,
        cooled: Callable[[Exception], None] = lambda error: None,
        spare: Callable[[Callable[[], bool]], None] | None = None,
    ) -> None:
        """`warm` performs, in the step thread, the work of a launch and changes nothing; None: steps are
        so long that it does not matter. `cooled` is called there with an error of `warm`, after which it
        is not tried again: if the device is broken, the next step fails. `spare` is called there every
        TICK_SECONDS while no step is to be run, with a function that says whether there is something to
        do after all."""
        self.core = core
        self._pipeline = StepPipeline(core, runner, overlap, clock)
        self._clock = clock
        self._crashed = crashed
        self._wake = threading.Event()
        self._stopping = False
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._last_begin = clock()
        self._warm = warm
        self._cooled = cooled
        self._spare = spare
        self._worked = 0.0
        """When the last step or call of `spare` ended."""

    def start(self) -> None:
        self._thread.start()

    @property
    def broken(self) -> str:
        """Why further steps would fail too; empty: they may succeed."""
        return self._pipeline.broken

    @property
    def step_age(self) -> float:
        """Seconds since the last iteration began: at most TICK_SECONDS and a step, unless the thread is
        stuck."""
        # Read first: an iteration that begins meanwhile must not make the age negative.
        last = self._last_begin
        return self._clock() - last

    def call(self, function: Callable[[C, float], None]) -> None:
        """Runs `function(core, now)` in the step thread, between steps or, with overlap, while it waits for
        one; in order, from any thread."""
        self._pipeline.inbox.append(function)
        self._wake.set()

    def stop(self, timeout: float = 10.0) -> bool:
        """Ends the thread after the step in flight; False if it did not end in time. Calls that it has not
        made are made by `finish_calls`."""
        self._stopping = True
        self._wake.set()
        if self._thread.ident is not None:
            self._thread.join(timeout)
        return not self._thread.is_alive()

    def finish_calls(self) -> None:
        """Makes the calls that came too late for the thread, which has ended. Nothing is flushed any more."""
        assert not self._thread.is_alive()
        self._pipeline._take_calls()

    def _run(self) -> None:
        try:
            self._run_until_stopped()
        except BaseException as error:
            self._crashed(error)

    def _run_until_stopped(self) -> None:
        pipeline = self._pipeline
        while not self._stopping:
            self._wake.clear()
            self._last_begin = self._clock()
            due = pipeline.begin()
            if due is not None:
                waited = self._wait_for(due) if pipeline.overlap else 0.0
                pipeline.finish(due)
                self._worked = self._clock()
                if waited and pipeline.ahead:
                    time.sleep(min(REST_SECONDS, REST_SHARE * waited))
            if pipeline.idle and not pipeline.inbox:
                self._idle()

    def _idle(self) -> None:
        """Waits for a call or for the next iteration."""
        if self._spare is not None and self._clock() - self._worked >= TICK_SECONDS:
            self._spare(lambda: bool(self._pipeline.inbox) or self._stopping)
            self._worked = self._clock()
        elif not self._pipeline.core.expecting:
            self._wake.wait(TICK_SECONDS)
        elif self._warm is None:
            self._wake.wait(EXPECT_SECONDS)
        elif not self._wake.wait(WARM_SECONDS):
            try:
                self._warm()
            except Exception as error:
                self._warm = None
                self._cooled(error)

    def _wait_for(self, launched: Launched) -> float:
        """Takes calls until the step has ended, at most CALLS_SECONDS; returns the seconds waited."""
        pipeline, began, waited = self._pipeline, self._clock(), 0.0
        while waited < CALLS_SECONDS and not self._stopping and not pipeline.ended(launched):
            self._wake.clear()
            if pipeline.inbox:
                pipeline.between()
            else:
                self._wake.wait(POLL_SECONDS)
            waited = self._clock() - began
        return waited
