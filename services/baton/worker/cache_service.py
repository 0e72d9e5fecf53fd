"""Serves Cache.Watch: a worker's prefix trees and load, watched (the shell around kvcache.kv_events)."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from baton.kvcache import KvCacheManager
from baton.kvcache.kv_events import HOST, POOL, TreeEvents, TreeLog
from baton.rpc.errors import BatonError, abort, exhausted, unavailable
from baton.rpc.tasks import wait_at_most
from baton.v1 import cache_pb2, cache_pb2_grpc
from baton.worker.load import cache_updates

if TYPE_CHECKING:
    from baton.worker.node import WorkerNode

UPDATE_SECONDS = 0.05
"""Least time between two updates to a watcher."""
SIGN_OF_LIFE_SECONDS = 1.0
"""Most time between them."""
LINGER_SECONDS = 60.0
"""The tree is still followed this long after the last watcher has left, so that one that returns can
resume."""
MAX_WATCHERS = 256


class CacheServicer(cache_pb2_grpc.CacheServicer):
    """Follows the trees while somebody watches. Lives on the event loop; the step thread only notes what
    happens, and digests are computed here."""

    def __init__(self, node: WorkerNode[Any]) -> None:
        self._node = node
        self._log: TreeLog | None = None
        self._events: dict[int, TreeEvents] = {}
        """Events of each tier's tree; none: they are not followed."""
        self._watchers = 0
        self._linger: asyncio.TimerHandle | None = None
        self._stopping = asyncio.Event()
        self._woken = asyncio.Event()

    async def Watch(
        self, request: cache_pb2.WatchRequest, context: Any
    ) -> AsyncGenerator[cache_pb2.CacheUpdate, None]:
        known = request.sequence if request.incarnation == self._node.incarnation else None
        try:
            with self._watching():
                sent = 0.0
                while not self._stopping.is_set():
                    woken = self._woken  # before the state is read: no change is missed
                    log, idle = self._follow(), not self._node.requests
                    now = time.monotonic()
                    if (
                        idle
                        or log.sequence != known
                        or self._node.observed > sent
                        or now >= sent + SIGN_OF_LIFE_SECONDS
                    ):
                        node, load = self._node, self._node.load()
                        for update in cache_updates(log, known, node.incarnation, node.role, load):
                            yield update
                        known, sent = update.sequence, now
                    await wait_at_most(UPDATE_SECONDS, self._stopping)
                    if idle:
                        await wait_at_most(SIGN_OF_LIFE_SECONDS - UPDATE_SECONDS, woken)
            raise unavailable("the node is stopping", "STOPPING")
        except BatonError as error:
            await abort(context, error)

    def wake(self) -> None:
        """Called when the load of a node without requests changes, or it gets its first."""
        self._woken.set()
        self._woken = asyncio.Event()

    @contextmanager
    def _watching(self) -> Iterator[None]:
        """Raises BatonError when too many watch."""
        if self._watchers >= MAX_WATCHERS:
            raise exhausted(f"{self._watchers} watch this node's cache already", "TOO_MANY_WATCHERS", 1000)
        self._watchers += 1
        if self._linger is not None:
            self._linger.cancel()
        try:
            yield
        finally:
            self._watchers -= 1
            if not self._watchers and not self._stopping.is_set():
                self._linger = self._node.loop.call_later(LINGER_SECONDS, self._leave)

    def _follow(self) -> TreeLog:
        """The log, up to now."""
        log = self._log = self._log or TreeLog(self._node.layout.page_size)
        if not self._events or any(events.overflown for events in self._events.values()):
            log.clear()
            self._observe({tier: TreeEvents() for tier in (POOL, HOST)})
        for tier, events in self._events.items():
            while (event := events.take()) is not None:
                log.apply(event, tier)
        return log

    def _leave(self) -> None:
        assert self._log is not None
        self._log.clear()
        self._observe({})

    def _observe(self, events: dict[int, TreeEvents]) -> None:
        before, self._events = self._events, events

        def observe(cache: KvCacheManager) -> None:
            cache.observe(events.get(POOL), before.get(POOL))
            if cache.tier is not None:
                cache.tier.cache.observe(events.get(HOST), before.get(HOST))

        self._node.steps.call(lambda core, now: observe(core.scheduler.cache))

    def close(self) -> None:
        """Ends all streams, and follows the trees no more."""
        self._stopping.set()
        self.wake()
        if self._events:
            self._observe({})
        if self._linger is not None:
            self._linger.cancel()
