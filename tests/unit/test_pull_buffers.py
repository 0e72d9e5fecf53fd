"""Buffers that embeddings are pulled into: pools stay open until they fail, change, or are idle."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest
import torch

from baton.transport import TransportError
from baton.v1 import common_pb2, encode_pb2
from baton.worker.images import pull_buffers
from baton.worker.images.pull_buffers import PullBuffers

PAGE = 64


class Node:
    """Whose page n is full of n, and how often its pool has been opened and closed."""

    def __init__(self):
        self.opened = self.closed = 0
        self.fails = False

    async def open(self, endpoints, local, address):
        self.opened += 1
        return Receiver(self, local)


class Receiver:
    def __init__(self, node, local):
        self.node, self.rows = node, local.rows()

    async def pull(self, pairs):
        await asyncio.sleep(0.01)
        if self.node.fails:
            raise TransportError("broken")
        for source, target in pairs:
            self.rows[target] = source

    def generations(self, pages):
        return [7 for _ in pages]

    async def close(self):
        self.node.closed += 1


def ready(*pages, path="a"):
    endpoint = common_pb2.Endpoint(shm=common_pb2.ShmEndpoint(path=path))
    return encode_pb2.EmbeddingsReady(endpoints=[endpoint], page_bytes=PAGE, page_ids=pages)


async def pulled(buffers, message, size):
    found, generations = await buffers.pull("node:1", message, size)
    assert generations == [7] * len(message.page_ids)
    return found.numpy().tolist()


@pytest.fixture
async def buffers():
    made = PullBuffers(Node().open, torch.device("cpu"))
    made.node, made.keep = made._open_pool.__self__, True
    yield made
    await made.close()


async def test_a_pool_stays_open_and_what_was_pulled_stays_as_it_was(buffers):
    first, _ = await buffers.pull("node:1", ready(3, 4), 100)
    second = await pulled(buffers, ready(5, 6), 128)
    assert first.numpy().tolist() == [3] * 64 + [4] * 36 and second == [5] * 64 + [6] * 64
    assert (buffers.node.opened, buffers.node.closed) == (1, 0)
    assert await pulled(buffers, ready(1, 2, 3), 130) == [1] * 64 + [2] * 64 + [3] * 2, "a larger buffer"
    assert (buffers.node.opened, buffers.node.closed) == (2, 1)


async def test_images_are_pulled_beside_each_other_within_a_bound(buffers):
    found = await asyncio.gather(*(pulled(buffers, ready(n), 64) for n in range(9)))
    assert found == [[n] * 64 for n in range(9)]
    assert buffers.node.opened == pull_buffers.WIDTH


async def test_a_pool_is_opened_anew_after_a_failure_and_in_another_life(buffers):
    await pulled(buffers, ready(1), 64)
    buffers.node.fails = True
    with pytest.raises(TransportError):
        await pulled(buffers, ready(1), 64)
    buffers.node.fails = False
    await pulled(buffers, ready(1), 64)
    assert (buffers.node.opened, buffers.node.closed) == (2, 1)
    await pulled(buffers, ready(1, path="b"), 64)
    assert (buffers.node.opened, buffers.node.closed) == (3, 2)


async def test_an_idle_pool_is_closed(buffers, monkeypatch):
    monkeypatch.setattr(pull_buffers, "IDLE_SECONDS", 0.05)
    await pulled(buffers, ready(1), 64)
    await asyncio.sleep(0.3)
    assert (buffers.node.opened, buffers.node.closed) == (1, 1)


async def test_a_pool_is_not_closed_under_a_pull_that_began_while_another_was_closed(buffers, monkeypatch):
    async def close(receiver):
        await asyncio.sleep(0.05)
        buffers.node.closed += 1

    monkeypatch.setattr(Receiver, "close", close)
    for address in ("node:1", "node:2"):
        await buffers.pull(address, ready(1), 64)
    monkeypatch.setattr(pull_buffers, "IDLE_SECONDS", 0.0)
    closing = asyncio.ensure_future(buffers._close_idle())
    await asyncio.sleep(0.045)
    found, _ = await buffers.pull("node:2", ready(2), 64)
    assert found.numpy().tolist() == [2] * 64
    await closing


async def test_on_a_cpu_nothing_is_kept():
    node = Node()
    buffers = PullBuffers(node.open, torch.device("cpu"))
    found, _ = await buffers.pull("node:1", ready(2), 64)
    assert np.all(found.numpy() == 2) and (node.opened, node.closed) == (1, 1)
    await buffers.close()
