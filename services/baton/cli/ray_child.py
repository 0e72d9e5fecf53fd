"""A supervisor's child on a host of a Ray cluster."""

from __future__ import annotations

import asyncio
import contextlib
import signal
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import RayError, RayTaskError
from ray.util.placement_group import PlacementGroup

from baton.cli.ray_actor import ACTORS, HostedProcess
from baton.cli.ray_cluster import RayCluster, release, resources_text
from baton.cli.supervisor import Child, ChildError, ChildState

MOVE_SECONDS = 30.0
"""After this time without room for it, a worker that is to be started again says so."""
ANSWER_SECONDS = 5.0
"""For an actor's answer, beside what it does."""


class RayChild(Child):
    """A `baton serve` process that an actor of Ray's starts and watches (ray_actor.py). Its log comes here.

    An actor whose process has ended starts another one. If the actor itself is lost, so is its process, and
    the next start makes another actor for the worker: on another host if Ray has moved it."""

    def __init__(
        self,
        name: str,
        role: str,
        *,
        folder: Path,
        cluster: RayCluster,
        group: PlacementGroup | None,
        changed: Callable[[], None],
        report: Callable[[str], None],
        host: str = "",
        port: int = 0,
        http_port: int | None = None,
    ) -> None:
        """group: None: this host. host: empty: the address and ports that its actor chooses. changed: called
        after each change of its state."""
        super().__init__(name, role, folder=folder, host=host, port=port, http_port=http_port)
        self.secret = ""
        """The cluster's; empty: its flags name it."""
        self.group = group
        self._chosen = (host, port, http_port)
        self._cluster = cluster
        self._changed = changed
        self._report = report
        self._actor: Any = None
        self._started = HostedProcess(0, host, port, http_port, "")
        self._running = False
        self._end = ""
        self._following: asyncio.Task[None] | None = None

    @property
    def pid(self) -> int:
        return self._started.pid

    @property
    def running(self) -> bool:
        return self._running

    def _enter(self, state: ChildState) -> None:
        super()._enter(state)
        self._changed()

    async def start(self, command: Sequence[str], seconds: float) -> None:
        self._enter(ChildState.STARTING)
        self.starts += 1
        try:
            async with asyncio.timeout(seconds):
                if self._actor is None:
                    await self._create()
                self._running = True
                self._started = started = await self._actor.start.remote(list(command), seconds)
        except TimeoutError:
            with contextlib.suppress(RayError):
                ray.kill(self._actor)
            self._lose()
            raise self._error(f"{self.name} was not ready after {seconds:.0f} s") from None
        except RayTaskError as error:  # Child.start's own
            self._end = str(error.cause if isinstance(error.cause, ChildError) else error)
            self._enter(ChildState.DIED)
            raise self.died(0) from None
        except (RayError, ValueError) as error:
            self._lose()
            raise ChildError(f"{self.name} was not started by Ray: {' '.join(str(error).split())}") from None
        self.host, self.port, self.http_port = started.host, started.port, started.http_port
        self.environment = {"CUDA_VISIBLE_DEVICES": started.gpus} if started.gpus else {}
        self._enter(ChildState.HEALTHY)

    async def _create(self) -> None:
        """Returns once the actor lives."""
        arguments = (self.role, str(Path.cwd()), self.secret, *self._chosen)
        self._actor = await asyncio.to_thread(
            self._cluster.create, ACTORS[self.role], self.name, self.starts, self.group, *arguments
        )
        host = asyncio.ensure_future(self._actor.host.remote())
        await asyncio.wait({host}, timeout=MOVE_SECONDS)
        if not host.done():
            needs = resources_text(self.group.bundle_specs[0]) if self.group is not None else "this one"
            self._report(f"{self.name} waits for a host with {needs} free")
        self.host = await host
        self._following = asyncio.create_task(self._follow_log(self._actor), name=f"log {self.name}")

    async def _follow_log(self, actor: Any) -> None:
        with contextlib.suppress(RayError):
            while True:
                text = await actor.read_log.remote()
                with self.log.open("ab") as log:
                    log.write(text)

    async def ended(self) -> int:
        code = -int(signal.SIGKILL)
        if self._actor is None:
            return code
        try:
            code, self._end = await self._actor.ended.remote()
            self._running = False
        except RayError:
            self._end = f"{self.name} (pid {self.pid}) was lost with its actor on {self.host}"
            self._lose()
        if self.state is not ChildState.STOPPING:
            self._enter(ChildState.DIED)
        return code

    def died(self, code: int) -> ChildError:
        what, *lines = self._end.split("\n")
        return self._with_log(what, lines)

    async def stop(self, seconds: float) -> None:
        if self._actor is not None:
            self._enter(ChildState.STOPPING)
            with contextlib.suppress(RayError, TimeoutError):
                async with asyncio.timeout(seconds + ANSWER_SECONDS):
                    await self._actor.stop.remote(seconds)
            with contextlib.suppress(RayError):
                ray.kill(self._actor)
            self._lose()
            self._enter(ChildState.STOPPED)
        release([self.group])

    def kill(self) -> None:
        if self._actor is not None:
            self._actor.kill.remote()

    def _lose(self) -> None:
        """Forgets the actor, which is gone."""
        self._actor, self._running = None, False
        self.port = self._chosen[1]
        if self._following is not None:
            self._following.cancel()
