"""Health: grpc.health.v1.Health, set from the process's own problems.

Unlike the servicer of grpcio-health-checking, a watcher that leaves does not silence the other watchers of
its service, and a watcher that does not read delays nobody.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any

import grpc
import grpc.aio
from grpc_health.v1 import health_pb2, health_pb2_grpc

from baton.rpc.errors import abort, exhausted
from baton.rpc.logs import get_logger
from baton.v1 import node_pb2

MAX_WATCHERS = 1024
"""Anyone who can connect may watch, for any time; callers without credentials can hold nothing else."""
SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING
SERVICE_UNKNOWN = health_pb2.HealthCheckResponse.SERVICE_UNKNOWN


class HealthServicer(health_pb2_grpc.HealthServicer):  # type: ignore[misc]
    """All services of a process share one state: NOT_SERVING until set."""

    SERVICE: str = health_pb2.DESCRIPTOR.services_by_name["Health"].full_name

    def __init__(self) -> None:
        self._services: frozenset[str] = frozenset({""})
        self._serving = False
        self._watchers = 0
        self._changed = asyncio.Event()

    def add_to(self, server: grpc.aio.Server, services: Sequence[str]) -> None:
        """Registers at the server; answers for "" (the process) and these services."""
        self._services = frozenset({"", *services})
        health_pb2_grpc.add_HealthServicer_to_server(self, server)

    @property
    def serving(self) -> bool:
        return self._serving

    def set_all(self, serving: bool) -> None:
        if serving == self._serving:
            return
        self._serving = serving
        self._changed.set()
        self._changed = asyncio.Event()

    async def Check(self, request: Any, context: grpc.aio.ServicerContext) -> Any:
        status = self._status(request.service)
        if status == SERVICE_UNKNOWN:
            await context.abort(grpc.StatusCode.NOT_FOUND, f"no service {request.service!r} here")
        return health_pb2.HealthCheckResponse(status=status)

    async def Watch(self, request: Any, context: grpc.aio.ServicerContext) -> AsyncIterator[Any]:
        if self._watchers >= MAX_WATCHERS:
            text = f"{self._watchers} watch this process already: use Check"
            await abort(context, exhausted(text, "TOO_MANY_WATCHERS", 1000))
        self._watchers += 1
        sent = None
        try:
            while True:
                changed = self._changed
                status = self._status(request.service)
                if status != sent:
                    sent = status
                    yield health_pb2.HealthCheckResponse(status=status)
                await changed.wait()
        finally:
            self._watchers -= 1

    def _status(self, service: str) -> int:
        if service not in self._services:
            return int(SERVICE_UNKNOWN)
        return int(SERVING if self._serving else NOT_SERVING)


INTERVAL_SECONDS = 0.5
"""Health follows the process's problems within this time."""
MAX_UNKNOWN_LOADS = 3
"""A process whose load cannot be read this many times in a row is NOT_SERVING."""

_log = get_logger()


def serves(load: node_pb2.Load) -> bool:
    return not load.draining and not any(problem.stops_serving for problem in load.problems)


class HealthMonitor:
    """Polls the load, sets health by its problems, and logs problems when they begin and end.

    load: called on the event loop; may raise. end: called with the problem if the process cannot recover.
    """

    def __init__(
        self, health: HealthServicer, load: Callable[[], node_pb2.Load], end: Callable[[str], None]
    ) -> None:
        self._health = health
        self._load = load
        self._end = end
        self._known: dict[str, node_pb2.Problem] = {}
        self._failures = 0
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Starts to report SERVING, unless there are problems."""
        self.check()
        self._task = asyncio.get_running_loop().create_task(self._watch(), name="health")

    def stop(self) -> None:
        if self._task is not None:
            self._task.cancel()

    def check(self) -> None:
        try:
            load = self._load()
        except Exception:
            self._unknown()
            return
        if self._failures:
            self._failures = 0
            _log.info("load known again")
        found = {problem.reason: problem for problem in load.problems}
        for reason in found.keys() - self._known.keys():
            _log.warning("problem", reason=reason, message=found[reason].message)
        for reason in self._known.keys() - found.keys():
            _log.info("problem over", reason=reason)
        self._known = found
        self._health.set_all(serves(load))
        for problem in load.problems:
            if problem.ends_process:
                self._end(problem.message)

    def _unknown(self) -> None:
        self._failures += 1
        if self._failures == 1:
            _log.exception("load not known")
        if self._failures == MAX_UNKNOWN_LOADS:
            _log.error("load not known for long; serving no more", times=self._failures)
        if self._failures >= MAX_UNKNOWN_LOADS:
            self._health.set_all(False)

    async def _watch(self) -> None:
        while True:
            await asyncio.sleep(INTERVAL_SECONDS)
            self.check()
