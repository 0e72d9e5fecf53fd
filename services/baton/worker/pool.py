"""A worker's KV pool in memory that peers can read, and its endpoints."""

from __future__ import annotations

from array import array
from collections.abc import MutableSequence, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import torch

from baton.kvcache.kv_pool import PagePool, PoolLayout
from baton.layers.tensor_parallel import ONE_RANK, Shard
from baton.rpc.logs import get_logger
from baton.transport import HostPages, PageStore, Segment, SegmentError, TransportError, offered
from baton.v1 import common_pb2
from baton.worker.memory import check_pool
from baton.worker.model import own_part

if TYPE_CHECKING:
    from baton.transport.cuda_pages import CudaPages, PagePart
    from baton.transport.nixl import NixlOwner

_log = get_logger()


@dataclass(slots=True)
class PublishedPool:
    """`close` frees the memory that others have not mapped; the pool must not be used afterwards."""

    pages: PageStore
    generations: MutableSequence[int]
    """Generations of the pages; in shared memory if peers on this host can read it."""
    segment: Segment | None
    """Holds the generations, and on a CPU the pages."""
    cuda_ipc: common_pb2.CudaIpcEndpoint | None
    kinds: tuple[str, ...]
    nixl: NixlOwner | None = None

    def endpoints(self) -> list[common_pb2.Endpoint]:
        """Best first."""
        shared = self.segment if isinstance(self.pages, HostPages) else None
        nixl = self.nixl.endpoint if self.nixl is not None else None
        return offered(self.pages, shared, self.cuda_ipc, self.kinds, nixl=nixl)

    def close(self) -> None:
        if self.nixl is not None:
            self.nixl.close()
        self.pages.close()
        if self.segment is not None:
            self.segment.close()


def make_pool(
    layout: PoolLayout,
    num_pages: int,
    device: torch.device,
    kinds: tuple[str, ...],
    incarnation: int,
    shard: Shard = ONE_RANK,
) -> tuple[PagePool, PublishedPool]:
    """The pool of this host, in shared memory on a CPU if `shm` is one of the kinds or several ranks share
    it; on a GPU rank 0's, which shows whole pages after `join_parts`. `layout`: of all heads. Raises
    SegmentError."""
    if device.type == "cpu":
        return _host_pool(layout, num_pages, kinds, incarnation, shard)
    from baton.transport.cuda_pages import CudaPages

    pool = gpu_pool(layout, num_pages, device, shard)
    pages = CudaPages(pool.raw, num_pages)
    segment = _generations(num_pages, incarnation) if "cuda_ipc" in kinds else None
    published = PublishedPool(
        pages=pages,
        generations=_where(segment, num_pages),
        segment=segment,
        cuda_ipc=_export(pages, segment) if "cuda_ipc" in kinds and shard.size == 1 else None,
        kinds=kinds,
        nixl=_register(pages) if "nixl" in kinds else None,
    )
    return pool, published


def byte_pool(
    num_pages: int, page_bytes: int, kinds: tuple[str, ...], incarnation: int, flag: str
) -> tuple[npt.NDArray[np.uint8], PublishedPool]:
    """A pool of this host's that has no layout, as [pages, page_bytes]: in shared memory if `shm` is one of
    the kinds. Where that has no room its pages are offered over `grpc` alone. `flag`: names its size, for
    errors. Raises SegmentError if no kind is left."""
    segment: Segment | None = None
    if "shm" in kinds:
        try:
            segment = Segment.create(num_pages, page_bytes, incarnation, flag=flag)
        except SegmentError as error:
            if "grpc" not in kinds:
                raise
            _log.warning("pages travel over grpc, not through shared memory", error=str(error))
    elif "grpc" not in kinds:
        raise SegmentError("--transports must name shm or grpc: these pages travel by no other")
    memory = segment.pages if segment is not None else np.empty(num_pages * page_bytes, np.uint8).data
    pages = HostPages(memory, page_bytes)
    return pages.rows(), PublishedPool(pages, _where(segment, num_pages), segment, None, kinds)


