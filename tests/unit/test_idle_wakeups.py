"""An idle process wakes up seldom."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace

import pytest_asyncio

from baton.rpc.http_server import HttpServer, listen
from baton.v1 import cache_pb2, node_pb2
from baton.worker import cache_service
from baton.worker.cache_service import CacheServicer
from virtual_time import skip_waits

SECONDS = 20.0


@pytest_asyncio.fixture
async def virtual_time(monkeypatch):
    skip_waits(monkeypatch, cache_service)


class Node(SimpleNamespace):
    """A worker's node with a load and without a model."""

    def __init__(self) -> None:
        super().__init__(incarnation=3, role="decode", observed=0.0, requests=0)
        self.layout = SimpleNamespace(page_size=16)
        self.loop = asyncio.get_running_loop()
        self.steps = SimpleNamespace(call=lambda what: None)

    def load(self) -> node_pb2.Load:
        return node_pb2.Load(requests=self.requests)


class Watched:
    """A servicer with one watcher: when updates came, and how often the trees were followed."""

    def __init__(self, node: Node) -> None:
        self.servicer = CacheServicer(node)
        self.turns = 0
        self.updates: list[tuple[float, cache_pb2.CacheUpdate]] = []
        follow = self.servicer._follow

        def counted():
            self.turns += 1
            return follow()

        self.servicer._follow = counted
        self.task = asyncio.ensure_future(self._watch())

    async def _watch(self) -> None:
        async for update in self.servicer.Watch(cache_pb2.WatchRequest(), None):
            self.updates.append((asyncio.get_running_loop().time(), update))

    async def end(self) -> None:
        self.task.cancel()
        await asyncio.gather(self.task, return_exceptions=True)
        self.servicer.close()


async def test_a_watcher_of_an_idle_node_costs_two_turns_a_second_and_learns_of_work_at_once(virtual_time):
    loop, node = asyncio.get_running_loop(), Node()
    watched = Watched(node)
    await asyncio.sleep(SECONDS)
    assert SECONDS <= watched.turns + 1 <= 2 * SECONDS
    assert SECONDS - 1 <= len(watched.updates) <= SECONDS + 1
    await asyncio.sleep(0.5)
    began, node.requests, node.observed = loop.time(), 1, loop.time()
    watched.servicer.wake()
    await asyncio.sleep(SECONDS)
    told = next(at for at, update in watched.updates if update.load.requests)
    assert told - began <= cache_service.UPDATE_SECONDS
    await watched.end()


async def test_a_watcher_of_a_busy_node_gets_changes_within_50_ms(virtual_time):
    loop, node = asyncio.get_running_loop(), Node()
    node.requests = 1
    watched = Watched(node)
    for _ in range(5):
        await asyncio.sleep(0.33)
        changed = node.observed = loop.time()
        await asyncio.sleep(0.06)
        assert changed <= watched.updates[-1][0] <= changed + 0.051
    await watched.end()


async def test_the_end_of_a_node_ends_its_watchers_at_once(virtual_time):
    loop = asyncio.get_running_loop()
    watched = Watched(Node())
    await asyncio.sleep(SECONDS)
    ended = loop.time()
    watched.servicer.close()
    await asyncio.gather(watched.task, return_exceptions=True)
    assert loop.time() == ended


async def test_an_http_server_without_callers_wakes_once_a_second(monkeypatch):
    async def app(scope, receive, send):
        raise AssertionError("nobody asks")

    server = HttpServer(app, [listen("127.0.0.1", 0)])
    ticks, tick = [], server._server.on_tick
    monkeypatch.setattr(server._server, "on_tick", lambda counter: ticks.append(counter) or tick(counter))
    server.start()
    await asyncio.sleep(0.65)
    assert len(ticks) == 1
    began = asyncio.get_running_loop().time()
    await server.stop()
    assert asyncio.get_running_loop().time() - began < 1.0 and len(ticks) == 2
