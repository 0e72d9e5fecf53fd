"""Health that follows what a process says of itself."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from baton.rpc.health import HealthServicer
from baton.rpc.logs import get_logger
from baton.v1 import node_pb2

INTERVAL_SECONDS = 0.5
"""Health follows what is wrong with the process within so long."""
UNKNOWN = 3
"""A process that cannot say how it is, so many times in a row, serves no more."""

_log = get_logger()


def serves(load: node_pb2.Load) -> bool:
    return not load.draining and not any(problem.stops_serving for problem in load.problems)


class Condition:
    """Asks for the load again and again, sets health by it, and logs what goes wrong and what is well again.

    load: called on the event loop; may raise. end: called with what is wrong when the process cannot recover.
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
        """From now on the process serves, if it is well."""
        self.look()
        self._task = asyncio.get_running_loop().create_task(self._watch(), name="health")

    def stop(self) -> None:
        if self._task is not None:
            self._task.cancel()

    def look(self) -> None:
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
        if self._failures == UNKNOWN:
            _log.error("load not known for long; serving no more", times=self._failures)
        if self._failures >= UNKNOWN:
            self._health.set_all(False)

    async def _watch(self) -> None:
        while True:
            await asyncio.sleep(INTERVAL_SECONDS)
            self.look()
