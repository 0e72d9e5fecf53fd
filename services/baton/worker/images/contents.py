"""Contents of images for requests that are computed here. On the event loop."""

from __future__ import annotations

import asyncio
import contextlib
import weakref
from collections.abc import Sequence
from typing import Any

import numpy as np

from baton.engine.image_spans import ImageContent, ImageSource, ImageSpan
from baton.engine.images import ImageEncoder
from baton.engine.request import EngineRequest
from baton.rpc.channel import Dial
from baton.rpc.errors import BatonError, deadline_exceeded, exhausted, invalid
from baton.rpc.logs import get_logger
from baton.worker.core import FetchedImages, NoImages
from baton.worker.images.picture_client import PictureClient, Pixels
from baton.worker.shell import WorkerShell

_log = get_logger()

ROOM_BYTES = 2 * 2**30
"""Of pixels that requests hold, or that are on their way."""


class ImageContents:
    """One fetch of an image is under way at a time, for all requests of a gateway. What requests have been
    given lives as long as one of them holds it."""

    def __init__(
        self,
        node: WorkerShell[Any],
        encoder: ImageEncoder,
        dial: Dial,
        room: int = ROOM_BYTES,
    ) -> None:
        """`encoder`: the one that is to encode them; `room`: bytes."""
        self._node, self._embeddings, self._client = node, encoder.cache, PictureClient(dial)
        self._side, self._room = encoder.tower.patch * encoder.tower.merge, room
        """Pixels of a token's height and width."""
        self._loop = asyncio.get_running_loop()
        self._known: weakref.WeakValueDictionary[bytes, Pixels] = weakref.WeakValueDictionary()
        self._running: dict[tuple[bytes, str], asyncio.Task[Pixels | BatonError]] = {}
        """By digest and address: one gateway may be lost, or keep an image no more, which another has."""
        self.used = 0
        """Bytes of pixels."""
        self._turn = asyncio.Lock()
        """Who waits for room waits in order, so that large requests get it, too."""
        self._freed = asyncio.Event()

    def want(self, request: EngineRequest, images: Sequence[ImageSpan]) -> None:
        """See worker.core.CoreShell.want_images."""
        self._node.spawn(self._answer(request, images), "images")

    async def _answer(self, request: EngineRequest, images: Sequence[ImageSpan]) -> None:
        outcome: FetchedImages
        assert request.image_source is not None
        try:
            left = request.deadline - self._node.clock()
            outcome = await self.of(images, request.image_source, left)
        except BatonError as error:
            outcome = NoImages(error.code.name, error.reason, error.message)
        except Exception as error:
            _log.exception("images not fetched")
            outcome = NoImages("INTERNAL", "IMAGES_FAILED", f"{type(error).__name__}: {error}")
        self._node.steps.call(lambda core, now: core.images_fetched(request, outcome))

    async def of(
        self, images: Sequence[ImageSpan], source: ImageSource, seconds: float
    ) -> dict[bytes, ImageContent]:
        """By digest. Raises BatonError."""
        wanted = {image.digest: image for image in images}
        found: dict[bytes, ImageContent] = {}
        for digest, image in wanted.items():
            rows = self._embeddings.get(digest)
            if rows is not None and rows.shape[1] == image.rows * image.columns:
                found[digest] = rows
        missing = [image for digest, image in wanted.items() if digest not in found]
        try:
            async with asyncio.timeout(seconds):
                tasks = await self._fetches(missing, source, found)
                for digest, task in tasks.items():
                    found[digest] = self._check(await asyncio.shield(task), wanted[digest])
        except TimeoutError:
            raise deadline_exceeded(f"images did not come within {seconds:g} s") from None
        return found

    async def _fetches(
        self, images: Sequence[ImageSpan], source: ImageSource, found: dict[bytes, ImageContent]
    ) -> dict[bytes, asyncio.Task[Pixels | BatonError]]:
        """Adds what is here to `found`; returns what comes."""
        async with self._turn:
            while True:
                for image in images:
                    if (pixels := self._known.get(image.digest)) is not None:
                        found[image.digest] = self._check(pixels, image)
                left = [image for image in images if image.digest not in found]
                new = [each for each in left if (each.digest, source.pictures) not in self._running]
                need = sum(self._bytes(image) for image in new)
                if need > self._room:
                    text = f"the images have {need} bytes of pixels; this node takes {self._room} at a time"
                    raise exhausted(text, "TOO_MANY_IMAGES")
                if self.used + need <= self._room:
                    break
                self._freed.clear()
                await self._freed.wait()
            for image in new:
                self.used += self._bytes(image)
                fetch = self._node.spawn(self._fetch(image, source.pictures), "image")
                self._running[image.digest, source.pictures] = fetch
            return {image.digest: self._running[image.digest, source.pictures] for image in left}

    async def _fetch(self, image: ImageSpan, address: str) -> Pixels | BatonError:
        side, size = self._side, self._bytes(image)
        try:
            pixels = await self._client.fetch(
                address, image.digest, (image.rows * side, image.columns * side)
            )
        except BatonError as error:
            self._free(size)
            return error
        except BaseException:
            self._free(size)
            raise
        else:
            weakref.finalize(pixels, self._dropped, size)
            self._known[image.digest] = pixels
            return pixels
        finally:
            del self._running[image.digest, address]

    async def close(self) -> None:
        await self._client.close()

    def _bytes(self, image: ImageSpan) -> int:
        return 3 * image.rows * image.columns * self._side**2

    def _dropped(self, size: int) -> None:
        """Pixels are gone, in any thread."""
        with contextlib.suppress(RuntimeError):  # the loop is closed
            self._loop.call_soon_threadsafe(self._free, size)

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
