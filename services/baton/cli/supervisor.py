"""Starts the processes of a deployment in order, starts again what dies, and stops everything."""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
import time
from collections import deque
from collections.abc import Callable, Sequence

from baton.cli.child import Child, ChildError, State
from baton.cli.options import fields_of
from baton.cli.toml import ROLES

START_ORDER = (("tokenizer", "prefill", "decode"), ("gateway",))
"""Workers load at the same time. They are told each other's addresses before these answer."""
STOP_ORDER = ("gateway", "decode", "prefill", "tokenizer")
RESTARTS_PER_MINUTE = 5
FIRST_BACKOFF_SECONDS = 0.2
STOP_MARGIN_SECONDS = 3.0
"""Beyond a child's own time for draining, before it is killed."""
SERVE = (sys.executable, "-m", "baton.cli.main", "serve")


class Backoff:
    """How long to wait before the next restart: doubling, and at most RESTARTS_PER_MINUTE in any minute."""

    def __init__(self) -> None:
        self._times: deque[float] = deque()

    def next(self, now: float) -> float:
        """Seconds to wait from `now` (monotonic); counts the restart."""
        while self._times and self._times[0] <= now - 60:
            self._times.popleft()
        delay = FIRST_BACKOFF_SECONDS * 2.0 ** len(self._times)
        if len(self._times) >= RESTARTS_PER_MINUTE:
            delay = max(delay, self._times[-RESTARTS_PER_MINUTE] + 60 - now)
        self._times.append(now + delay)
        return delay


class Supervisor:
    """Owns the children. `arguments` gives a child's flags at each start, from the addresses known then."""

    def __init__(
        self,
        children: Sequence[Child],
        arguments: Callable[[Child], Sequence[str]],
        *,
        program: Sequence[str] = SERVE,
        restart: bool = True,
        start_seconds: float = 600.0,
        drain_seconds: float = 5.0,
        report: Callable[[str], None] = lambda line: None,
    ) -> None:
        self.children = list(children)
        self._arguments = arguments
        self._program = tuple(program)
        self._restart = restart
        self._start_seconds = start_seconds
        self._drain_seconds = drain_seconds
        self._report = report
        self._monitors: list[asyncio.Task[None]] = []
        self._failure: asyncio.Future[ChildError] | None = None
        # Each worker has a thread a core, and one that waits must not spin on the cores of one that computes.
        # A spin of a few microseconds still pays: within a step the threads wait no longer. `baton bench` on
        # two cores, output tokens/s of two runs: 815, 848; no spin 763, 593; OpenMP's default 506, 763.
        self._environment = {"OMP_WAIT_POLICY": "PASSIVE", "GOMP_SPINCOUNT": "1000", **_inherited()}

    async def start(self) -> None:
        """Returns once all are healthy. Raises the first ChildError; `stop` must then still be called."""
        self._failure = asyncio.get_running_loop().create_future()
        for roles in START_ORDER:
            stage = [child for child in self.children if child.role in roles]
            starts = [asyncio.create_task(self._start(child)) for child in stage]
            try:
                await asyncio.gather(*starts)
            finally:
                for task in starts:
                    task.cancel()
                await asyncio.gather(*starts, return_exceptions=True)

    async def _start(self, child: Child) -> None:
        await self._launch(child)
        self._monitors.append(asyncio.create_task(self._monitor(child), name=f"monitor {child.name}"))

    async def _launch(self, child: Child) -> None:
        command = [*self._program, child.role, *self._arguments(child)]
        await child.start(command, {**self._environment, **child.environment}, self._start_seconds)

    async def failed(self) -> ChildError:
        """Waits until the deployment cannot go on: only without restarts."""
        assert self._failure is not None, "start() comes first"
        return await asyncio.shield(self._failure)

    async def _monitor(self, child: Child) -> None:
        backoff = Backoff()
        while True:
            error = child.died(await child.ended())
            if not self._restart:
                if self._failure is not None and not self._failure.done():
                    self._failure.set_result(error)
                return
            delay = backoff.next(time.monotonic())
            self._report(f"{error}\nstarting {child.name} again in {delay:.1f} s on port {child.port}")
            await asyncio.sleep(delay)
            try:
                await self._launch(child)
            except ChildError:
                child.kill()  # one that hangs; the others are dead already
            else:
                self._report(f"{child.name} is healthy again: pid {child.pid}, {child.address}")

    async def stop(self) -> None:
        """Ends all children, role by role; those still there after their time are killed. When cancelled it
        kills the rest at once. No child is running when this has returned or raised."""
        for task in self._monitors:
            task.cancel()
        await asyncio.gather(*self._monitors, return_exceptions=True)
        self._monitors.clear()
        try:
            for role in STOP_ORDER:
                stage = [child for child in self.children if child.role == role]
                await asyncio.gather(
                    *(child.stop(self._drain_seconds + STOP_MARGIN_SECONDS) for child in stage)
                )
        finally:
            left = [child for child in self.children if child.running]
            for child in left:
                child.kill()
            for child in left:
                with contextlib.suppress(asyncio.CancelledError):
                    await child.ended()
                child.state = State.STOPPED


def _inherited() -> dict[str, str]:
    """The environment without Baton's own settings: what of them is meant for the children they get as flags.
    The rest is for commands that call another deployment, such as `baton verify --against`."""
    own = {field.variable for config in ROLES.values() for field in fields_of(config).values()}
    own.add("BATON_CONFIG")
    return {name: value for name, value in os.environ.items() if name not in own}