def gpu_pool(layout: PoolLayout, num_pages: int, device: torch.device, shard: Shard) -> PagePool:
    """A rank's. `layout`: of all heads."""
    layout, heads = own_part(layout, shard, device)
    return PagePool(layout, num_pages, device, spare=1, heads=heads)


def first_byte(layout: PoolLayout, shard: Shard) -> int:
    """Where a rank's part of a page begins. `layout`: of all heads."""
    head = layout.page_bytes // layout.num_kv_heads
    return shard.kv_heads(layout.num_kv_heads)[0] * head


def join_parts(published: PublishedPool, others: Sequence[common_pb2.CudaIpcPart]) -> None:
    """Rank 0 maps what the other ranks hold of each page on their GPUs, and shows whole pages from now on.
    Raises TransportError."""
    from baton.transport import cuda_runtime
    from baton.transport.cuda_ipc import export_part, local_part
    from baton.transport.cuda_pages import CudaPages, PagePart

    pages = published.pages
    assert isinstance(pages, CudaPages)
    theirs = [local_part(part, pages.num_pages, pages.device) for part in others]
    parts = [PagePart(0, pages.pool), *theirs]
    cuda_runtime.use(pages.device)
    pages.close()
    published.pages = whole = CudaPages(pages.pool, pages.num_pages, parts)
    if "cuda_ipc" in published.kinds:
        exported = export_part(pages.pool, 0)
        published.cuda_ipc = _export(whole, published.segment, [exported, *others])


def page_parts(pool: PagePool, published: PublishedPool) -> Sequence[PagePart]:
    """What makes up whole pages: on GPUs the pools of all ranks."""
    from baton.transport.cuda_pages import CudaPages, PagePart

    pages = published.pages
    return pages.parts if isinstance(pages, CudaPages) else (PagePart(0, pool.raw),)


def _host_pool(
    layout: PoolLayout, num_pages: int, kinds: tuple[str, ...], incarnation: int, shard: Shard
) -> tuple[PagePool, PublishedPool]:
    shared = "shm" in kinds or shard.size > 1
    layout, heads = own_part(layout, shard, torch.device("cpu"))
    check_pool(num_pages * layout.page_bytes)
    segment = Segment.create(num_pages, layout.page_bytes, incarnation) if shared else None
    storage = segment.pages if segment is not None else None
    pool = PagePool(layout, num_pages, storage=storage, heads=heads)
    raw: Any = pool.raw.numpy()
    memory = segment.pages if segment is not None else memoryview(raw).cast("B")
    pages = HostPages(memory, layout.page_bytes)
    published = PublishedPool(
        pages=pages,
        generations=_where(segment, num_pages),
        segment=segment,
        cuda_ipc=None,
        kinds=kinds,
        nixl=_register(pages) if "nixl" in kinds else None,
    )
    return pool, published


def _where(segment: Segment | None, num_pages: int) -> Any:
    return array("Q", bytes(8 * num_pages)) if segment is None else segment.generations


def _generations(num_pages: int, incarnation: int) -> Segment | None:
    """Without it hand-offs still work, but wait for the answer to `release`."""
    try:
        return Segment.create(num_pages, 0, incarnation)
    except SegmentError as error:
        _log.warning("generations cannot be shared", error=str(error))
        return None


def _export(
    pages: CudaPages, segment: Segment | None, parts: Sequence[common_pb2.CudaIpcPart] = ()
) -> common_pb2.CudaIpcEndpoint | None:
    from baton.transport.cuda_ipc import cuda_ipc_endpoint

    try:
        return cuda_ipc_endpoint(pages, segment, parts)
    except TransportError as error:
        text = "the pool's memory cannot be shared by CUDA IPC; pages travel over grpc"
        _log.warning(text, error=str(error))
        return None


def _register(pages: PageStore) -> NixlOwner | None:
    from baton.transport.nixl import NixlOwner

    try:
        return NixlOwner(pages)
    except TransportError as error:
        _log.warning("the pool is not offered over nixl", error=str(error))
        return None
