"""The `cuda_ipc` transport: the receiver maps the owner's pool and copies pages out of it, GPU to GPU."""

from __future__ import annotations

import asyncio
import os
import threading
import time
from collections.abc import Callable, Sequence
from typing import Self

from baton.transport import cuda
from baton.transport.base import (
    EndpointRefused,
    PageStore,
    Refusal,
    TransportError,
    check_pairs,
    check_step,
    runs_of,
    unheard,
)
from baton.transport.cuda_copy import CopyStrategy, PageCopier, choose_copy_strategy, kernel_available
from baton.transport.cuda_pages import CudaPages
from baton.transport.pull_thread import PullThread
from baton.transport.shm import MappedSegment, Segment, boot_id, pid_namespace, segment_endpoint
from baton.v1 import common_pb2 as pb


def cuda_ipc_endpoint(pages: CudaPages, generations: Segment | None) -> pb.CudaIpcEndpoint:
    """Raises TransportError when the pool's memory cannot be shared. The pool must live as long as the
    process."""
    cuda.use(pages.device)
    handle, offset = cuda.export_memory(pages.pool.data_ptr())
    return pb.CudaIpcEndpoint(
        handle=handle,
        offset=offset,
        page_bytes=pages.page_bytes,
        num_pages=pages.num_pages,
        device_uuid=cuda.uuid_of(pages.device),
        boot_id=boot_id(),
        pid=os.getpid(),
        pid_namespace=pid_namespace(),
        generations=segment_endpoint(generations) if generations is not None else None,
    )


def check_endpoint(endpoint: pb.CudaIpcEndpoint, local: PageStore) -> CudaPages:
    """The local pool, if the endpoint may be opened into it. Raises EndpointRefused."""
    problem = cuda.problem()
    if problem is not None:
        raise EndpointRefused(Refusal.NO_CUDA, problem)
    if not isinstance(local, CudaPages):
        raise EndpointRefused(Refusal.HOST_POOL, "the local pool is not on a GPU")
    if not endpoint.boot_id or endpoint.boot_id != boot_id():
        raise EndpointRefused(Refusal.OTHER_HOST, "the peer's GPU is on another host")
    if endpoint.pid == os.getpid():
        if endpoint.pid_namespace == pid_namespace():
            raise EndpointRefused(Refusal.SAME_PROCESS, "the peer's pool is in this very process")
        raise EndpointRefused(
            Refusal.SAME_PID,
            f"the peer has process id {endpoint.pid}, as we have, in another PID namespace, which "
            "CUDA cannot tell apart; let the containers share the namespace, or make the ids differ",
        )
    if endpoint.page_bytes != local.page_bytes:
        text = f"the peer's pages have {endpoint.page_bytes} bytes, not {local.page_bytes}"
        raise EndpointRefused(Refusal.PAGE_BYTES, text)
    return local


