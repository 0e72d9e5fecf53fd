"""Images of all callers, in batches. On the event loop; the tower computes in a thread."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass

import numpy as np
import torch

from baton.engine.image_spans import ImageSource, ImageSpan
from baton.engine.images import EncodeCounters, batch_of, encode
from baton.handoff.pull_cost import PullMeter
from baton.kvcache.page_allocator import OutOfPages
from baton.models.decoder import VisionTower
from baton.rpc.errors import BatonError, exhausted, internal, without_frames
from baton.rpc.logs import get_logger
from baton.tracing.recorder import EventKind
from baton.v1 import node_pb2
from baton.worker.encode.pool import EmbeddingLease, EmbeddingPool
from baton.worker.images.contents import ImageContents, Spawn
from baton.worker.images.picture_client import Pixels
from baton.worker.load import add_encoding

Note = Callable[[EventKind, int, int], None]
"""Records for somebody who asks: a kind of event, its number and size."""


def _no_room() -> BatonError:
    return exhausted("the embeddings of images that are being copied leave no room for others", "NO_PAGES")


@dataclass(frozen=True, slots=True)
class _Waiting:
    image: ImageSpan
    pixels: Pixels
    notes: list[Note]
    """Notes of all who ask for the image; more may come."""
    done: asyncio.Future[None]
    """Done when the image's embeddings are in the pool."""


class EncodeBatches:
    """An image that several want at a time is encoded once."""

    def __init__(
        self,
        tower: VisionTower,
        pool: EmbeddingPool,
        contents: ImageContents,
        spawn: Spawn,
        meter: PullMeter,
    ) -> None:
        """`meter`: of its batches."""
        self._tower, self._pool, self._contents, self._spawn = tower, pool, contents, spawn
        self._running: dict[tuple[bytes, ImageSource], asyncio.Task[BatonError | None]] = {}
        self._notes: dict[tuple[bytes, ImageSource], list[Note]] = {}
        self._waiting: list[_Waiting] = []
        self._batch: list[_Waiting] = []
        """That is being encoded."""
        self._thread = ThreadPoolExecutor(1, "encode")
        self._encoding = False
        self.log = get_logger()
        self.meter = meter
        self.counters = EncodeCounters(timed=meter.add)

    async def lend(self, image: ImageSpan, source: ImageSource, seconds: float, note: Note) -> EmbeddingLease:
        """Lends an image's embeddings, to be given back to the pool. Raises BatonError."""
        lease = self._pool.lend(image)
        if lease is not None:
            self.counters.hits += 1
            note(EventKind.ENCODE_ENDED, image.tokens, 0)
            return lease
        key = image.digest, source
        self._notes.setdefault(key, []).append(note)
        if key not in self._running:
            self._running[key] = self._spawn(self._make(image, source, seconds), "image")
        error = await asyncio.shield(self._running[key])
        if error is not None:
            try:
                raise error
            finally:
                del error
        lease = self._pool.lend(image)
        if lease is None:
            raise _no_room()
        return lease

    async def _make(self, image: ImageSpan, source: ImageSource, seconds: float) -> BatonError | None:
        try:
            content = (await self._contents.of([image], source, seconds))[image.digest]
            assert not isinstance(content, torch.Tensor)
            done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._waiting.append(_Waiting(image, content, self._notes[image.digest, source], done))
            if not self._encoding:
                self._encoding = True
                self._spawn(self._encode(), "encoding")
            await done
        except BatonError as error:
            return without_frames(error)  # which hold the pixels
        else:
            return None
        finally:
            del self._running[image.digest, source], self._notes[image.digest, source]

    async def _encode(self) -> None:
        """Until nothing waits."""
        loop = asyncio.get_running_loop()
        try:
            while self._waiting:
                batch = self._batch = self._take()
                for each in batch:
                    for note in each.notes:
                        note(EventKind.ENCODE_BEGUN, each.image.tokens, len(batch))
                try:
                    made = await loop.run_in_executor(self._thread, self._compute, batch)
                    for each, embeddings in zip(batch, made, strict=True):
                        await self._store(each, embeddings)
                except Exception as error:
                    self.log.exception("images not encoded")
                    failed = internal(f"the images cannot be encoded: {error}", "ENCODING_FAILED")
                    for each in self._unfinished():
                        each.done.set_exception(failed)
        finally:
            self._encoding, self._batch = False, []

    async def _store(self, each: _Waiting, embeddings: torch.Tensor) -> None:
        try:
            stored = self._pool.take(each.image.digest, embeddings)
        except OutOfPages:
            each.done.set_exception(_no_room())
            return
        loop = asyncio.get_running_loop()
        try:
            await loop.run_in_executor(self._thread, self._pool.write, stored, embeddings)
        except Exception:
            self._pool.drop(stored)
            raise
        self._pool.keep(stored)
        for note in each.notes:
            note(EventKind.ENCODE_ENDED, each.image.tokens, 0)
        each.done.set_result(None)

    def _take(self) -> list[_Waiting]:
        count = batch_of(each.image.tokens for each in self._waiting)
        batch, self._waiting = self._waiting[:count], self._waiting[count:]
        return batch

    def _compute(self, batch: list[_Waiting]) -> list[torch.Tensor]:
        pixels = [torch.from_numpy(np.ascontiguousarray(each.pixels)) for each in batch]
        return encode(self._tower, pixels, self.counters)

    @property
    def images(self) -> int:
        """That somebody asks for, and that are not here."""
        return len(self._running)

    def _unfinished(self) -> list[_Waiting]:
        """Those of the batch that are not stored yet."""
        return [each for each in self._batch if not each.done.done()]

    def add_to(self, load: node_pb2.Load) -> None:
        running = self._unfinished()
        load.waiting, load.running = self.images - len(running), len(running)
        load.leases = self._pool.leases
        load.pages.CopyFrom(node_pb2.PageCounts(**asdict(self._pool.counts())))
        load.queued_tokens = sum(each.image.tokens for each in (*self._waiting, *running))
        add_encoding(load, self.counters, self.meter.cost)

    def close(self) -> None:
        self._thread.shutdown(wait=False, cancel_futures=True)
