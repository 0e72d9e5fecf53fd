"""An asyncio event loop of one actor in virtual time, for code that is written for asyncio itself."""

from __future__ import annotations

import asyncio
from asyncio import events
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from contextvars import Context
from typing import Any

from baton.sim.world import Actor, World

_Abstract: Any = asyncio.AbstractEventLoop
"""Which has many methods that nothing here calls."""


class VirtualLoop(_Abstract):  # type: ignore[misc]
    """What fails in a callback, or in a task that was spawned, ends the run. Nothing more happens once the
    actor is dead."""

    def __init__(
        self,
        world: World,
        actor: Actor,
        clock: Callable[[], float],
        work: tuple[Actor, Callable[[], float]] | None = None,
    ) -> None:
        """`clock`: of the process; `work`: the thread that stands for all executors, and draws how long a
        call takes there. None: none is used."""
        self._world, self._actor, self._clock = world, actor, clock
        self._work = work or (actor, lambda: 0.0)
        self._free = 0.0
        """When that thread has done what it has been given so far."""

    @contextmanager
    def running(self) -> Iterator[None]:
        """The block runs as if in one of its callbacks."""
        before = events._get_running_loop()
        events._set_running_loop(self)
        try:
            yield
        finally:
            events._set_running_loop(before)

    def spawn(self, work: Coroutine[Any, Any, Any], name: str) -> asyncio.Task[Any]:
        """See rpc.tasks.Tasks.spawn."""
        task = self.create_task(work, name=name)
        task.add_done_callback(_require_success)
        return task

    # --- asyncio.AbstractEventLoop ----------------------------------------------------------------------

    def time(self) -> float:
        return self._clock()

    def get_debug(self) -> bool:
        return False

    def is_running(self) -> bool:
        return True

    def is_closed(self) -> bool:
        return False

    def call_soon(
        self, callback: Callable[..., object], *args: Any, context: Context | None = None
    ) -> asyncio.Handle:
        handle = asyncio.Handle(callback, args, self, context)
        self._world.at(0.0, self._actor, lambda: self._run(handle))
        return handle

    call_soon_threadsafe = call_soon

    def call_later(
        self, delay: float, callback: Callable[..., object], *args: Any, context: Context | None = None
    ) -> asyncio.TimerHandle:
        return self.call_at(self.time() + delay, callback, *args, context=context)

    def call_at(
        self, when: float, callback: Callable[..., object], *args: Any, context: Context | None = None
    ) -> asyncio.TimerHandle:
        handle = asyncio.TimerHandle(when, callback, args, self, context)
        self._world.at(max(0.0, when - self.time()), self._actor, lambda: self._run(handle))
        return handle

    def _run(self, handle: asyncio.Handle) -> None:
        if not handle.cancelled():
            with self.running():
                handle._run()

    def _timer_handle_cancelled(self, handle: asyncio.TimerHandle) -> None:
        """Nothing is called when the time comes."""

    def create_future(self) -> asyncio.Future[Any]:
        return asyncio.Future(loop=self)

    def create_task(self, coro: Any, *, name: str | None = None, **options: Any) -> asyncio.Task[Any]:
        return asyncio.Task(coro, loop=self, name=name, **options)

    def run_in_executor(self, executor: Any, func: Callable[..., Any], *args: Any) -> asyncio.Future[Any]:
        """All calls in one thread, one after the other."""
        thread, seconds = self._work
        done = self.create_future()

        def end(result: Any, error: Exception | None) -> None:
            if done.cancelled():
                return
            if error is not None:
                done.set_exception(error)
            else:
                done.set_result(result)

        def call() -> None:
            try:
                result, error = func(*args), None
            except Exception as raised:
                result, error = None, raised
            self.call_soon(end, result, error)

        self._free = max(self._free, self._world.now) + seconds()
        self._world.at(self._free - self._world.now, thread, call)
        return done

    def call_exception_handler(self, context: dict[str, Any]) -> None:
        """Nothing is said of what a dead actor has left."""
        if self._actor.alive and "exception" in context:
            raise context["exception"]


def _require_success(task: asyncio.Task[Any]) -> None:
    if not task.cancelled():
        task.result()
