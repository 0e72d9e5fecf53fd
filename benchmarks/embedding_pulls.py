"""What it takes to pull an image's embeddings out of another process's pool, and page faults meanwhile.

    python benchmarks/embedding_pulls.py [--device cuda]

Embeddings of an image of 1,024 tokens (Qwen3-VL-8B: 33.6 MB in pages of 2 MiB), --rounds times by each
transport: with memory and a mapping of their own for each image (`fresh`, as on CPUs), and in buffers that
stay (`kept`, as on GPUs: worker.images.pull_buffers). With --device cuda copies to and from it count, too.
"""

from __future__ import annotations

import argparse
import asyncio
import multiprocessing
import resource
import statistics
import time
from collections.abc import Awaitable, Callable
from functools import partial
from multiprocessing.connection import Connection

import grpc.aio
import numpy as np
import torch

from baton.engine.image_spans import ImageSpan
from baton.rpc.channel import open_channel, server_options
from baton.transport import HostPages, open_receiver
from baton.transport.grpc import PageSourceServicer
from baton.v1 import encode_pb2, prefill_pb2_grpc
from baton.worker.encode.pool import EmbeddingPool, pin
from baton.worker.images.encoder_client import _open_pool
from baton.worker.images.pull_buffers import PullBuffers
from baton.worker.pool import byte_pool

TOKENS, PARTS, HIDDEN = 1024, 4, 4096
PAGE = 16 * PARTS * HIDDEN * 2
SIZE = TOKENS * PARTS * HIDDEN * 2


def owner(kind: str, device: str, told: Connection) -> None:
    """An encode node's pool with one image in it."""
    asyncio.run(_own(kind, torch.device(device), told))


async def _own(kind: str, device: torch.device, told: Connection) -> None:
    rows, published = byte_pool(64, PAGE, (kind,), 1, "--pages")
    made = torch.randn(PARTS, TOKENS, HIDDEN, device=device).to(torch.bfloat16)
    unpin = pin(rows, device) if device.type == "cuda" else lambda: None
    pool = EmbeddingPool(rows, published.generations, time.monotonic)
    seconds = []
    for number in range(8):
        began = time.perf_counter()
        stored = pool.take(bytes([number] * 32), made)
        pool.write(stored, made)
        pool.keep(stored)
        seconds.append(time.perf_counter() - began)
    lease = pool.lend(ImageSpan(0, 32, 32, stored.digest))
    assert lease is not None
    server = grpc.aio.server(options=server_options())
    prefill_pb2_grpc.add_PageSourceServicer_to_server(PageSourceServicer(published.pages), server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    ready = encode_pb2.EmbeddingsReady(
        endpoints=published.endpoints(),
        page_bytes=PAGE,
        page_ids=lease.stored.pages,
        generations=lease.generations,
    )
    told.send((ready.SerializeToString(), port, statistics.median(seconds), made.float().sum().item()))
    while not told.poll():  # noqa: ASYNC110
        await asyncio.sleep(0.05)
    unpin()
    published.close()


async def fresh(
    kind: str, device: torch.device, address: str, ready: encode_pb2.EmbeddingsReady
) -> torch.Tensor:
    pages = list(ready.page_ids)
    memory = torch.empty(len(pages) * PAGE, dtype=torch.uint8)
    local = HostPages(memory.numpy().data, PAGE)
    receiver = (await open_receiver(ready.endpoints, local, (kind,), address)).receiver
    try:
        await receiver.pull([(page, number) for number, page in enumerate(pages)])
        receiver.generations(pages)
    finally:
        await receiver.close()
    return memory[:SIZE].to(device)


async def measure(kind: str, device: torch.device, rounds: int) -> None:
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe()
    child = context.Process(target=owner, args=(kind, str(device), there))
    child.start()
    message, port, write, total = here.recv()
    ready, address = encode_pb2.EmbeddingsReady.FromString(message), f"127.0.0.1:{port}"
    # On a CPU the pull alone is measured: nothing copies to a device without memory.
    target = device if device.type == "cuda" else torch.device("meta")
    buffers = PullBuffers(partial(_open_pool, (kind,), open_channel), target)

    async def kept() -> torch.Tensor:
        found = (await buffers.pull(address, ready, SIZE))[0]
        return found if device.type == "cuda" else buffers._free[0].memory[:SIZE]

    ways: dict[str, Callable[[], Awaitable[torch.Tensor]]] = {
        "fresh": partial(fresh, kind, device, address, ready),
        "kept": kept,
    }
    print(f"{kind}: into the pool {1e3 * write:.1f} ms")
    for name, way in ways.items():
        seconds, faults = [], []
        for _ in range(rounds):
            before, began = resource.getrusage(resource.RUSAGE_SELF).ru_minflt, time.perf_counter()
            rows = await way()
            seconds.append(time.perf_counter() - began)
            faults.append(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
            assert abs(rows.view(torch.bfloat16).float().sum().item() - total) < 1 + 1e-3 * abs(total)
            del rows
        middle = f"{1e3 * statistics.median(seconds):.1f} ms, {int(np.median(faults)):,} page faults"
        print(f"{kind}, {name}: {middle} (first {1e3 * seconds[0]:.1f} ms)")
    await buffers.close()
    here.send(None)
    child.join()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--rounds", type=int, default=20)
    options = parser.parse_args()
    for kind in ("shm", "grpc"):
        asyncio.run(measure(kind, torch.device(options.device), options.rounds))


if __name__ == "__main__":
    main()
