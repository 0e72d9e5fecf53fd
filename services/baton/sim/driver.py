"""Drives engine.step_loop.StepPipeline in virtual time, as StepLoop does in a thread."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Generic

from baton.engine.step_builder import Step
from baton.engine.step_loop import CALLS_SECONDS, TICK_SECONDS, C, Launched, StepPipeline
from baton.sim.runner import Escaped
from baton.sim.world import Actor, World
from baton.worker.ranks.runner import RanksLost


def _crash(error: BaseException) -> None:
    raise error


class StepDriver(Generic[C]):
    """Takes its first turn now.

    when_done: takes the runner's record of a launched step, and what to call in the step thread when its
    results can be read. hop: from a call to the step thread. pause: from the end of a turn to the beginning
    of the next, after the step that the turn has read, if any. turned: called when calls have been taken or
    a step been launched or read. crashed: called with an error that escapes the core.
    """

    def __init__(
        self,
        world: World,
        actor: Actor,
        pipeline: StepPipeline[C],
        *,
        when_done: Callable[[Any, Callable[[], None]], None],
        hop: float,
        pause: Callable[[Step | None], float],
        turned: Callable[[Step | None], None],
        crashed: Callable[[BaseException], None] = _crash,
    ) -> None:
        self.pipeline = pipeline
        self._world = world
        self._actor = actor
        self._when_done = when_done
        self._hop = hop
        self._pause = pause
        self._turned = turned
        self._crashed = crashed
        self._busy = True
        self._since: float | None = None
        """Time when it began to wait for a step's results."""
        self._serial = 0
        self._last_begin = world.now
        self._schedule(0.0)

    @property
    def step_age(self) -> float:
        """Like StepLoop.step_age."""
        return self._world.now - self._last_begin

    def call(self, function: Callable[[C, float], None]) -> None:
        """Like StepLoop.call: runs in the step thread, at the beginning of its next iteration or while it
        waits."""
        self.pipeline.inbox.append(function)
        if not self._busy:
            self._busy = True
            self._schedule(self._hop)
        elif self._since is not None:
            self._world.at(self._hop, self._actor, self._between)

    def _schedule(self, delay: float) -> None:
        self._serial += 1
        serial = self._serial

        def turn() -> None:
            if serial == self._serial:
                self._turn()

        self._world.at(delay, self._actor, turn)

    def _turn(self) -> None:
        self._busy = True
        self._last_begin = self._world.now
        called = bool(self.pipeline.inbox)
        try:
            due = self.pipeline.begin()
        except RanksLost as error:
            self._crashed(error)
            return
        if called or due is not None:
            self._turned(None)
        if due is not None:
            self._since = self._world.now if self.pipeline.overlap else None
            self._when_done(due[1], lambda: self._finish(due))
        elif self.pipeline.idle and not self.pipeline.inbox:
            self._busy = False
            self._schedule(TICK_SECONDS)
        else:
            self._schedule(self._pause(None))

    def _between(self) -> None:
        waits = self._since is not None and self._world.now - self._since < CALLS_SECONDS
        if waits and self.pipeline.inbox:
            self.pipeline.between()
            self._turned(None)

    def _finish(self, due: Launched) -> None:
        self._since = None
        try:
            self.pipeline.finish(due)
        except (Escaped, RanksLost) as error:
            self._crashed(error)
            return
        self._turned(due[0])
        self._schedule(self._pause(due[0]))
