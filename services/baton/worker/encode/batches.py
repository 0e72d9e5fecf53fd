"""Images of all callers, in batches. On the event loop; the tower computes in a thread."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
import torch

from baton.engine.image_spans import ImageSource, ImageSpan
from baton.engine.images import EmbeddingCache, EncodeCounters, encode
from baton.models.decoder import VisionTower
from baton.rpc.errors import BatonError, internal
from baton.rpc.logs import get_logger
from baton.tracing.recorder import EventKind
from baton.v1 import node_pb2
from baton.worker.images.contents import ImageContents, Spawn
from baton.worker.images.picture_client import Pixels
from baton.worker.load import add_encoding

BATCH_TOKENS = 8192
"""Of the images of a batch, but that one image is always taken."""

_log = get_logger()

Note = Callable[[EventKind, int, int], None]
"""Records for somebody who asks: a kind of event, its number and size."""


@dataclass(frozen=True, slots=True)
class _Waiting:
    image: ImageSpan
    pixels: Pixels
    notes: list[Note]
    """Of all who ask for the image; more may come."""
    done: asyncio.Future[torch.Tensor]


class EncodeBatches:
    """An image that several want at a time is encoded once."""

    def __init__(
        self, tower: VisionTower, cache: EmbeddingCache, contents: ImageContents, spawn: Spawn
    ) -> None:
        self._tower, self._cache, self._contents, self._spawn = tower, cache, contents, spawn
        self._running: dict[tuple[bytes, ImageSource], asyncio.Task[torch.Tensor | BatonError]] = {}
        self._notes: dict[tuple[bytes, ImageSource], list[Note]] = {}
        self._waiting: list[_Waiting] = []
        self._batch: list[_Waiting] = []
        """That is being encoded."""
        self._thread = ThreadPoolExecutor(1, "encode")
        self._encoding = False
        self.counters = EncodeCounters()

    async def embeddings(
        self, image: ImageSpan, source: ImageSource, seconds: float, note: Note
    ) -> torch.Tensor:
        """[parts, tokens, values], on the host. Raises BatonError."""
        rows = self._cache.get(image.digest)
        if rows is not None and rows.shape[1] == image.tokens:
            self.counters.hits += 1
            note(EventKind.ENCODE_ENDED, image.tokens, 0)
            return rows
        key = image.digest, source
        self._notes.setdefault(key, []).append(note)
        if key not in self._running:
            self._running[key] = self._spawn(self._make(image, source, seconds), "image")
        found = await asyncio.shield(self._running[key])
        if isinstance(found, BatonError):
            raise found
        return found

    async def _make(self, image: ImageSpan, source: ImageSource, seconds: float) -> torch.Tensor | BatonError:
        try:
            content = (await self._contents.of([image], source, seconds))[image.digest]
            if isinstance(content, torch.Tensor):
                return content
            done: asyncio.Future[torch.Tensor] = asyncio.get_running_loop().create_future()
            self._waiting.append(_Waiting(image, content, self._notes[image.digest, source], done))
            if not self._encoding:
                self._encoding = True
                self._spawn(self._encode(), "encoding")
            return await done
        except BatonError as error:
            return error
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
                except Exception as error:
                    _log.exception("images not encoded")
                    failed = internal(f"the images cannot be encoded: {error}", "ENCODING_FAILED")
                    for each in batch:
                        each.done.set_exception(failed)
                    continue
                for each, rows in zip(batch, made, strict=True):
                    self._cache.add(each.image.digest, rows)
                    for note in each.notes:
                        note(EventKind.ENCODE_ENDED, each.image.tokens, 0)
                    each.done.set_result(rows)
        finally:
            self._encoding, self._batch = False, []

    def _take(self) -> list[_Waiting]:
        count, tokens = 0, 0
        for each in self._waiting:
            tokens += each.image.tokens
            if count and tokens > BATCH_TOKENS:
                break
            count += 1
        batch, self._waiting = self._waiting[:count], self._waiting[count:]
        return batch

    def _compute(self, batch: list[_Waiting]) -> list[torch.Tensor]:
        pixels = [torch.from_numpy(np.ascontiguousarray(each.pixels)) for each in batch]
        return [rows.cpu() for rows in encode(self._tower, pixels, self.counters)]

    @property
    def images(self) -> int:
        """That somebody asks for, and that are not here."""
        return len(self._running)

    def add_to(self, load: node_pb2.Load) -> None:
        load.waiting, load.running = self.images - len(self._batch), len(self._batch)
        load.queued_tokens = sum(each.image.tokens for each in (*self._waiting, *self._batch))
        add_encoding(load, self.counters)

    def close(self) -> None:
        self._thread.shutdown(wait=False, cancel_futures=True)
