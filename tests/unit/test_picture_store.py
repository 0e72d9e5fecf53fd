"""The gateway's pictures: what is kept, and for how long."""

from __future__ import annotations

import asyncio
import io

import pytest
from PIL import Image

from baton.gateway.media_fetch import MediaFetcher
from baton.gateway.pictures import ARRIVING, MOST_NAMES, PictureLease, PictureStore
from baton.pictures.settings import PictureSettings
from baton.rpc.errors import BatonError

SETTINGS = PictureSettings(4, 2, 64, 4096)
PIXELS = 3 * 16 * 16


def file(colour: int, more: bytes = b"") -> bytes:
    made = io.BytesIO()
    Image.new("RGB", (16, 16), (colour, 0, 0)).save(made, "PNG")
    return made.getvalue() + more


@pytest.fixture
def store():
    made = PictureStore(2 * PIXELS, MediaFetcher(()))
    yield made
    made.close()


async def test_files_that_look_alike_do_not_grow_without_limit(store):
    for number in range(2 * MOST_NAMES):
        lease = PictureLease(store, b"owner", "")
        await lease.add(file(1, number.to_bytes(4, "big")), SETTINGS, "image")
        lease.release()
    assert len(store._names) == MOST_NAMES and store._bytes == PIXELS


async def test_what_cannot_fit_drives_nothing_out(store):
    """And is told so for good if it never will."""
    held, idle = PictureLease(store, b"owner", ""), PictureLease(store, b"owner", "")
    await held.add(file(1), SETTINGS, "image")
    picture, digest = await idle.add(file(2), SETTINGS, "image")
    idle.release()
    large = io.BytesIO()
    Image.new("RGB", (60, 60)).save(large, "PNG")
    with pytest.raises(BatonError, match="--image-memory-mib allows") as never:
        await held.add(large.getvalue(), SETTINGS, "image")
    assert never.value.code.name == "INVALID_ARGUMENT"
    assert (await idle.add(digest, SETTINGS, "image", known=True))[0] is picture


async def test_files_that_wait_for_a_decoder_are_few():
    """They are counted nowhere else."""
    fetched = 0

    class Media:
        async def fetch(self, url: str) -> bytes:
            nonlocal fetched
            fetched += 1
            return file(1)

    store = PictureStore(2**20, Media())
    lease, gate = PictureLease(store, b"owner", ""), asyncio.Event()
    hold = store.hold

    async def held(*arguments):
        await gate.wait()
        return await hold(*arguments)

    store.hold = held
    asked = [asyncio.create_task(lease.fetch("https://x.example", SETTINGS, "image")) for _ in range(40)]
    for _ in range(20):
        await asyncio.sleep(0)
    await asyncio.sleep(0.2)
    assert fetched == ARRIVING
    gate.set()
    await asyncio.gather(*asked)
    assert fetched == 40
    store.close()
