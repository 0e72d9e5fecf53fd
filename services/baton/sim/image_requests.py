"""What a simulated worker does about images: worker.images on a virtual event loop, and pulls of embeddings,
half a page at a time, with anything in between."""

from __future__ import annotations

import asyncio
import gc
import random
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from baton.engine.image_spans import ImageSpan
from baton.engine.request import EngineRequest
from baton.handoff.pull_cost import PullMeter
from baton.sim.calls import CallChannel
from baton.sim.images import TOWER, SimEncoder, SimTower
from baton.sim.process import ImageSettings
from baton.sim.transport import PAUSE_SECONDS
from baton.sim.virtual_gateway import NotedLog
from baton.sim.world import Violation
from baton.transport import HostPages, TransportError
from baton.transport.base import check_pairs, ignore_time
from baton.v1 import common_pb2
from baton.worker.images.choice import EncodeChoice
from baton.worker.images.contents import ImageContents
from baton.worker.images.encoder_client import EncoderClient
from baton.worker.images.requests import ImageRequests

if TYPE_CHECKING:
    from baton.sim.encode import SimEncode
    from baton.sim.worker import Worker


class SimChoice(EncodeChoice):
    """Times mean nothing here."""

    def __init__(self, rng: random.Random, here: float) -> None:
        """`here`: part of the images that are encoded where they are needed."""
        super().__init__(PullMeter())
        self.local.add(1, 1.0)
        self._rng, self._part = rng, here

    def in_place(self, tokens: int, queued: int, cost: Any) -> bool:
        return self._rng.random() < self._part


class EmbeddingReceiver:
    """An encode node's pool, opened: transport.base.Receiver. Half a page at a time. Shared: out of the
    owner's memory, which outlives it. Asked: of whoever answers at the address now."""

    kind, sees_steps = "sim", False

    def __init__(
        self, node: Worker[Any], pace: float, local: HostPages, address: str, shared: SimEncode | None
    ) -> None:
        """`pace`: seconds, the usual time to copy half a page; `shared`: None: pages are asked for."""
        self._node, self._pace, self._local = node, pace, local
        self._address, self._shared = address, shared
        self._rng = node.world.rng(f"embeddings {node.name}")

    async def pull(self, pairs: Sequence[tuple[int, int]], step: int = 0, copied: Any = ignore_time) -> None:
        node = self._node
        fail_after, node.pull_fails_after = node.pull_fails_after, None
        rows = self._local.rows()
        for number, (source, target, half) in enumerate((s, t, h) for s, t in pairs for h in range(2)):
            await self._pause()
            if fail_after is not None and number >= fail_after:
                raise TransportError("the transport failed")
            pool = self._shared.rows if self._shared is not None else await self._asked()
            check_pairs([(source, target)], len(pool), len(rows))
            size = pool.shape[1] // 2
            rows[target, half * size : (half + 1) * size] = pool[source, half * size : (half + 1) * size]

    async def _asked(self) -> npt.NDArray[np.uint8]:
        host: Any = self._node.network.host(self._address)
        if self._node.network.is_cut(self._node.name, self._address):
            await asyncio.sleep(PAUSE_SECONDS)
            raise TransportError(f"no byte for {PAUSE_SECONDS:g} s")
        if host is None:
            raise TransportError(f"nobody answers at {self._address}")
        found: npt.NDArray[np.uint8] = host.rows
        return found

    async def _pause(self) -> None:
        node, done = self._node, asyncio.get_running_loop().create_future()
        seconds = self._pace * self._rng.uniform(0.1, 2.0)
        node.world.at(seconds, node.copy_thread, lambda: None if done.done() else done.set_result(None))
        await done

    def generations(self, pages: Sequence[int]) -> list[int] | None:
        return None if self._shared is None else [int(self._shared.generations[page]) for page in pages]

    async def close(self) -> None:
        """Nothing is held."""


class SimImages(ImageRequests):
    """The images of a worker that sees."""

    def __init__(self, worker: Worker[Any], settings: ImageSettings) -> None:
        self.encoder = SimEncoder(settings.cached)
        self._worker, tower = worker, SimTower()
        log: Any = NotedLog(worker.world, worker.who)
        choice = SimChoice(worker.world.rng(f"encode at {worker.name}"), settings.here)
        with worker.virtual.running():
            client = EncoderClient(
                self._dial,
                tower,
                TOWER,
                tower.device,
                (),
                worker.recorder,
                choice,
                partial(open_embeddings, worker, settings.pull_pace),
            )
            client.log, client.buffers.keep = log, True  # as on GPUs
            spawn, cache = worker.virtual.spawn, self.encoder.cache
            contents = ImageContents(tower, cache, self._dial, spawn, client, settings.room)
        super().__init__(worker, contents, choice)
        self.log = log

    def _dial(self, address: str, max_message_bytes: int = 0, /) -> Any:
        return CallChannel(self._worker.network, self._worker, self._worker.virtual, address)

    def want(self, request: EngineRequest, images: Sequence[ImageSpan]) -> None:
        self._worker.virtual.spawn(self._answer(request, images), "images")

    @property
    def fetches(self) -> int:
        return len(self.contents._running)

    def check_idle(self) -> None:
        """Nobody needs an image any more: only what is kept for later counts."""
        if self.contents.used > self.encoder.cache.bytes:
            gc.collect()
        if self.contents.used > self.encoder.cache.bytes:
            text = f"{self._worker.who} counts {self.contents.used} bytes of images that nobody has"
            raise Violation(f"quiescence: {text}")


async def open_embeddings(
    node: Worker[Any], pace: float, endpoints: Sequence[common_pb2.Endpoint], local: HostPages, address: str
) -> EmbeddingReceiver:
    """Raises TransportError."""
    await asyncio.sleep(node.world.rng(f"open {node.name}").uniform(0.0, 0.02))
    path = endpoints[0].shm.path
    return EmbeddingReceiver(node, pace, local, address, node.network.segments[path] if path else None)
