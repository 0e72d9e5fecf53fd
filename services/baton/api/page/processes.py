"""Follows every process of the deployment by Node.Watch, while somebody looks."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import grpc
import grpc.aio

from baton.gateway.gateway import Gateway
from baton.rpc.errors import BatonError, from_rpc_error, unavailable
from baton.rpc.health import serves
from baton.rpc.tasks import Tasks
from baton.v1 import node_pb2, node_pb2_grpc

INTERVAL_MS = 1000
SILENT_SECONDS = 2.5
"""A process that sends nothing for this time is asked anew. It sends every INTERVAL_MS."""
RETRY_SECONDS = 0.5
MAX_CELLS = 4096
"""Cells of a pool's map."""
ALL_CELLS, LEAST_CELLS = 8192, 256
"""Cells of all maps, as far as each has LEAST_CELLS: a thousand cells take a millisecond of each second."""

ORDER = {"gateway": 0, "tokenizer": 1, "encode": 2, "prefill": 3, "decode": 4}


def max_cells(workers: int) -> int:
    """Cells of each pool's map, where there are so many pools."""
    return max(LEAST_CELLS, min(MAX_CELLS, ALL_CELLS // max(1, workers)))


class WatchedProcess:
    """What is known of one process. `health`: unknown (nothing received yet), serving, not serving, draining,
    silent (it has sent nothing for SILENT_SECONDS, as a busy one may) or unreachable."""

    def __init__(self, role: str, address: str) -> None:
        self.role = role
        self.address = address
        self.health = "unknown"
        self.error = ""
        self.info: node_pb2.NodeInfo | None = None
        self.load: node_pb2.Load | None = None
        self.resident_bytes = 0
        self.pages: node_pb2.PageMap | None = None
        self.pages_version = 0
        """Grows with each new map."""

    def update(self, state: node_pb2.NodeState) -> None:
        if state.HasField("info"):
            self.info = state.info
        if state.HasField("pages"):
            self.pages = state.pages
            self.pages_version += 1
        self.load, self.resident_bytes = state.load, state.resident_bytes
        self.health, self.error = health_of(state.load), ""

    def missed(self) -> None:
        """Nothing was received for SILENT_SECONDS: for the second time in a row the process is lost."""
        if self.health in ("silent", "unreachable"):
            self.lost(unavailable(f"nothing heard for {2 * SILENT_SECONDS:g} s"))
        else:
            self.health, self.error = "silent", f"nothing heard for {SILENT_SECONDS:g} s"

    def lost(self, error: BatonError) -> None:
        self.health, self.error = "unreachable", error.message
        self.load = None
        if self.pages is not None:
            self.pages = None
            self.pages_version += 1


def health_of(load: node_pb2.Load) -> str:
    if load.draining:
        return "draining"
    return "serving" if serves(load) else "not serving"


class Processes:
    """All processes that the gateway knows, itself left out. Used on one event loop."""

    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway
        self._known: dict[tuple[str, str], WatchedProcess] = {}
        self._following: dict[tuple[str, str], asyncio.Task[None]] = {}
        self._tasks = Tasks()

    def __iter__(self) -> Iterator[WatchedProcess]:
        """By role, then in the order in which they became known."""
        return iter(sorted(self._known.values(), key=lambda process: ORDER[process.role]))

    def refresh(self) -> None:
        """Follows processes that have joined, and forgets those that have left."""
        nodes = self._gateway.nodes
        shown = [
            *(("gateway", address) for address in self._gateway.config.siblings),
            *(("tokenizer", address) for address in nodes.tokenizer.nodes),
            *(("encode", address) for address in nodes.encode),
            *(("prefill", address) for address in nodes.prefill),
            *(("decode", address) for address in nodes.decode),
        ]
        for key in self._known.keys() - set(shown):
            del self._known[key]
            self._following.pop(key).cancel()
        for key in shown:
            if key not in self._known:
                process = self._known[key] = WatchedProcess(*key)
                name = f"page: {process.role} {process.address}"
                self._following[key] = self._tasks.spawn(self._follow(process), name)

    async def close(self) -> None:
        """Follows none of them any more. Idempotent."""
        self._known.clear()
        self._following.clear()
        await self._tasks.close()

    async def _follow(self, process: WatchedProcess) -> None:
        while True:
            try:
                await self._watch(process)
            except grpc.aio.AioRpcError as error:
                process.lost(from_rpc_error(error))
            except TimeoutError:
                process.missed()
            await asyncio.sleep(RETRY_SECONDS)

    async def _watch(self, process: WatchedProcess) -> None:
        """One stream to its end. Raises AioRpcError or TimeoutError."""
        async with self._gateway.dial(process.address) as channel:
            workers = len(self._gateway.nodes.prefill) + len(self._gateway.nodes.decode)
            request = node_pb2.WatchNodeRequest(interval_ms=INTERVAL_MS, max_cells=max_cells(workers))
            call = node_pb2_grpc.NodeStub(channel).Watch(request)
            try:
                while True:
                    async with asyncio.timeout(SILENT_SECONDS):
                        state = await call.read()
                    if state is grpc.aio.EOF:
                        process.lost(unavailable("it closed the stream"))
                        return
                    process.update(state)
            finally:
                call.cancel()
