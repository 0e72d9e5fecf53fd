"""Asks workers for their load, again and again, while requests could be decided by it."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Iterable

import grpc.aio

from baton.rpc.channel import Dial
from baton.v1 import node_pb2, node_pb2_grpc

POLL_SECONDS = 0.5
ANSWER_SECONDS = 2.0


class Loads:
    """One connection and one task a node. Used on one event loop.

    addresses: of the nodes there are now. heard: called with a node's address and load, or None when it has
    not answered in time.
    """

    def __init__(
        self,
        addresses: Callable[[], Iterable[str]],
        heard: Callable[[str, node_pb2.Load | None], None],
        dial: Dial,
        every: float = POLL_SECONDS,
    ) -> None:
        self._addresses = addresses
        self._heard = heard
        self._dial = dial
        self._every = every
        self._asking: dict[str, asyncio.Task[None]] = {}
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        self._task = asyncio.get_running_loop().create_task(self._run(), name="loads")

    async def close(self) -> None:
        tasks = [*([self._task] if self._task is not None else []), *self._asking.values()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _run(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            addresses = set(self._addresses())
            for address in self._asking.keys() - addresses:
                self._asking.pop(address).cancel()
                self._heard(address, None)
            for address in addresses - self._asking.keys():
                self._asking[address] = loop.create_task(self._ask(address), name=f"load of {address}")
            await asyncio.sleep(self._every)

    async def _ask(self, address: str) -> None:
        async with self._dial(address) as channel:
            stub = node_pb2_grpc.NodeStub(channel)
            while True:
                load: node_pb2.Load | None = None
                with contextlib.suppress(grpc.aio.AioRpcError):  # a lost node is told of by its streams
                    load = await stub.GetLoad(node_pb2.GetLoadRequest(), timeout=ANSWER_SECONDS)
                self._heard(address, load)
                await asyncio.sleep(self._every)
