"""A pool on a GPU as transports see it; its bytes reach the host through pinned memory."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TypeVar, TypeVarTuple

import numpy as np
import torch

from baton.transport.base import TransportError, pieces_of, until_done
from baton.transport.cuda_runtime import one_line

T = TypeVar("T")
Args = TypeVarTuple("Args")


@dataclass(frozen=True, slots=True)
class PagePart:
    """What one rank's pool holds of each page."""

    first: int
    """First byte in a page."""
    memory: torch.Tensor
    """uint8 [pages, bytes], contiguous, on that rank's GPU."""

    @property
    def span(self) -> tuple[int, int]:
        """First byte and end."""
        return self.first, self.first + self.memory.shape[1]


class CudaPages:
    """A PageStore. Reads and writes block its own threads, never the event loop."""

    def __init__(self, pool: torch.Tensor, num_pages: int, parts: Sequence[PagePart] = ()) -> None:
        """`pool`: uint8 [at least num_pages, page_bytes], contiguous, on a GPU; of several ranks rank 0's,
        and `parts`: all ranks', `pool` first, which hold whole pages together."""
        self.parts = tuple(parts) or (PagePart(0, pool),)
        for part in self.parts:
            memory = part.memory
            if memory.dtype != torch.uint8 or not memory.is_contiguous() or len(memory) < num_pages:
                raise ValueError(
                    f"a pool of {num_pages} pages cannot be {tuple(memory.shape)}, {memory.dtype}"
                )
        self.num_pages = num_pages
        self.page_bytes = max(part.span[1] for part in self.parts)
        self.device = pool.device
        self.devices = tuple(dict.fromkeys(part.memory.device for part in self.parts))
        self.pool = pool
        self._downloads = _Lane("baton-page-reads")
        self._uploads = _Lane("baton-page-writes")

    def reader(self) -> _PinnedReader:
        return _PinnedReader(self, self._downloads)

    def writer(self) -> _PinnedWriter:
        return _PinnedWriter(self, self._uploads)

    def close(self) -> None:
        """Waits for what runs."""
        self._downloads.close()
        self._uploads.close()


class _Lane:
    """One thread with a CUDA stream of its own on each GPU: several would only share the same copy engine."""

    def __init__(self, name: str) -> None:
        self._executor = ThreadPoolExecutor(1, name)
        self._streams: dict[torch.device, torch.cuda.Stream] = {}
        self._staging = torch.empty(0, dtype=torch.uint8)

    def submit(self, work: Callable[[*Args], T], *arguments: *Args) -> asyncio.Future[T]:
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
        device = target.device if target.is_cuda else source.device  # torch copies on a stream of this one
        if (stream := self._streams.get(device)) is None:
            torch.cuda.set_device(device)
            stream = self._streams[device] = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        with torch.cuda.stream(stream):
            target.copy_(source, non_blocking=True)
            done = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
            done.record()
        done.synchronize()


class _PinnedReader:
    def __init__(self, pages: CudaPages, lane: _Lane) -> None:
        self._size = pages.page_bytes
        self._lane = lane
        self._staging: torch.Tensor | None = None
        self._pieces = [
            (pages.parts[piece.source], piece.begin, piece.end)
            for piece in pieces_of([(0, self._size)], [part.span for part in pages.parts])
        ]
        """Each byte of a page from one part."""

    async def read(self, page: int) -> memoryview:
        return await self._lane.submit(self._read, page)

    def _read(self, page: int) -> memoryview:
        try:
            if self._staging is None:
                self._staging = torch.empty(self._size, dtype=torch.uint8, pin_memory=True)
            for part, begin, end in self._pieces:
                self._lane.copy(
                    self._staging[begin:end], part.memory[page, begin - part.first : end - part.first]
                )
        except RuntimeError as error:
            raise TransportError(f"page {page} cannot be read from the GPU: {one_line(error)}") from error
        return memoryview(self._staging.numpy())  # type: ignore[arg-type]


class _PinnedWriter:
    def __init__(self, pages: CudaPages, lane: _Lane) -> None:
        self._parts = pages.parts
        self._size = pages.page_bytes
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
        if self._length == self._size:
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
            staging = self._lane.staging(self._size)
            view, at = staging.numpy(), 0
            for piece in pieces:
                view[at : at + len(piece)] = np.frombuffer(piece, np.uint8)
                at += len(piece)
            for part in self._parts:
                self._lane.copy(part.memory[page], staging[slice(*part.span)])
        except RuntimeError as error:
            raise TransportError(f"page {page} cannot be written to the GPU: {one_line(error)}") from error
