"""Runs coroutines in virtual time, without asyncio: what a shell spawns on its event loop."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Generator
from typing import Any

from baton.sim.event_loop import VirtualLoop
from baton.sim.world import Actor, World


class Future:
    """Awaited in a Task, which goes on in the call of `done`, or in a task of a VirtualLoop."""

    def __init__(self) -> None:
        self._waiting: Callable[[], None] | None = None
        self._done = False

    def done(self) -> None:
        self._done = True
        if self._waiting is not None:
            self._waiting()

    def __await__(self) -> Generator[Any, None, None]:
        if self._done:
            return
        loop = asyncio._get_running_loop()
        if not isinstance(loop, VirtualLoop):  # a real one's callback may run the simulation
            yield self
            return
        over = loop.create_future()
        self._waiting = lambda: None if over.done() else over.set_result(None)
        yield from over


class Task:
    """Like asyncio.Task: begins with the actor's next event, not at once."""

    def __init__(self, world: World, actor: Actor, work: Coroutine[Any, Any, Any]) -> None:
        self._world = world
        self._actor = actor
        self._work = work
        self._awaited: Future | None = None
        self._cancelled = False
        world.at(0.0, actor, self._go_on)

    def __del__(self) -> None:
        self._work.close()  # it has not begun if its actor has died

    def cancel(self) -> None:
        """Raises CancelledError in the coroutine, where it waits or is about to begin or go on."""
        awaited, self._awaited = self._awaited, None
        self._cancelled = True
        if awaited is not None:
            awaited._waiting = None
            self._world.at(0.0, self._actor, self._go_on)

    def _go_on(self) -> None:
        try:
            if self._cancelled:
                self._cancelled = False
                awaited = self._work.throw(asyncio.CancelledError())
            else:
                awaited = self._work.send(None)
        except (StopIteration, asyncio.CancelledError):
            return
        self._awaited = awaited
        awaited._waiting = lambda: self._wake(awaited)

    def _wake(self, awaited: Future) -> None:
        if self._awaited is awaited:
            self._awaited = None
            self._world.at(0.0, self._actor, self._go_on)


def sleep(world: World, actor: Actor, seconds: float) -> Future:
    """Done after `seconds`."""
    future = Future()
    world.at(seconds, actor, future.done)
    return future
