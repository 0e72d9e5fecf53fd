"""Pools of two workers without models, one here and one in other processes, published as workers do."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import os
from collections.abc import AsyncIterator, Sequence
from multiprocessing.connection import Connection

import grpc.aio
import torch

from baton.bench.processes import BenchProcess
from baton.kvcache.kv_pool import PoolLayout
from baton.layers.tensor_parallel import Shard
from baton.rpc.address import join_address, loopback, new_incarnation
from baton.rpc.channel import server_options
from baton.transport import PageStore
from baton.transport.grpc import PageSourceServicer
from baton.transport.registry import DEFAULT_KINDS
from baton.v1 import common_pb2, prefill_pb2_grpc
from baton.worker.pool import first_byte, gpu_pool, join_parts, make_pool

EXIT_SECONDS = 10.0
RankCounts = tuple[int, int]
"""Ranks of the owner, of the receiver. Several are on GPUs."""
ONE_EACH: RankCounts = (1, 1)


@dataclasses.dataclass(frozen=True, slots=True)
class Pools:
    """A pool here, and one of the same layout in another process."""

    page_size: int
    pages: PageStore
    endpoints: Sequence[common_pb2.Endpoint]


def own_pool(
    connection: Connection, layout: PoolLayout, pages: int, device: str, gpus: str, shard: Shard
) -> None:
    """Owns a pool and publishes it as a prefill node does, until the connection ends. Receives the parts of
    other ranks, serialized, and sends its endpoints. gpus: as CUDA_VISIBLE_DEVICES names them; empty: none of
    its own."""
    if gpus:
        os.environ["CUDA_VISIBLE_DEVICES"] = gpus
    asyncio.run(_own_pool(connection, layout, pages, torch.device(device), shard))


async def _own_pool(
    connection: Connection, layout: PoolLayout, pages: int, device: torch.device, shard: Shard
) -> None:
    pool, published = make_pool(layout, pages, device, DEFAULT_KINDS, new_incarnation(), shard)
    if shard.size > 1:
        join_parts(published, [common_pb2.CudaIpcPart.FromString(part) for part in connection.recv()])
    server = grpc.aio.server(options=server_options())
    prefill_pb2_grpc.add_PageSourceServicer_to_server(PageSourceServicer(published.pages), server)
    address = join_address(loopback(), server.add_insecure_port(join_address(loopback(), 0)))
    await server.start()
    pool.raw.random_(0, 256)  # memory that nobody wrote need not exist, and a link could compress zeros
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    endpoints = published.endpoints()
    for endpoint in endpoints:
        if endpoint.HasField("grpc"):
            endpoint.grpc.address = address
    connection.send([endpoint.SerializeToString() for endpoint in endpoints])
    try:
        await asyncio.to_thread(connection.recv)
    finally:
        await server.stop(None)
        published.close()


def own_part(connection: Connection, layout: PoolLayout, pages: int, gpus: str, shard: Shard) -> None:
    """Owns what a further rank holds of each page, on the GPU of its number, until the connection ends. Sends
    it, serialized."""
    from baton.transport.cuda_ipc import export_part

    os.environ["CUDA_VISIBLE_DEVICES"] = gpus
    device = torch.device("cuda", shard.rank % torch.cuda.device_count())
    torch.cuda.set_device(device)
    pool = gpu_pool(layout, pages, device, shard)
    pool.raw.random_(0, 256)
    torch.cuda.synchronize(device)
    connection.send(export_part(pool.raw, first_byte(layout, shard)).SerializeToString())
    with contextlib.suppress(EOFError, OSError):
        connection.recv()


@contextlib.asynccontextmanager
async def further_ranks(layout: PoolLayout, pages: int, ranks: int, gpus: str) -> AsyncIterator[list[bytes]]:
    """CudaIpcParts, serialized, of all ranks but the first. Raises BenchError."""
    started: list[BenchProcess] = []
    try:
        for rank in range(1, ranks):
            started.append(BenchProcess(own_part, layout, pages, gpus, Shard(rank, ranks)))
        yield [await process.receive() for process in started]
    finally:
        for process in started:
            await process.stop(EXIT_SECONDS)


@contextlib.asynccontextmanager
async def two_pools(
    layout: PoolLayout, pages: int, device: torch.device, gpus: str, ranks: RankCounts = ONE_EACH
) -> AsyncIterator[Pools]:
    """gpus: of the owner, see own_pool. The receiver's ranks take this process's GPUs in turn. Raises
    TransportError, SegmentError or BenchError."""
    theirs, ours = ranks
    local_shard = Shard(0, ours)
    _, published = make_pool(layout, pages, device, DEFAULT_KINDS, new_incarnation(), local_shard)
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", ",".join(map(str, range(torch.cuda.device_count()))))
    with contextlib.closing(published):
        async with (
            further_ranks(layout, pages, theirs, gpus) as their_parts,
            further_ranks(layout, pages, ours, visible) as our_parts,
        ):
            if our_parts:
                join_parts(published, [common_pb2.CudaIpcPart.FromString(part) for part in our_parts])
            owner = BenchProcess(own_pool, layout, pages, device.type, gpus, Shard(0, theirs))
            try:
                if their_parts:
                    owner.send(their_parts)
                endpoints = [common_pb2.Endpoint.FromString(found) for found in await owner.receive()]
                yield Pools(layout.page_size, published.pages, endpoints)
            finally:
                await owner.stop(EXIT_SECONDS)
