"""A simulated encode process: worker.encode.server and all behind it, on a virtual event loop."""

from __future__ import annotations

from array import array
from dataclasses import dataclass
from typing import Any

import numpy as np

from baton.config import EncodeConfig
from baton.engine.images import EmbeddingCache
from baton.handoff.pull_cost import PullMeter
from baton.sim.calls import CallChannel, serve
from baton.sim.event_loop import VirtualLoop
from baton.sim.images import TOWER, SimTower
from baton.sim.network import Endpoint, Network
from baton.sim.process import SimProcess
from baton.sim.virtual_gateway import NotedLog
from baton.sim.world import Violation
from baton.v1 import common_pb2, node_pb2
from baton.worker.encode.batches import EncodeBatches
from baton.worker.encode.pool import EmbeddingPool
from baton.worker.encode.server import EncodeNode
from baton.worker.images.contents import ImageContents

PAGE_TOKENS = 4
PAGE_BYTES = PAGE_TOKENS * SimTower.values * SimTower.dtype.itemsize
_UNWRITTEN = 0xEE


@dataclass(frozen=True, slots=True)
class EncodeSettings:
    pages: int
    """Pages of the pool."""
    room: int
    """Bytes of pixels that it holds at a time."""
    shared: bool
    """Pages are read out of its memory; else they are asked for."""
    batch_seconds: float
    """The usual time of a batch, and of writing an image's embeddings."""
    lend_seconds: float


@dataclass(frozen=True, slots=True)
class _Published:
    """worker.pool.PublishedPool."""

    who: str
    shared: bool

    @property
    def pages(self) -> _Published:
        return self

    @property
    def page_bytes(self) -> int:
        return PAGE_BYTES

    def endpoints(self) -> list[common_pb2.Endpoint]:
        if self.shared:
            return [common_pb2.Endpoint(shm=common_pb2.ShmEndpoint(path=self.who))]
        return [common_pb2.Endpoint(grpc=common_pb2.GrpcEndpoint())]


class SimEncode(SimProcess, EncodeNode):  # type: ignore[misc]  # nothing drains but by a fault
    role = "encode"

    def __init__(self, network: Network, name: str, life: int, settings: EncodeSettings) -> None:
        EncodeNode.__init__(self, EncodeConfig())
        SimProcess.__init__(self, network, name, life)
        self._incarnation, self._tower = self.incarnation, TOWER
        self._info.dtype = str(SimTower.dtype).removeprefix("torch.")
        self.rows = np.full((settings.pages, PAGE_BYTES), _UNWRITTEN, np.uint8)
        self.generations = array("Q", bytes(8 * settings.pages))
        self._published = _Published(self.who, settings.shared)  # type: ignore[assignment]
        network.segments[self.who] = self
        rng = self.world.rng(f"encode {name}")
        work = self.device_thread, lambda: settings.batch_seconds * rng.uniform(0.1, 2.0)
        self.virtual = VirtualLoop(self.world, self.loop, self.clock, work)
        log: Any = NotedLog(self.world, self.who)
        with self.virtual.running():
            self.pool = EmbeddingPool(self.rows, self.generations, self.clock, settings.lend_seconds)
            self._contents = ImageContents(
                SimTower(), EmbeddingCache(0), self._dial, self.virtual.spawn, room=settings.room
            )
            self.batches = EncodeBatches(
                SimTower(), self.pool, self._contents, self.virtual.spawn, PullMeter()
            )
            self.batches.log = log

    def _dial(self, address: str, max_message_bytes: int = 0, /) -> CallChannel:
        return CallChannel(self.network, self, self.virtual, address)

    def accept(self, endpoint: Endpoint) -> None:
        handlers: dict[str, Any] = {
            "/baton.v1.Encode/Lend": self.Lend,
            "/baton.v1.Node/GetLoad": self._get_load,
        }
        with self.virtual.running():
            serve(self.network, self.virtual, endpoint, handlers[endpoint.method])

    async def _get_load(self, request: node_pb2.GetLoadRequest, context: object) -> node_pb2.Load:
        return self.load()

    def hand_back(self) -> None:
        """Whose images it encodes asks others once it has ended."""

    @property
    def busy(self) -> str:
        batches, contents = self.batches, self._contents
        assert batches is not None and contents is not None
        held = (batches.images, self.pool.leases, len(contents._running))
        return "{} images, {} leases, {} fetches".format(*held) if any(held) else ""

    def check(self) -> None:
        """Every page is in one state; one that is cached is of one image."""
        counts = self.pool.counts()
        pages = [page for stored in self.pool._stored.values() for page in stored.pages]
        if len(set(pages)) != len(pages) or counts.cached != len(pages):
            raise Violation(f"accounting: embeddings at {self.who} lie in {sorted(pages)}: {counts}")

    def check_idle(self) -> None:
        self.check()
        counts = self.pool.counts()
        if counts.free + counts.cached != counts.total:
            raise Violation(f"quiescence: pages of embeddings at {self.who}: {counts}")
