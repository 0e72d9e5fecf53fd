"""The other process of `baton bench kv`: owns a pool and publishes it, as a prefill node does.

`python -m baton.cli.kv_owner LAYERS KV_HEADS HEAD_DIM PAGE_SIZE DTYPE PAGES DEVICE`: prints its endpoints (a
NodeInfo in hexadecimal), and ends with its standard input.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
from collections.abc import AsyncIterator

import grpc.aio
import torch

from baton.cli.supervisor import ChildError
from baton.kvcache.pool import KvLayout
from baton.rpc.address import join_address, loopback
from baton.rpc.channel import server_options
from baton.rpc.ids import new_incarnation
from baton.transport.page_source import PageSourceServicer
from baton.transport.registry import DEFAULT_KINDS
from baton.v1 import common_pb2, node_pb2, prefill_pb2_grpc
from baton.worker.published import make_pool

EXIT_SECONDS = 10.0


@contextlib.asynccontextmanager
async def owner(
    layout: KvLayout, pages: int, device: str, gpu: str
) -> AsyncIterator[list[common_pb2.Endpoint]]:
    """Starts the process and yields its endpoints. `gpu`: as CUDA_VISIBLE_DEVICES names it; empty: none of
    its own. Raises ChildError."""
    dtype = str(layout.dtype).removeprefix("torch.")
    sizes = (layout.num_layers, layout.num_kv_heads, layout.head_dim, layout.page_size, dtype, pages, device)
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "baton.cli.kv_owner", *map(str, sizes)),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        env={**os.environ, **({"CUDA_VISIBLE_DEVICES": gpu} if gpu else {})},
    )
    assert process.stdin is not None and process.stdout is not None and process.stderr is not None
    try:
        line = await process.stdout.readline()
        if not line:
            said = (await process.stderr.read()).decode(errors="replace").strip().splitlines()
            raise ChildError(
                f"the process that owns the pages ended: {said[-1] if said else 'without a word'}"
            )
        yield list(node_pb2.NodeInfo.FromString(bytes.fromhex(line.decode().strip())).endpoints)
    finally:
        process.stdin.close()
        try:
            async with asyncio.timeout(EXIT_SECONDS):
                await process.communicate()
        except TimeoutError:
            process.kill()
            await process.wait()


async def _serve(layout: KvLayout, pages: int, device: torch.device) -> None:
    pool, published = make_pool(layout, pages, device, DEFAULT_KINDS, new_incarnation())
    server = grpc.aio.server(options=server_options())
    prefill_pb2_grpc.add_PageSourceServicer_to_server(PageSourceServicer(published.pages), server)
    address = join_address(loopback(), server.add_insecure_port(join_address(loopback(), 0)))
    await server.start()
    # Contents that no link could compress, and that are there: memory that nobody wrote need not be.
    pool.raw.random_(0, 256)
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    info = node_pb2.NodeInfo(endpoints=published.endpoints())
    for endpoint in info.endpoints:
        if endpoint.HasField("grpc"):
            endpoint.grpc.address = address
    print(info.SerializeToString().hex(), flush=True)
    try:
        await asyncio.to_thread(sys.stdin.read)
    finally:
        await server.stop(None)
        published.close()


def main() -> None:
    layers, heads, head_dim, page_size, dtype, pages, device = sys.argv[1:]
    layout = KvLayout(int(layers), int(heads), int(head_dim), int(page_size), getattr(torch, dtype))
    asyncio.run(_serve(layout, int(pages), torch.device(device)))


if __name__ == "__main__":
    main()
