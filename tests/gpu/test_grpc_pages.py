"""The `grpc` transport from and into pools on a GPU."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager

import grpc.aio
import pytest
import torch

from baton.transport import HostPages, TransportError
from baton.transport.cuda_pages import CudaPages
from baton.transport.grpc import GrpcReceiver, PageSourceServicer
from baton.v1 import prefill_pb2_grpc

PAGES = 24
MB = 2**20


def pages_on(device: str, page_bytes: int, fill: int | None):
    """A pool, and a function that reads a page's bytes. fill None: random."""
    if fill is None:
        generator = torch.Generator().manual_seed(page_bytes)
        content = torch.randint(0, 256, (PAGES, page_bytes), dtype=torch.uint8, generator=generator)
    else:
        content = torch.full((PAGES, page_bytes), fill, dtype=torch.uint8)
    if device == "cpu":
        return HostPages(memoryview(content.numpy()).cast("B"), page_bytes), content
    content = content.cuda()
    torch.cuda.synchronize()
    return CudaPages(content, PAGES), content


@asynccontextmanager
async def served(pages):
    server = grpc.aio.server()
    prefill_pb2_grpc.add_PageSourceServicer_to_server(PageSourceServicer(pages), server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        yield f"127.0.0.1:{port}"
    finally:
        await server.stop(None)


@pytest.mark.parametrize("page_bytes", [4096, 2 * MB + 512, 9 * MB])
@pytest.mark.parametrize(("source", "target"), [("cuda", "cuda"), ("cuda", "cpu"), ("cpu", "cuda")])
async def test_pulled_bytes_are_the_sources(page_bytes, source, target):
    theirs, content = pages_on(source, page_bytes, None)
    ours, local = pages_on(target, page_bytes, 0xEE)
    async with served(theirs) as address:
        receiver = GrpcReceiver(address, ours, PAGES)
        pairs = [(page, (7 * page + 3) % PAGES) for page in range(0, PAGES, 2)]
        await asyncio.gather(*(receiver.pull(pairs[start::3]) for start in range(3)))
        by_target = {b: a for a, b in pairs}
        for page in range(PAGES):
            if page in by_target:
                assert torch.equal(local[page].cpu(), content[by_target[page]].cpu()), page
            else:
                assert bool((local[page] == 0xEE).all()), page
        await receiver.close()
    theirs.close()
    ours.close()


async def test_a_cancelled_pull_writes_nothing_more():
    theirs, content = pages_on("cuda", 4 * MB, None)
    ours, local = pages_on("cuda", 4 * MB, 0xEE)
    async with served(theirs) as address:
        receiver = GrpcReceiver(address, ours, PAGES)
        everything = [(page, page) for page in range(PAGES)]
        for delay in (0.001, 0.01, 0.02, 0.03):
            task = asyncio.create_task(receiver.pull(everything))
            await asyncio.sleep(delay)
            task.cancel()
            await asyncio.wait([task])
            local.fill_(0xEE)
            torch.cuda.synchronize()
            await asyncio.sleep(0.05)
            assert bool((local == 0xEE).all())
        await receiver.pull([(5, 9)])
        assert torch.equal(local[9], content[5])
        await receiver.close()


async def test_a_closed_pool_fails_the_pull():
    theirs, _ = pages_on("cuda", MB, None)
    ours, _ = pages_on("cuda", MB, 0)
    async with served(theirs) as address:
        receiver = GrpcReceiver(address, ours, PAGES)
        await receiver.pull([(0, 0)])
        theirs.close()
        with pytest.raises(TransportError, match="the pool is closed"):
            await receiver.pull([(0, 0)])
        await receiver.close()
