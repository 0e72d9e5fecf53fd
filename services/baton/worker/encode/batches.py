"""Images of all callers, in batches. On the event loop; the tower computes in a thread."""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import torch

from baton.engine.image_spans import ImageSource, ImageSpan
from baton.engine.images import EmbeddingCache
from baton.models.decoder import VisionTower
from baton.rpc.errors import BatonError, internal
from baton.rpc.logs import get_logger
from baton.worker.images.contents import ImageContents, Spawn
from baton.worker.images.picture_client import Pixels

BATCH_TOKENS = 8192
"""Of the images of a batch, but that one image is always taken."""

_log = get_logger()


class EncodeBatches:
    """An image that several want at a time is encoded once."""

    def __init__(
        self, tower: VisionTower, cache: EmbeddingCache, contents: ImageContents, spawn: Spawn
    ) -> None:
        self._tower, self._cache, self._contents, self._spawn = tower, cache, contents, spawn
        self._running: dict[tuple[bytes, ImageSource], asyncio.Task[torch.Tensor | BatonError]] = {}
        self._waiting: list[tuple[ImageSpan, Pixels, asyncio.Future[torch.Tensor]]] = []
        self._thread = ThreadPoolExecutor(1, "encode")
        self._encoding = False
        self.images, self.batches = 0, 0
        """Encoded so far."""

    async def embeddings(self, image: ImageSpan, source: ImageSource, seconds: float) -> torch.Tensor:
        """[parts, tokens, values], on the host. Raises BatonError."""
        rows = self._cache.get(image.digest)
        if rows is not None and rows.shape[1] == image.rows * image.columns:
            return rows
        key = image.digest, source
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
            self._waiting.append((image, content, done))
            if not self._encoding:
                self._encoding = True
                self._spawn(self._encode(), "encoding")
            return await done
        except BatonError as error:
            return error
        finally:
            del self._running[image.digest, source]

    async def _encode(self) -> None:
        """Until nothing waits."""
        loop = asyncio.get_running_loop()
        try:
            while self._waiting:
                batch = self._take()
                pixels = [each for _, each, _ in batch]
                try:
                    made = await loop.run_in_executor(self._thread, self._compute, pixels)
                except Exception as error:
                    _log.exception("images not encoded")
                    failed = internal(f"the images cannot be encoded: {error}", "ENCODING_FAILED")
                    for _, _, done in batch:
                        done.set_exception(failed)
                    continue
                for (image, _, done), rows in zip(batch, made, strict=True):
                    self._cache.add(image.digest, rows)
                    done.set_result(rows)
        finally:
            self._encoding = False

    def _take(self) -> list[tuple[ImageSpan, Pixels, asyncio.Future[torch.Tensor]]]:
        count, tokens = 0, 0
        for image, _, _ in self._waiting:
            tokens += image.rows * image.columns
            if count and tokens > BATCH_TOKENS:
                break
            count += 1
        batch, self._waiting = self._waiting[:count], self._waiting[count:]
        return batch

    def _compute(self, pixels: list[Pixels]) -> list[torch.Tensor]:
        self.images += len(pixels)
        self.batches += 1
        encoded = self._tower.encode([torch.from_numpy(np.ascontiguousarray(each)) for each in pixels])
        return [rows.contiguous().cpu() for rows in encoded]

    @property
    def waiting(self) -> int:
        return len(self._running)

    def close(self) -> None:
        self._thread.shutdown(wait=False, cancel_futures=True)
