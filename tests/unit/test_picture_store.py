"""The gateway's pictures: what is kept, and for how long."""

from __future__ import annotations

import asyncio
import io
import threading

import pytest
from PIL import Image

from baton.gateway.media_fetch import MediaFetcher
from baton.gateway.pictures import ARRIVING, MOST_NAMES, WIDTH, PictureLease, PictureStore
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
    assert len(store._names) == MOST_NAMES and store.memory._bytes == PIXELS


async def test_what_cannot_fit_drives_nothing_out(store):
    """And is told so for good if it never will."""
    held, idle = PictureLease(store, b"", ""), PictureLease(store, b"", "")
    await held.add(file(1), SETTINGS, "image")
    picture, digest = await idle.add(file(2), SETTINGS, "image")
    idle.release()
    large = io.BytesIO()
    Image.new("RGB", (60, 60)).save(large, "PNG")
    with pytest.raises(BatonError, match="--image-memory-mib allows") as never:
        await held.add(large.getvalue(), SETTINGS, "image")
    assert never.value.code.name == "INVALID_ARGUMENT"
    assert (await idle.add(digest, SETTINGS, "image", known=True))[0] is picture


async def test_a_key_that_sends_much_refuses_and_forgets_nothing_of_others():
    """Neither while its requests run, nor by what it leaves."""
    store = PictureStore(10 * PIXELS, MediaFetcher(()))
    other, many = PictureLease(store, b"other", ""), PictureLease(store, b"many", "")
    _, digest = await other.add(file(200), SETTINGS, "image")
    other.release()
    for colour in range(30):  # what ended requests leave
        lease = PictureLease(store, b"many", "")
        await lease.add(file(colour), SETTINGS, "image")
        lease.release()
    await PictureLease(store, b"other", "").add(digest, SETTINGS, "image", known=True)
    held = 0
    with pytest.raises(BatonError, match="this API key's running requests fill its share") as caught:
        for colour in range(30):
            await many.add(file(colour), SETTINGS, "image")
            held += 1
    assert (caught.value.code.name, caught.value.reason, held) == ("RESOURCE_EXHAUSTED", "PICTURES_FULL", 7)
    await PictureLease(store, b"third", "").add(file(100), SETTINGS, "image")
    store.close()


async def test_where_there_are_no_keys_one_may_take_all(store):
    lease = PictureLease(store, b"", "")
    await lease.add(file(1), SETTINGS, "image")
    await lease.add(file(2), SETTINGS, "image")
    with pytest.raises(BatonError, match="images of running requests fill"):
        await lease.add(file(3), SETTINGS, "image")


async def test_names_of_one_key_do_not_displace_those_of_another(store, monkeypatch):
    monkeypatch.setattr("baton.gateway.pictures.MOST_NAMES", 4)
    other = PictureLease(store, b"other", "")
    _, digest = await other.add(file(1), SETTINGS, "image")
    for number in range(64):
        await PictureLease(store, b"many", "").add(file(1, number.to_bytes(4, "big")), SETTINGS, "image")
    assert await other.add(digest, SETTINGS, "image", known=True)


async def test_decoders_take_keys_by_turns(store, monkeypatch):
    """One that has asked for much keeps nobody waiting for more than what is being decoded."""
    begun, done, gate = [], [], threading.Event()

    async def add(owner, colour):
        await PictureLease(store, owner, "").add(file(colour), SETTINGS, "image")
        done.append(owner)

    store.memory.max_bytes = 2**20
    await add(b"first", 200)
    decode = store._decoder.decode
    monkeypatch.setattr(
        store._decoder, "decode", lambda data: begun.append(data) or (gate.wait(60) and decode(data))
    )
    many = [asyncio.create_task(add(b"many", colour)) for colour in range(40)]
    other = asyncio.create_task(add(b"other", 100))
    waiting = store._decoding._waiting
    while len(waiting.get(b"many", ())) < 40 - WIDTH or b"other" not in waiting:  # noqa: ASYNC110
        await asyncio.sleep(0.01)
    gate.set()
    await other
    assert begun.index(file(100)) <= WIDTH + 1
    many[-1].cancel()  # who waits may leave
    await asyncio.gather(*many, return_exceptions=True)
    assert done.count(b"many") == 39
    await add(b"other", 101)


async def test_who_waits_for_a_decoder_too_long_is_refused(store, monkeypatch):
    monkeypatch.setattr("baton.gateway.pictures.WAIT_SECONDS", 0.05)
    gate = threading.Event()
    await PictureLease(store, b"", "").add(file(0), SETTINGS, "image")
    monkeypatch.setattr(store._decoder, "decode", lambda data: gate.wait(10) and None)
    stuck = [
        asyncio.create_task(PictureLease(store, b"a", "").add(file(1), SETTINGS, "image"))
        for _ in range(WIDTH)
    ]
    await asyncio.sleep(0.02)
    with pytest.raises(BatonError, match="too many pictures") as caught:
        await PictureLease(store, b"b", "").add(file(2), SETTINGS, "image")
    assert (caught.value.code.name, caught.value.reason) == ("RESOURCE_EXHAUSTED", "PICTURES_BUSY")
    gate.set()
    await asyncio.gather(*stuck, return_exceptions=True)


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
