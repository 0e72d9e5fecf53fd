"""Background tasks whose exceptions do not disappear."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

from baton.rpc.logs import get_logger

_log = get_logger()


class Tasks:
    """Owns background tasks: holds them, reports the ones that fail, cancels the rest at close.

    on_failure is called with the exception of a task that failed; cancellation is no failure.
    """

    def __init__(self, on_failure: Callable[[BaseException], None] | None = None) -> None:
        self._tasks: set[asyncio.Task[Any]] = set()
        self._on_failure = on_failure

    def __len__(self) -> int:
        return len(self._tasks)

    def spawn(self, work: Coroutine[Any, Any, Any], name: str) -> asyncio.Task[Any]:
        task = asyncio.get_running_loop().create_task(work, name=name)
        self._tasks.add(task)
        task.add_done_callback(self._done)
        return task

    async def close(self, seconds: float = 10.0) -> None:
        """Cancels what still runs and waits for its end, so long at most. Idempotent."""
        running = [task for task in self._tasks if task is not asyncio.current_task()]
        for task in running:
            task.cancel()
        if running:
            _, stuck = await asyncio.wait(running, timeout=seconds)
            for task in stuck:
                _log.error("task does not end", task=task.get_name())

    def _done(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        if task.cancelled():
            return
        error = task.exception()
        if error is not None:
            _log.error("task failed", task=task.get_name(), exc_info=error)
            if self._on_failure is not None:
                self._on_failure(error)
