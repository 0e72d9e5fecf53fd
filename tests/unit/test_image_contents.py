"""Room for the contents of images."""

from __future__ import annotations

import asyncio
import gc
import time
from array import array
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from baton.engine.image_spans import ImageSource, ImageSpan
from baton.engine.images import EmbeddingCache
from baton.handoff.messages import AttemptName
from baton.handoff.pull_cost import PullMeter
from baton.rpc.errors import BatonError
from baton.worker.encode.batches import EncodeBatches
from baton.worker.encode.pool import EmbeddingPool
from baton.worker.images.contents import ImageContents
from baton.worker.images.encoder_client import Asker

VALUES = 64
TOWER = SimpleNamespace(patch=2, merge=2, values=VALUES, dtype=torch.float32)
SIZE = 16 * 4 * VALUES
"""Bytes of an image's embeddings."""
SOURCE = ImageSource("a:1", ("b:1",))
ASKER = Asker(AttemptName(1, 1, 0, 0))


class Encoders:
    async def fetch(self, image, source, asker):
        await asyncio.sleep(0.01)
        return torch.zeros(1, image.rows * image.columns, VALUES)


def image(number: int) -> ImageSpan:
    return ImageSpan(0, 4, 4, number.to_bytes(32, "big"))


def contents(images: int) -> ImageContents:
    """With room for so many."""
    spawn = lambda work, name: asyncio.create_task(work)  # noqa: E731
    return ImageContents(TOWER, EmbeddingCache(), None, spawn, Encoders(), images * SIZE)


async def test_who_waits_for_room_holds_none():
    """Two requests know images of each other, and want one more each."""
    here = contents(4)
    first = await here.of([image(0), image(1), image(2)], SOURCE, 5.0, ASKER)
    waiting = [
        asyncio.create_task(
            here.of([image(0), image(1), image(3 + more), image(5 + more)], SOURCE, 5.0, ASKER)
        )
        for more in range(2)
    ]
    await asyncio.sleep(0.05)
    assert not any(task.done() for task in waiting) and here.used == 3 * SIZE
    del first
    gc.collect()
    while waiting:
        done, _ = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
        waiting = [task for task in waiting if task not in done]
        assert [len(task.result()) for task in done] == [4]
        del done
        gc.collect()


async def test_room_is_kept_for_what_encode_nodes_make():
    here = contents(4)
    with pytest.raises(BatonError, match="this node takes"):
        await here.of([image(number) for number in range(5)], SOURCE, 5.0, ASKER)
    assert len(await here.of([image(number) for number in range(4)], SOURCE, 5.0, ASKER)) == 4


async def test_what_is_kept_for_later_makes_room():
    here = contents(3)
    for number in range(6):
        found = await here.of([image(number)], SOURCE, 5.0, ASKER)
        del found
    assert len(await here.of([image(number) for number in range(6, 9)], SOURCE, 5.0, ASKER)) == 3


class Pictures:
    async def fetch(self, address, digest, shape):
        return np.zeros((*shape, 3), np.uint8)


@pytest.mark.parametrize("without", ["nothing", "the frames of errors"])
async def test_an_image_that_cannot_be_kept_holds_no_room(without, monkeypatch):
    """Not even until a garbage collection: the next one waits for this room."""
    if without != "nothing":
        monkeypatch.setattr("baton.worker.encode.batches.without_frames", lambda error: error)
    tower = SimpleNamespace(**vars(TOWER), device=torch.device("cpu"))
    tower.encode = lambda images: [torch.zeros(1, 16, VALUES) for _ in images]
    spawn = lambda work, name: asyncio.create_task(work)  # noqa: E731
    here = ImageContents(tower, EmbeddingCache(0), None, spawn)
    here._pictures = Pictures()
    pool = EmbeddingPool(np.zeros((1, 64), np.uint8), array("Q", [0]), time.monotonic)
    batches = EncodeBatches(tower, pool, here, spawn, PullMeter())
    gc.collect()
    gc.disable()
    try:
        for _ in range(3):
            try:
                await batches.lend(image(1), SOURCE, 5.0, lambda *_: None)
            except BatonError as error:
                assert error.reason == "NO_PAGES"
        await asyncio.sleep(0.05)
        assert bool(here.used) == (without != "nothing")
    finally:
        gc.enable()
        batches.close()
