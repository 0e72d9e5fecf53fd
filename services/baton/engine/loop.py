"""The step loop: the one thread that owns a node's core and its runner."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any, Generic

from baton.engine.runner import Runner
from baton.engine.turns import CALLS_SECONDS, C, Launched, Turns

TICK_SECONDS = 0.5
"""An idle loop checks deadlines, leases and heartbeats this often."""
POLL_SECONDS = 2e-4
"""While a step runs, the loop polls this often whether it has ended."""
REST_SECONDS = 5e-4
"""Rest after a step that the loop has waited for, if another step is queued on the device. Planning and
launching the next one keep the interpreter for milliseconds; the step's messages leave before."""
REST_SHARE = 0.25
"""Upper limit of the rest, as a fraction of the time waited: short steps leave no time."""
WARM_SECONDS = 2e-3
"""While pages are expected, the loop runs a warm-up this often. After a pause of 10 ms or more a launch
takes the host two to five times as long, because its caches are cold."""


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
    ) -> None:
        """`warm` performs, in the step thread, the work of a launch and changes nothing; None: steps are
        so long that it does not matter. `cooled` is called there with an error of `warm`, after which it
        is not tried again: if the device is broken, the next step fails."""
        self._turns = Turns(core, runner, overlap, clock)
        self._clock = clock
        self._crashed = crashed
        self._wake = threading.Event()
        self._stopping = False
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._last_turn = clock()
        self._warm = warm
        self._cooled = cooled

    def start(self) -> None:
        self._thread.start()

    @property
    def alive(self) -> bool:
        return self._thread.is_alive()

    @property
    def broken(self) -> str:
        """Why further steps would fail too; empty: they may succeed."""
        return self._turns.broken

    @property
    def turn_age(self) -> float:
        """Seconds since the last iteration began: at most TICK_SECONDS and a step, unless the thread is
        stuck."""
        last = (
            self._last_turn
        )  # read first: an iteration that begins meanwhile must not make the age negative
        return self._clock() - last

    def call(self, function: Callable[[C, float], None]) -> None:
        """Runs `function(core, now)` in the step thread, between steps or, with overlap, while it waits for
        one; in order, from any thread."""
        self._turns.inbox.append(function)
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
        turns = self._turns
        while not self._stopping:
            self._wake.clear()
            self._last_turn = self._clock()
            due = turns.begin()
            if due is not None:
                waited = self._wait_for(due) if turns.overlap else 0.0
                turns.finish(due)
                if waited and turns.ahead:
                    time.sleep(min(REST_SECONDS, REST_SHARE * waited))
            if turns.idle and not turns.inbox:
                self._idle()

    def _idle(self) -> None:
        """Waits for a call or for the next iteration."""
        if self._warm is None or not self._turns.core.expecting:
            self._wake.wait(TICK_SECONDS)
        elif not self._wake.wait(WARM_SECONDS):
            try:
                self._warm()
            except Exception as error:
                self._warm = None
                self._cooled(error)

    def _wait_for(self, launched: Launched) -> float:
        """Takes calls until the step has ended, at most CALLS_SECONDS; returns the seconds waited."""
        turns, began, waited = self._turns, self._clock(), 0.0
        while waited < CALLS_SECONDS and not self._stopping and not turns.ended(launched):
            self._wake.clear()
            if turns.inbox:
                turns.between()
            else:
                self._wake.wait(POLL_SECONDS)
            waited = self._clock() - began
        return waited
