"""A pool on a GPU as transports see it; its bytes reach the host through pinned memory."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar, TypeVarTuple

import numpy as np
import torch

from baton.transport.base import TransportError, until_done
from baton.transport.cuda import one_line

T = TypeVar("T")
Arguments = TypeVarTuple("Arguments")


class CudaPages:
    """A PageStore. Reads and writes block its own threads, never the event loop."""

    def __init__(self, pool: torch.Tensor, num_pages: int) -> None:
        """`pool`: uint8 [at least num_pages, page_bytes], contiguous, on a GPU."""
        if pool.dtype != torch.uint8 or not pool.is_contiguous() or len(pool) < num_pages:
            raise ValueError(f"a pool of {num_pages} pages cannot be {tuple(pool.shape)} of {pool.dtype}")
        self.num_pages = num_pages
        self.page_bytes = pool.shape[1]
        self.device = pool.device
        self.pool = pool
        self._downloads = _Lane(pool.device, "baton-page-reads")
        self._uploads = _Lane(pool.device, "baton-page-writes")

    def reader(self) -> _Reader:
        return _Reader(self.pool, self._downloads)

    def writer(self) -> _Writer:
        return _Writer(self.pool, self._uploads)

    def close(self) -> None:
        """Waits for what runs."""
        self._downloads.close()
        self._uploads.close()


class _Lane:
    """One thread with its own CUDA stream: several would only share the same copy engine."""

    def __init__(self, device: torch.device, name: str) -> None:
        self._executor = ThreadPoolExecutor(1, name)
        self._device = device
        self._stream: torch.cuda.Stream | None = None
        self._staging = torch.empty(0, dtype=torch.uint8)

    def submit(self, work: Callable[[*Arguments], T], *arguments: *Arguments) -> asyncio.Future[T]:
        """Runs it in the lane's thread. Raises TransportError once the lane is closed."""
        try:
            return asyncio.get_running_loop().run_in_executor(self._executor, work, *arguments)
        except RuntimeError as error:
            raise TransportError(f"the pool is closed: {error}") from error

    def close(self) -> None:
        self._executor.shutdown()

    def staging(self, size: int) -> torch.Tensor:
        """Pinned memory of the thread."""
        if len(self._staging) != size:
            self._staging = torch.empty(size, dtype=torch.uint8, pin_memory=True)
        return self._staging

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """In the lane's thread. Returns when the copy is complete; waits without the interpreter's lock."""
        if self._stream is None:
            torch.cuda.set_device(self._device)
            self._stream = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]
        with torch.cuda.stream(self._stream):
            target.copy_(source, non_blocking=True)
            done = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
            done.record()
        done.synchronize()


class _Reader:
    def __init__(self, pool: torch.Tensor, lane: _Lane) -> None:
        self._pool = pool
        self._lane = lane
        self._staging: torch.Tensor | None = None

    async def read(self, page: int) -> memoryview:
        return await self._lane.submit(self._read, page)

    def _read(self, page: int) -> memoryview:
        try:
            if self._staging is None:
                self._staging = torch.empty(self._pool.shape[1], dtype=torch.uint8, pin_memory=True)
            self._lane.copy(self._staging, self._pool[page])
        except RuntimeError as error:
            raise TransportError(f"page {page} cannot be read from the GPU: {one_line(error)}") from error
        return memoryview(self._staging.numpy())  # type: ignore[arg-type]


class _Writer:
    def __init__(self, pool: torch.Tensor, lane: _Lane) -> None:
        self._pool = pool
        self._lane = lane
        self._pieces: list[bytes] = []
        self._length = 0
        self._uploads: list[asyncio.Future[None]] = []
        self._dropped = threading.Event()

    def write(self, page: int, offset: int, data: bytes) -> None:
        """The pieces are kept as they came until the page is whole."""
        if offset == 0:
            self._pieces, self._length = [], 0
        self._pieces.append(data)
        self._length += len(data)
        if self._length == self._pool.shape[1]:
            self._uploads.append(self._lane.submit(self._upload, page, self._pieces))
            self._pieces, self._length = [], 0

    async def finish(self) -> None:
        await until_done(self._uploads, self._dropped.set)
        errors = [upload.exception() for upload in self._uploads]
        for error in errors:
            if error is not None:
                raise error

    def _upload(self, page: int, pieces: list[bytes]) -> None:
        if self._dropped.is_set():
            return
        try:
            staging = self._lane.staging(self._pool.shape[1])
            view, at = staging.numpy(), 0
            for piece in pieces:
                view[at : at + len(piece)] = np.frombuffer(piece, np.uint8)
                at += len(piece)
            self._lane.copy(self._pool[page], staging)
        except RuntimeError as error:
            raise TransportError(f"page {page} cannot be written to the GPU: {one_line(error)}") from error