class CudaIpcReceiver:
    """One pull runs at a time, in a thread of the receiver's own; others wait their turn.

    Pulls have a stream of their own, which nothing on the device orders with steps. The hosts do: a pull
    begins after the owner's host has seen the step that wrote its pages retire; a page here is pulled into
    only once every step that used it has retired (the cache frees it no sooner); and a pull returns after
    this host has seen it complete, before a step that reads the page is launched.
    The owner's death ends nothing here: the mapping keeps its memory until `close`.
    """

    kind = "cuda_ipc"
    strategy: CopyStrategy | None = None
    """A fixed copy strategy; None: `choose_copy_strategy` decides."""

    def __init__(self, endpoint: pb.CudaIpcEndpoint, local: CudaPages, busy: Callable[[], bool]) -> None:
        """Use `open`."""
        self._endpoint = endpoint
        self._local = local
        self._busy = busy
        self._same_gpu = endpoint.device_uuid == cuda.uuid_of(local.device)
        self._generations = _generations(endpoint)
        retired = self._generations.retired if self._generations is not None else lambda: 0
        self._thread = PullThread("baton-cuda-ipc", retired)
        self._base: cuda.Pointer | None = None
        self._copier: PageCopier | None = None
        self._kernel = False
        self._closing: asyncio.Task[None] | None = None

    @classmethod
    async def open(
        cls, endpoint: pb.CudaIpcEndpoint, local: PageStore, busy: Callable[[], bool] = lambda: False
    ) -> Self:
        """`busy`: whether decode steps run on this GPU; called in another thread. Raises EndpointRefused."""
        self = cls(endpoint, check_endpoint(endpoint, local), busy)
        try:
            await self._thread.run(lambda stop: self._map())
        except BaseException as error:
            await self.close()
            if isinstance(error, TransportError | RuntimeError):
                text = f"the peer's GPU memory cannot be mapped: {cuda.one_line(error)}"
                raise EndpointRefused(Refusal.NOT_MAPPED, text) from error
            raise
        return self

    @property
    def sees_steps(self) -> bool:
        return self._generations is not None and self._generations.sees_steps

    async def pull(
        self,
        pairs: Sequence[tuple[int, int]],
        step: int = 0,
        copied: Callable[[float], None] = unheard,
    ) -> None:
        self._require_open()
        check_pairs(pairs, self._endpoint.num_pages, self._local.num_pages)
        check_step(step, self)
        wanted = list(pairs)

        def work(stop: threading.Event) -> None:
            began = time.monotonic()
            self._copy(wanted, stop)
            if not stop.is_set():
                copied(time.monotonic() - began)

        await self._thread.run(work, step, self._rehearse)

    def generations(self, pages: Sequence[int]) -> list[int] | None:
        """Raises TransportError for a page that is out of range, and after `close`."""
        self._require_open()
        return self._generations.generations(pages) if self._generations is not None else None

    async def close(self) -> None:
        """Raises TransportError when the memory cannot be unmapped."""
        if self._closing is None:
            self._closing = asyncio.create_task(self._close())
        await asyncio.shield(self._closing)

    async def _close(self) -> None:
        await self._thread.settle()
        try:
            await self._thread.run(lambda stop: self._unmap())
        finally:
            self._thread.close()
            if self._generations is not None:
                self._generations.close()

    def _require_open(self) -> None:
        if self._closing is not None:
            raise TransportError("the receiver is closed")

    # --- in the receiver's thread -----------------------------------------------------------------------

    def _map(self) -> None:
        cuda.use(self._local.device)
        endpoint = self._endpoint
        self._base = cuda.open_memory(endpoint.handle)
        # An address outside would not fail one copy: it would end all work of this process on the GPU.
        needed = endpoint.offset + endpoint.num_pages * endpoint.page_bytes
        if (there := cuda.mapped_bytes(self._base)) < needed:
            raise TransportError(f"the allocation has {there} bytes, the peer's pages end at {needed}")
        peer = self._base + endpoint.offset
        self._copier = PageCopier(self._local.pool, peer, endpoint.num_pages)
        self._kernel = kernel_available()

    def _copy(self, pairs: list[tuple[int, int]], stop: threading.Event) -> None:
        if self._copier is not None and not stop.is_set():
            self._copier.copy(pairs, self._strategy(pairs), stop)

    def _rehearse(self) -> None:
        """Not where the owner computes on this very GPU: the processes take turns there."""
        if self._copier is not None and not self._same_gpu and not self._busy():
            self._copier.rehearse()

    def _strategy(self, pairs: list[tuple[int, int]]) -> CopyStrategy:
        if self.strategy is not None:
            return self.strategy
        runs = sum(1 for _ in runs_of(pairs))
        return choose_copy_strategy(len(pairs), runs, self._local.page_bytes, self._busy(), self._kernel)

    def _unmap(self) -> None:
        self._copier = None
        base, self._base = self._base, None
        if base is not None:
            cuda.close_memory(base)


def _generations(endpoint: pb.CudaIpcEndpoint) -> MappedSegment | None:
    """None where the owner keeps none, or in another /dev/shm: a container's own."""
    if not endpoint.HasField("generations"):
        return None
    try:
        return MappedSegment(endpoint.generations)
    except EndpointRefused:
        return None
