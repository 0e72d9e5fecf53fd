"""Images of requests: decoded and resized once, and kept for the workers that encode them."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from hashlib import sha256

from baton.gateway.media_fetch import MediaFetcher
from baton.pictures.data_uri import MOST_BYTES
from baton.pictures.decoder import Picture, PictureBusy, PictureDecoder
from baton.pictures.settings import PictureError, PictureSettings
from baton.rpc.errors import BatonError, exhausted, failed_precondition, invalid_field

WIDTH = 2
"""Images that are decoded at a time, for all requests and for one."""
ARRIVING = 16
"""Files that are given by address and have not been decoded, at a time."""
MOST_NAMES = 64
"""Of a picture: its files may differ in what nobody sees."""


@dataclass(frozen=True, slots=True)
class PictureName:
    """An image as who sent it knows it. Nobody is given another's image, whatever digest they send."""

    owner: bytes
    """`ApiKey.owner`."""
    namespace: str
    file: bytes
    """SHA-256 of the file."""


@dataclass(slots=True)
class _Kept:
    picture: Picture
    holders: int = 0
    names: set[PictureName] = field(default_factory=set)


class PictureStore:
    """Within a bound for all requests. An image that no request holds any more stays until there is no room:
    most come again with the next turn of their conversation. Used on one event loop only."""

    def __init__(
        self,
        max_bytes: int,
        media: MediaFetcher,
        counted: Callable[[str], None] = lambda outcome: None,
    ) -> None:
        """max_bytes: of resized pixels. media: fetches images that are given by address. counted: called for
        each image that is wanted, with "decoded", "kept" or "refused"."""
        self._media = media
        self._max_bytes = max_bytes
        self._counted = counted
        self._bytes = 0
        self._kept: OrderedDict[bytes, _Kept] = OrderedDict()
        """By digest, the least recently used first."""
        self._names: dict[PictureName, bytes] = {}
        self._settings: PictureSettings | None = None
        self._decoder: PictureDecoder | None = None
        self._threads = ThreadPoolExecutor(WIDTH, "pictures")
        self.arriving = asyncio.Semaphore(ARRIVING)
        """Held while a file is fetched and until it is decoded: until then it is counted nowhere else."""

    def find(self, digest: bytes) -> Picture | None:
        kept = self._kept.get(digest)
        return None if kept is None else kept.picture

    def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)
        if self._decoder is not None:
            self._decoder.close()

    # For leases.

    async def name(self, data: bytes, owner: bytes, namespace: str) -> PictureName:
        return PictureName(owner, namespace, await asyncio.to_thread(lambda: sha256(data).digest()))

    async def fetch(self, url: str, place: str) -> bytes:
        """The file at an address. place: of the image, for errors. Raises BatonError."""
        try:
            return await self._media.fetch(url)
        except PictureError as error:
            self._counted("refused")
            raise invalid_field(place, str(error), "IMAGE") from None

    async def hold(
        self, name: PictureName, data: bytes | None, settings: PictureSettings, place: str
    ) -> Picture:
        """A picture that stays until it is released. data: the file; None: it must be kept already. place: of
        the image, for errors. Raises BatonError."""
        try:
            kept = self._known(name, settings)
            outcome = "kept"
            if kept is None:
                kept, outcome = await self._decoded(name, data, settings, place), "decoded"
        except BatonError:
            self._counted("refused")
            raise
        self._counted(outcome)
        kept.holders += 1
        self._kept.move_to_end(kept.picture.digest)
        return kept.picture

    def release(self, picture: Picture) -> None:
        self._kept[picture.digest].holders -= 1

    def _known(self, name: PictureName, settings: PictureSettings) -> _Kept | None:
        if settings != self._settings:  # another model
            for kept in self._kept.values():
                kept.names.clear()
            self._names.clear()
            if self._decoder is not None:
                self._decoder.close()
            self._settings, self._decoder = settings, PictureDecoder(settings, width=WIDTH)
        digest = self._names.get(name)
        return None if digest is None else self._kept[digest]

    async def _decoded(
        self, name: PictureName, data: bytes | None, settings: PictureSettings, place: str
    ) -> _Kept:
        if data is None:
            text = f"{place}: the image is kept here no more: send its file again"
            raise failed_precondition(text, "PICTURE_GONE")
        decoder = self._decoder
        assert decoder is not None, "no settings"
        try:
            loop = asyncio.get_running_loop()
            picture = await loop.run_in_executor(self._threads, decoder.decode, data)
        except PictureError as error:
            raise invalid_field(place, str(error), "IMAGE") from None
        except PictureBusy as error:
            raise exhausted(str(error), "PICTURES_BUSY", 1000) from None
        kept = self._kept.get(picture.digest)
        if kept is None:
            self._make_room(picture.pixels.nbytes, place)
            kept = self._kept[picture.digest] = _Kept(picture)
            self._bytes += picture.pixels.nbytes
        if settings == self._settings:
            if len(kept.names) >= MOST_NAMES:
                del self._names[kept.names.pop()]
            kept.names.add(name)
            self._names[name] = picture.digest
        return kept

    def _make_room(self, size: int, place: str) -> None:
        if size > self._max_bytes:
            text = f"has {size} bytes of pixels; --image-memory-mib allows {self._max_bytes >> 20} MiB"
            raise invalid_field(place, text, "IMAGE")
        idle = [digest for digest, kept in self._kept.items() if not kept.holders]
        free = sum(self._kept[digest].picture.pixels.nbytes for digest in idle)
        if self._bytes - free + size > self._max_bytes:
            text = f"{place}: images of running requests fill the {self._max_bytes >> 20} MiB that they may"
            raise exhausted(f"{text} take (--image-memory-mib): send it again later", "PICTURES_FULL", 1000)
        for digest in idle:
            if self._bytes + size <= self._max_bytes:
                return
            dropped = self._kept.pop(digest)
            self._bytes -= dropped.picture.pixels.nbytes
            for name in dropped.names:
                del self._names[name]


class PictureLease:
    """The pictures of one request, until it has ended."""

    def __init__(self, store: PictureStore, owner: bytes, namespace: str) -> None:
        """owner: `ApiKey.owner`."""
        self._store = store
        self._owner, self._namespace = owner, namespace
        self._held: list[Picture] = []
        self._released = False

    async def fetch(self, url: str, settings: PictureSettings, place: str) -> tuple[Picture, bytes]:
        """As `add`, of an image that is given by address. Raises BatonError."""
        async with self._store.arriving:
            return await self.add(await self._store.fetch(url, place), settings, place)

    async def add(
        self, file: bytes, settings: PictureSettings, place: str, *, known: bool = False
    ) -> tuple[Picture, bytes]:
        """The picture, and SHA-256 of its file. known: `file` is that digest, of an image that was sent
        before. Raises BatonError."""
        if known:
            name = PictureName(self._owner, self._namespace, file)
        elif len(file) > MOST_BYTES:
            raise invalid_field(place, f"has more than {MOST_BYTES:,} bytes", "IMAGE")
        else:
            name = await self._store.name(file, self._owner, self._namespace)
        picture = await self._store.hold(name, None if known else file, settings, place)
        if self._released:  # meanwhile
            self._store.release(picture)
        else:
            self._held.append(picture)
        return picture, name.file

    def release(self) -> None:
        """Idempotent."""
        self._released = True
        while self._held:
            self._store.release(self._held.pop())
