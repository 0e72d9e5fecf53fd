"""Contents of images for requests that are computed here. On the event loop."""

from __future__ import annotations

import asyncio
import contextlib
import weakref
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, Protocol

import numpy as np
import torch

from baton.engine.image_spans import ImageContent, ImageSource, ImageSpan
from baton.engine.images import EmbeddingCache
from baton.models.decoder import VisionTower
from baton.rpc.channel import Dial
from baton.rpc.errors import BatonError, deadline_exceeded, exhausted, invalid, without_frames
from baton.worker.images.encoder_client import NOBODY, Asker, EncoderClient
from baton.worker.images.picture_client import PictureClient

ROOM_BYTES = 2 * 2**30
"""Bytes of contents that requests hold, or that are on their way."""


class Spawn(Protocol):
    """Runs a coroutine on the event loop: rpc.tasks.Tasks.spawn."""

    def __call__(self, work: Coroutine[Any, Any, Any], name: str) -> asyncio.Task[Any]: ...


class ImageContents:
    """One fetch of an image is under way at a time, for all requests of a gateway. What requests have been
    given lives as long as one of them holds it."""

    def __init__(
        self,
        tower: VisionTower,
        embeddings: EmbeddingCache,
        dial: Dial,
        spawn: Spawn,
        encoders: EncoderClient | None = None,
        room: int = ROOM_BYTES,
    ) -> None:
        """`tower`: is to encode the images; `embeddings`: of this tower; `encoders`: None: none is asked;
        `room`: bytes."""
        self._embeddings, self._pictures, self._encoders = embeddings, PictureClient(dial), encoders
        self._spawn = spawn
        self._side, self._room = tower.patch * tower.merge, room
        """Pixels of a token's height and width."""
        self._embedding = tower.values * tower.dtype.itemsize
        """Bytes of a token."""
        self._loop = asyncio.get_running_loop()
        self._known: weakref.WeakValueDictionary[bytes, ImageContent] = weakref.WeakValueDictionary()
        self._running: dict[tuple[bytes, ImageSource], asyncio.Task[ImageContent | BatonError]] = {}
        """By digest and source: one gateway may be lost, or keep an image no more, which another has."""
        self.used = 0
        """Bytes of contents."""
        self._turn = asyncio.Lock()
        """Who waits for room waits in order, so that large requests get it, too."""
        self._freed = asyncio.Event()
        self._short = False
        """Somebody waits for room."""

    async def of(
        self, images: Sequence[ImageSpan], source: ImageSource, seconds: float, asker: Asker = NOBODY
    ) -> dict[bytes, ImageContent]:
        """By digest. Raises BatonError."""
        by_digest = {image.digest: image for image in images}
        need = sum(self._bytes(image, source) for image in by_digest.values())
        if need > self._room:
            text = f"the images have {need} bytes of pixels; this node takes {self._room} at a time"
            raise exhausted(text, "TOO_MANY_IMAGES")
        try:
            async with asyncio.timeout(seconds):
                found, tasks = await self._begin(list(by_digest.values()), source, asker)
                for digest, task in tasks.items():
                    found[digest] = self._check(await asyncio.shield(task), by_digest[digest])
        except TimeoutError:
            raise deadline_exceeded(f"images did not come within {seconds:g} s") from None
        return found

    async def _begin(
        self, images: Sequence[ImageSpan], source: ImageSource, asker: Asker
    ) -> tuple[dict[bytes, ImageContent], dict[bytes, asyncio.Task[ImageContent | BatonError]]]:
        """What is here, and what comes. Who waits for room or for a turn holds nothing that takes room."""
        async with self._turn:
            while True:
                found = {
                    image.digest: content for image in images if (content := self._here(image)) is not None
                }
                left = [image for image in images if image.digest not in found]
                new = [each for each in left if (each.digest, source) not in self._running]
                if self.used + sum(self._bytes(image, source) for image in new) <= self._room:
                    break
                found.clear()
                await self._more_room()
            for image in new:
                self.used += self._bytes(image, source)
                fetch = self._spawn(self._fetch(image, source, asker), "image")
                self._running[image.digest, source] = fetch
            return found, {image.digest: self._running[image.digest, source] for image in left}

    async def _more_room(self) -> None:
        """Returns once something has been given up. Meanwhile nothing is kept for later."""
        self._short = True
        self._embeddings.clear()
        self._freed.clear()
        try:
            await self._freed.wait()
        finally:
            self._short = False

    def _here(self, image: ImageSpan) -> ImageContent | None:
        rows = self._embeddings.get(image.digest)
        if rows is not None and rows.shape[1] == image.rows * image.columns:
            return rows
        content = self._known.get(image.digest)
        return None if content is None else self._check(content, image)

    async def _fetch(self, image: ImageSpan, source: ImageSource, asker: Asker) -> ImageContent | BatonError:
        size = self._bytes(image, source)
        try:
            content: ImageContent | None = await self._encoded(image, source, asker)
            if content is None:
                self._queue(image.tokens)
                shape = image.rows * self._side, image.columns * self._side
                try:
                    content = await self._pictures.fetch(source.pictures, image.digest, shape)
                except BaseException:
                    self._queue(-image.tokens)
                    raise
                weakref.finalize(content, self._in_loop, self._queue, -image.tokens)
        except BatonError as error:
            self._free(size)
            return without_frames(error)
        except BaseException:
            self._free(size)
            raise
        else:
            self.used += content.nbytes - size
            weakref.finalize(content, self._in_loop, self._free, content.nbytes)
            self._known[image.digest] = content
            return content
        finally:
            del self._running[image.digest, source]

    async def _encoded(self, image: ImageSpan, source: ImageSource, asker: Asker) -> torch.Tensor | None:
        """By an encode node; None: none could."""
        if self._encoders is None or not source.encoders:
            return None
        rows = await self._encoders.fetch(image, source, asker)
        if rows is not None and not self._short:
            self._embeddings.add(image.digest, rows)
        return rows

    async def close(self) -> None:
        await self._pictures.close()
        if self._encoders is not None:
            await self._encoders.close()

    def _bytes(self, image: ImageSpan, source: ImageSource) -> int:
        """Bytes of an image's pixels, or of what encode nodes may make of them."""
        pixels = 3 * self._side**2
        return image.rows * image.columns * (max(pixels, self._embedding) if source.encoders else pixels)

    def _in_loop(self, function: Callable[[int], None], number: int) -> None:
        """Contents are gone, in any thread."""
        with contextlib.suppress(RuntimeError):  # the loop is closed
            self._loop.call_soon_threadsafe(function, number)

    def _queue(self, tokens: int) -> None:
        """Counts tokens of images that are to be encoded here."""
        if self._encoders is not None:
            self._encoders.choice.queued += tokens

    def _free(self, size: int) -> None:
        self.used -= size
        self._freed.set()

    def _check(self, content: ImageContent | BatonError, image: ImageSpan) -> ImageContent:
        """Raises BatonError for what has not come, or is of another shape than in the prompt."""
        if isinstance(content, BatonError):
            raise content
        shape = (image.rows * self._side, image.columns * self._side)
        if isinstance(content, np.ndarray) and content.shape[:2] != shape:
            text = f"an image has {content.shape[1]} x {content.shape[0]} pixels, and the prompt room for "
            raise invalid("images", text + f"{shape[1]} x {shape[0]}")
        return content
