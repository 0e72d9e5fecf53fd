"""The `shm` transport: the receiver maps the owner's segment read-only and copies pages out of it."""

from __future__ import annotations

import asyncio
import mmap
import os
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import numpy.typing as npt

from baton.transport.base import TransportError
from baton.transport.pages import check_pairs, page_rows
from baton.transport.segment import DIRECTORY, Header, Segment, SegmentError
from baton.v1 import common_pb2 as pb

BATCH_BYTES = 2**20
"""Small pages are copied so many bytes at a time: every copy releases the interpreter's lock, and may wait
5 ms to get it back from a busy thread."""

Indexes = npt.NDArray[np.intp]


def host_id() -> str:
    """The same for two processes that see the same /dev/shm, and for no others: the kernel's boot and the
    file system's device number (which containers that have a /dev/shm of their own do not share)."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot}:{DIRECTORY.stat().st_dev}"
    except OSError:
        return ""


def shm_endpoint(segment: Segment) -> pb.ShmEndpoint:
    header = segment.header
    return pb.ShmEndpoint(
        path=str(segment.path),
        host_id=host_id(),
        token=header.token,
        generations_offset=header.generations_offset,
        pages_offset=header.pages_offset,
        page_bytes=header.page_bytes,
        num_pages=header.num_pages,
    )


class ShmReceiver:
    """The peer's death ends nothing here: the mapping lasts until `close`."""

    kind = "shm"

    def __init__(self, endpoint: pb.ShmEndpoint, local_pages: memoryview, local_page_bytes: int) -> None:
        """`local_pages`: the local pool, writable. Raises TransportError when the segment cannot be opened or
        is not the endpoint's."""
        if not endpoint.host_id or endpoint.host_id != host_id():
            raise TransportError("the peer's shared memory is on another host or in another container")
        if endpoint.page_bytes != local_page_bytes:
            raise TransportError(f"the peer's pages have {endpoint.page_bytes} bytes, not {local_page_bytes}")
        self._local = page_rows(local_pages, local_page_bytes)
        self._map, header = _open(endpoint)
        self._num_pages = header.num_pages
        self._peer = np.frombuffer(
            self._map, np.uint8, header.num_pages * header.page_bytes, header.pages_offset
        ).reshape(header.num_pages, header.page_bytes)
        self._generations = np.frombuffer(self._map, "<u8", header.num_pages, header.generations_offset)
        self._batch = max(1, BATCH_BYTES // local_page_bytes)
        self._executor = ThreadPoolExecutor(1, "baton-shm")
        self._running: set[asyncio.Future[None]] = set()
        self._closed = False

    async def pull(self, pairs: Sequence[tuple[int, int]]) -> None:
        self._require_open()
        check_pairs(pairs, self._num_pages, len(self._local))
        if not pairs:
            return
        index = np.array(pairs, dtype=np.intp)
        stop = threading.Event()
        loop = asyncio.get_running_loop()
        copy = loop.run_in_executor(self._executor, self._copy, index[:, 0], index[:, 1], stop)
        self._running.add(copy)
        copy.add_done_callback(self._running.discard)
        cancelled = False
        while not copy.done():
            try:
                await asyncio.wait([copy])
            except asyncio.CancelledError:
                # The caller may reuse the destinations once this returns: wait for the copy all the same.
                cancelled = True
                stop.set()
        if cancelled:
            raise asyncio.CancelledError
        copy.result()

    def generations(self, pages: Sequence[int]) -> list[int]:
        """Raises TransportError for a page that is out of range, and after `close`."""
        self._require_open()
        check_pairs([(page, 0) for page in pages], self._num_pages, 1)
        return [int(self._generations[page]) for page in pages]

    async def close(self) -> None:
        self._closed = True
        while self._running:
            await asyncio.wait(self._running)
        if not self._map.closed:
            self._executor.shutdown()
            del self._peer, self._generations
            self._map.close()

    def _copy(self, source: Indexes, target: Indexes, stop: threading.Event) -> None:
        for begin in range(0, len(source), self._batch):
            if stop.is_set():
                return
            if self._batch == 1:
                self._local[target[begin]] = self._peer[source[begin]]
            else:
                part = slice(begin, begin + self._batch)
                self._local[target[part]] = self._peer[source[part]]

    def _require_open(self) -> None:
        if self._closed:
            raise TransportError("the receiver is closed")


def _open(endpoint: pb.ShmEndpoint) -> tuple[mmap.mmap, Header]:
    try:
        descriptor = os.open(endpoint.path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except (OSError, ValueError) as error:
        raise TransportError(f"cannot open {endpoint.path}: {error}") from error
    try:
        header = Header.unpack(os.pread(descriptor, 4096, 0))
        if (header.token, header.num_pages, header.page_bytes) != (
            endpoint.token,
            endpoint.num_pages,
            endpoint.page_bytes,
        ):
            raise TransportError(f"{endpoint.path} is not the segment that the peer speaks of")
        if os.fstat(descriptor).st_size < header.size:
            raise TransportError(f"{endpoint.path} is shorter than its header says")
        return mmap.mmap(descriptor, header.size, prot=mmap.PROT_READ), header
    except (OSError, OverflowError, ValueError, SegmentError) as error:
        raise TransportError(f"cannot map {endpoint.path}: {error}") from error
    finally:
        os.close(descriptor)
