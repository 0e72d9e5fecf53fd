"""Images of requests: decoded and resized once, and kept for the workers that encode them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack, asynccontextmanager
from hashlib import sha256

from baton.gateway.fair_slots import FairSlots
from baton.gateway.media_fetch import MediaFetcher
from baton.gateway.picture_memory import KeptPicture, PictureMemory, PictureName
from baton.pictures.data_uri import MOST_BYTES
from baton.pictures.decoder import WAIT_SECONDS, Picture, PictureBusy, PictureDecoder
from baton.pictures.settings import PictureError, PictureSettings
from baton.rpc.errors import BatonError, exhausted, failed_precondition, invalid_field

WIDTH = 2
"""Images that are decoded at a time, for all requests and for one."""
ARRIVING = 16
"""Files that are given by address and have not been decoded, at a time."""
MOST_NAMES = 64
"""Names of a picture, by one API key: its files may differ in what nobody sees."""


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
        self._counted = counted
        self.memory = PictureMemory(max_bytes, self._forget)
        self._names: dict[PictureName, bytes] = {}
        """Digests of kept pictures."""
        self._settings: PictureSettings | None = None
        self._decoder: PictureDecoder | None = None
        self._threads = ThreadPoolExecutor(WIDTH, "pictures")
        self._decoding, self._arriving = FairSlots(WIDTH), FairSlots(ARRIVING)

    def find(self, digest: bytes) -> Picture | None:
        kept = self.memory.find(digest)
        return None if kept is None else kept.picture

    def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)
        if self._decoder is not None:
            self._decoder.close()

    # For leases.

    async def name(self, data: bytes, owner: bytes, namespace: str) -> PictureName:
        return PictureName(owner, namespace, await asyncio.to_thread(lambda: sha256(data).digest()))

    @asynccontextmanager
    async def fetched(self, url: str, owner: bytes, field_path: str) -> AsyncIterator[bytes]:
        """The file at an address, which waits for its turn, and is to be decoded before the block ends: until
        then it is counted nowhere else. field_path: of the image, for errors. Raises BatonError."""
        async with _turn(self._arriving, owner):
            try:
                file = await self._media.fetch(url)
            except PictureError as error:
                self._counted("refused")
                raise invalid_field(field_path, str(error), "IMAGE") from None
            yield file

    async def hold(
        self, name: PictureName, data: bytes | None, settings: PictureSettings, field_path: str
    ) -> Picture:
        """A picture that stays until it is released. data: the file; None: it must be kept already.
        field_path: of the image, for errors. Raises BatonError."""
        try:
            picture = self._known(name, settings)
            outcome = "kept"
            if picture is None:
                picture, outcome = await self._decoded(name, data, field_path), "decoded"
            kept = self.memory.hold(picture, name.owner, field_path)
        except BatonError:
            self._counted("refused")
            raise
        self._counted(outcome)
        if settings == self._settings and name not in kept.names:
            of_owner = [each for each in kept.names if each.owner == name.owner]
            if len(of_owner) >= MOST_NAMES:
                kept.names.remove(of_owner[0])
                del self._names[of_owner[0]]
            kept.names.add(name)
            self._names[name] = picture.digest
        return kept.picture

    def release(self, picture: Picture, owner: bytes) -> None:
        self.memory.release(picture.digest, owner)

    def _known(self, name: PictureName, settings: PictureSettings) -> Picture | None:
        if settings != self._settings:  # another model
            for kept in self.memory.all():
                kept.names.clear()
            self._names.clear()
            if self._decoder is not None:
                self._decoder.close()
            self._settings, self._decoder = settings, PictureDecoder(settings, width=WIDTH)
        digest = self._names.get(name)
        return None if digest is None else self.find(digest)

    async def _decoded(self, name: PictureName, data: bytes | None, field_path: str) -> Picture:
        if data is None:
            text = f"{field_path}: the image is kept here no more: send its file again"
            raise failed_precondition(text, "PICTURE_GONE")
        decoder = self._decoder
        assert decoder is not None, "no settings"
        async with _turn(self._decoding, name.owner):
            try:
                loop = asyncio.get_running_loop()
                return await loop.run_in_executor(self._threads, decoder.decode, data)
            except PictureError as error:
                raise invalid_field(field_path, str(error), "IMAGE") from None
            except PictureBusy as error:
                raise exhausted(str(error), "PICTURES_BUSY", 1000) from None

    def _forget(self, kept: KeptPicture) -> None:
        for name in kept.names:
            del self._names[name]


@asynccontextmanager
async def _turn(slots: FairSlots, owner: bytes) -> AsyncIterator[None]:
    """Raises BatonError if it does not come."""
    async with AsyncExitStack() as stack:
        try:
            await stack.enter_async_context(slots.slot(owner, WAIT_SECONDS))
        except TimeoutError:
            text = "too many pictures are being decoded or fetched: send it again later"
            raise exhausted(text, "PICTURES_BUSY", 1000) from None
        yield


class PictureLease:
    """The pictures of one request, until it has ended."""

    def __init__(self, store: PictureStore, owner: bytes, namespace: str) -> None:
        """owner: `ApiKey.owner`."""
        self._store = store
        self._owner, self._namespace = owner, namespace
        self._held: list[Picture] = []
        self._released = False

    async def fetch(self, url: str, settings: PictureSettings, field_path: str) -> tuple[Picture, bytes]:
        """Adds an image that is given by address. Raises BatonError."""
        async with self._store.fetched(url, self._owner, field_path) as file:
            return await self.add(file, settings, field_path)

    async def add(
        self, file: bytes, settings: PictureSettings, field_path: str, *, known: bool = False
    ) -> tuple[Picture, bytes]:
        """The picture, and SHA-256 of its file. known: `file` is that digest, of an image that was sent
        before. Raises BatonError."""
        if known:
            name = PictureName(self._owner, self._namespace, file)
        elif len(file) > MOST_BYTES:
            raise invalid_field(field_path, f"has more than {MOST_BYTES:,} bytes", "IMAGE")
        else:
            name = await self._store.name(file, self._owner, self._namespace)
        picture = await self._store.hold(name, None if known else file, settings, field_path)
        if self._released:  # meanwhile
            self._store.release(picture, self._owner)
        else:
            self._held.append(picture)
        return picture, name.file

    def release(self) -> None:
        """Idempotent."""
        self._released = True
        while self._held:
            self._store.release(self._held.pop(), self._owner)
