"""Serves Node.Watch: a process's load, and a worker's pool as a map of its pages, to people who look on."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable
from typing import Protocol, runtime_checkable

import psutil

from baton.rpc.errors import exhausted, invalid_field, unavailable
from baton.rpc.tasks import wait_at_most
from baton.v1 import node_pb2

DEFAULT_INTERVAL_MS = 500
LEAST_INTERVAL_MS, MOST_INTERVAL_MS = 100, 10_000
MAX_CELLS = 65_536
MAX_WATCHERS = 64

ReadMap = Callable[[int], Awaitable[node_pb2.PageMap | None]]
"""Makes a page map of at most so many cells; None: it cannot be read now."""


@runtime_checkable
class HasPool(Protocol):
    """A process with a KV pool."""

    async def page_map(self, max_cells: int) -> node_pb2.PageMap | None: ...


class NodeWatches:
    """All calls of Node.Watch at one process. Nothing runs while nobody watches."""

    def __init__(
        self,
        info: Callable[[], node_pb2.NodeInfo],
        load: Callable[[], node_pb2.Load],
        page_map: ReadMap | None,
    ) -> None:
        """page_map: None for a process without a pool."""
        self._info = info
        self._load = load
        self._page_map = page_map
        self._process = psutil.Process()
        self._watchers = 0
        self._stopping = asyncio.Event()

    def close(self) -> None:
        """Ends all calls."""
        self._stopping.set()

    async def serve(self, request: node_pb2.WatchNodeRequest) -> AsyncGenerator[node_pb2.NodeState, None]:
        """Answers one call. Raises BatonError, at the latest when the process stops."""
        interval = _interval(request)
        if request.max_cells > MAX_CELLS:
            raise invalid_field("max_cells", f"is {request.max_cells}; at most {MAX_CELLS}")
        if self._watchers >= MAX_WATCHERS:
            raise exhausted(f"{self._watchers} watch this process already", "TOO_MANY_WATCHERS", 1000)
        self._watchers += 1
        try:
            state = self._state()
            state.info.CopyFrom(self._info())
            known: node_pb2.PageMap | None = None
            while not self._stopping.is_set():
                pages = await self._pages(request.max_cells)
                if pages is not None and pages != known:
                    state.pages.CopyFrom(pages)
                    known = pages
                yield state
                await wait_at_most(interval, self._stopping)
                state = self._state()
            raise unavailable("the process is stopping", "STOPPING")
        finally:
            self._watchers -= 1

    def _state(self) -> node_pb2.NodeState:
        return node_pb2.NodeState(load=self._load(), resident_bytes=self._process.memory_info().rss)

    async def _pages(self, max_cells: int) -> node_pb2.PageMap | None:
        if not max_cells or self._page_map is None:
            return None
        return await self._page_map(max_cells)


def _interval(request: node_pb2.WatchNodeRequest) -> float:
    """Seconds. Raises BatonError."""
    interval = request.interval_ms if request.HasField("interval_ms") else DEFAULT_INTERVAL_MS
    if not LEAST_INTERVAL_MS <= interval <= MOST_INTERVAL_MS:
        allowed = f"{LEAST_INTERVAL_MS} to {MOST_INTERVAL_MS}"
        raise invalid_field("interval_ms", f"is {interval}; {allowed} are allowed")
    return interval / 1000
