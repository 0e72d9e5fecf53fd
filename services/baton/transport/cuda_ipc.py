"""The `cuda_ipc` transport: the receiver maps the owner's pool and copies pages out of it, GPU to GPU."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable, Sequence
from typing import Self

import torch

from baton.transport import cuda_runtime
from baton.transport.base import (
    EndpointRefused,
    PageStore,
    TransportError,
    check_page_bytes,
    runs_of,
)
from baton.transport.cuda_copy import (
    CopyStrategy,
    CudaPageCopier,
    PeerPart,
    choose_copy_strategy,
    kernel_available,
)
from baton.transport.cuda_pages import CudaPages, PagePart
from baton.transport.pull_thread import ThreadReceiver
from baton.transport.shm import MappedSegment, Segment, boot_id, pid_namespace, segment_endpoint
from baton.v1 import common_pb2 as pb


def cuda_ipc_endpoint(
    pages: CudaPages, generations: Segment | None, parts: Sequence[pb.CudaIpcPart] = ()
) -> pb.CudaIpcEndpoint:
    """`parts`: where several ranks hold the pages. Raises TransportError when the pool's memory cannot be
    shared. The pool must live as long as the process."""
    cuda_runtime.use(pages.device)
    handle, offset = (b"", 0) if parts else cuda_runtime.export_memory(pages.pool.data_ptr())
    return pb.CudaIpcEndpoint(
        parts=parts,
        handle=handle,
        offset=offset,
        page_bytes=pages.page_bytes,
        num_pages=pages.num_pages,
        device_uuid=cuda_runtime.uuid_of(pages.device),
        boot_id=boot_id(),
        pid=os.getpid(),
        pid_namespace=pid_namespace(),
        generations=segment_endpoint(generations) if generations is not None else None,
    )


def export_part(memory: torch.Tensor, first: int) -> pb.CudaIpcPart:
    """Exports this process's pool, uint8 [pages, bytes] on a GPU, which holds each page's bytes from
    `first` on. Raises TransportError."""
    cuda_runtime.use(memory.device)
    handle, offset = cuda_runtime.export_memory(memory.data_ptr())
    return pb.CudaIpcPart(
        handle=handle,
        offset=offset,
        first=first,
        part_bytes=memory.shape[1],
        device_uuid=cuda_runtime.uuid_of(memory.device),
        pid=os.getpid(),
    )


def map_part(part: pb.CudaIpcPart, pages: int) -> cuda_runtime.Pointer:
    """Maps it into this thread's device. The base of the allocation that it lies in, for `cuda.close_memory`.
    Raises TransportError."""
    base = cuda_runtime.open_memory(part.handle)
    # An address outside would not fail one copy: it would end all work of this process on the GPU.
    needed = part.offset + pages * part.part_bytes
    if (there := cuda_runtime.mapped_bytes(base)) < needed:
        cuda_runtime.close_memory(base)
        raise TransportError(f"the allocation has {there} bytes, the peer's pages end at {needed}")
    return base


def local_part(part: pb.CudaIpcPart, pages: int, default: torch.device) -> PagePart:
    """What another rank of this worker holds, mapped into the GPU that it lies on; `default`: where this
    process does not see that one. Raises TransportError."""
    cuda_runtime.use(cuda_runtime.device_of(part.device_uuid, default))
    base = map_part(part, pages) + part.offset
    memory = cuda_runtime.as_tensor(base, pages * part.part_bytes)
    return PagePart(part.first, memory.view(pages, part.part_bytes))


def _parts_of(endpoint: pb.CudaIpcEndpoint) -> list[pb.CudaIpcPart]:
    return list(endpoint.parts) or [
        pb.CudaIpcPart(
            handle=endpoint.handle,
            offset=endpoint.offset,
            part_bytes=endpoint.page_bytes,
            device_uuid=endpoint.device_uuid,
            pid=endpoint.pid,
        )
    ]


def check_endpoint(endpoint: pb.CudaIpcEndpoint, local: PageStore) -> CudaPages:
    """The local pool, if the endpoint may be opened into it. Raises EndpointRefused."""
    problem = cuda_runtime.problem()
    if problem is not None:
        raise EndpointRefused(problem)
    if not isinstance(local, CudaPages):
        raise EndpointRefused("the local pool is not on a GPU")
    if not endpoint.boot_id or endpoint.boot_id != boot_id():
        raise EndpointRefused("the peer's GPU is on another host")
    if os.getpid() in {endpoint.pid, *(part.pid for part in endpoint.parts)}:
        if endpoint.pid_namespace == pid_namespace():
            raise EndpointRefused("the peer's pool is in this very process")
        raise EndpointRefused(
            f"the peer has process id {os.getpid()}, as we have, in another PID namespace, which "
            "CUDA cannot tell apart; let the containers share the namespace, or make the ids differ",
        )
    check_page_bytes(endpoint.page_bytes, local)
    return local


class CudaIpcReceiver(ThreadReceiver):
    """Maps the owner's pool into this process.

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
        self._pool = local
        self._busy = busy
        self._parts = _parts_of(endpoint)
        ours = {cuda_runtime.uuid_of(device) for device in local.devices}
        self._same_gpu = not ours.isdisjoint(part.device_uuid for part in self._parts)
        self._generations = seen = _generations(endpoint)
        self._bases: list[tuple[torch.device, cuda_runtime.Pointer]] = []
        self._copier: CudaPageCopier | None = None
        self._kernel = False
        retired = seen.retired if seen is not None and seen.sees_steps else None
        super().__init__(local, endpoint.num_pages, retired)

    @classmethod
    async def open(
        cls, endpoint: pb.CudaIpcEndpoint, local: PageStore, busy: Callable[[], bool] = lambda: False
    ) -> Self:
        """`busy`: whether decode steps run on this GPU; called in another thread. Raises EndpointRefused."""
        return await cls(endpoint, check_endpoint(endpoint, local), busy)._connected()

    def generations(self, pages: Sequence[int]) -> list[int] | None:
        """Raises TransportError for a page that is out of range, and after `close`."""
        self._require_open()
        return self._generations.generations(pages) if self._generations is not None else None

    # --- in the receiver's thread -----------------------------------------------------------------------

    def _connect(self) -> None:
        try:
            self._map()
        except (TransportError, RuntimeError) as error:
            raise TransportError(
                f"the peer's GPU memory cannot be mapped: {cuda_runtime.one_line(error)}"
            ) from error

    def _map(self) -> None:
        peer = {}
        for device in self._pool.devices:
            cuda_runtime.use(device)
            peer[device] = [self._map_part(part, device) for part in self._parts]
        cuda_runtime.use(self._pool.device)
        self._copier = CudaPageCopier(self._pool, peer, self._endpoint.num_pages)
        self._kernel = self._copier.whole and kernel_available()

    def _map_part(self, part: pb.CudaIpcPart, device: torch.device) -> PeerPart:
        base = map_part(part, self._endpoint.num_pages)
        self._bases.append((device, base))
        return PeerPart(part.first, part.part_bytes, base + part.offset)

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
        return choose_copy_strategy(len(pairs), runs, self._pool.page_bytes, self._busy(), self._kernel)

    def _disconnect(self) -> None:
        self._copier = None
        bases, self._bases = self._bases, []
        with contextlib.ExitStack() as closing:  # one that fails does not keep the others mapped
            if self._generations is not None:
                closing.callback(self._generations.close)
            for device, base in bases:
                closing.callback(cuda_runtime.close_memory, base)
                closing.callback(cuda_runtime.use, device)


def _generations(endpoint: pb.CudaIpcEndpoint) -> MappedSegment | None:
    """None where the owner keeps none, or in another /dev/shm: a container's own."""
    if not endpoint.HasField("generations"):
        return None
    try:
        return MappedSegment(endpoint.generations)
    except EndpointRefused:
        return None
