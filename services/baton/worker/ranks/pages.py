"""The pages of a worker on several hosts: each host keeps the KV heads of its ranks, and rank 0 reads and
writes whole pages for the worker's peers.

A host's part of a page is one piece of it, because the KV head is the outermost axis. Pages of other hosts
cross the network twice; a protocol by which each host pulls its own heads would halve that.
"""

from __future__ import annotations

import asyncio
import struct
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

from baton.transport.base import HostPages, PageReader, PageWriter, TransportError, until_done
from baton.worker.ranks.channel import Channel, ChannelError

_REQUEST = struct.Struct("<BQQQ")
"""READ, WRITE or FLUSH; page, offset in the host's part of it, bytes."""
READ, WRITE, FLUSH = 1, 2, 3
ANSWER_SECONDS = 20.0


@dataclass(frozen=True, slots=True)
class Part:
    """What a host keeps of each page: bytes from `first` on."""

    first: int
    count: int

    @property
    def end(self) -> int:
        return self.first + self.count

    def overlap(self, first: int, end: int) -> tuple[int, int]:
        """Overlap with [first, end) in a page; empty if the second is not above the first."""
        return max(self.first, first), min(self.end, end)


class RemotePart:
    """The part of another host, over its connection; one operation at a time, in a thread of its own. After
    an error all fail, and that host notices that the connection has ended.

    A host that does not answer in time may still write later what it was sent. So the first error calls
    `lost`, before anybody learns of it and gives the pages to others: the worker ends there.
    """

    def __init__(self, part: Part, channel: Channel) -> None:
        self.part = part
        self._channel = channel
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="pages of a host")
        self._broken = ""
        self.lost: Callable[[], None] = lambda: None

    def read(self, page: int, offset: int, count: int) -> Future[memoryview]:
        return self._submit(_REQUEST.pack(READ, page, offset, count), count)

    def write(self, page: int, offset: int, data: bytes) -> Future[memoryview]:
        return self._submit(_REQUEST.pack(WRITE, page, offset, len(data)) + data, None)

    def flush(self) -> Future[memoryview]:
        """Done when everything written before is in the pool there."""
        return self._submit(_REQUEST.pack(FLUSH, 0, 0, 0), 0)

    def _submit(self, request: bytes, count: int | None) -> Future[memoryview]:
        try:
            return self._thread.submit(self._ask, request, count)
        except RuntimeError:
            failed: Future[memoryview] = Future()
            failed.set_exception(TransportError("the pool is closed"))
            return failed

    def _ask(self, request: bytes, count: int | None) -> memoryview:
        """`count`: of the answer's bytes; None: there is none. Raises TransportError."""
        if self._broken:
            raise TransportError(self._broken)
        try:
            self._channel.send_bytes(request)
            answer = memoryview(b"") if count is None else self._channel.receive_bytes(ANSWER_SECONDS)
            if count is not None and answer.nbytes != count:
                raise ChannelError(f"{answer.nbytes} bytes came where {count} were expected")
            return answer
        except ChannelError as error:
            self._broken = f"the pages of another host of this worker: {error}"
            self._channel.close()
            self.lost()
            raise TransportError(self._broken) from error

    def close(self) -> None:
        self._thread.shutdown(cancel_futures=True)
        if not self._broken:
            self._broken = "the pool is closed"
            self._channel.close()


class PagesOfHosts:
    """A `PageStore` of whole pages."""

    def __init__(self, page_bytes: int, local: HostPages, part: Part, others: Sequence[RemotePart]) -> None:
        """`part`: this host's, which `local` holds; together with those of `others` it covers a page."""
        self.page_bytes, self.num_pages = page_bytes, local.num_pages
        self.local, self.part, self.others = local, part, others

    def reader(self) -> PageReader:
        return _Reader(self)

    def writer(self) -> PageWriter:
        return _Writer(self)

    def close(self) -> None:
        for other in self.others:
            other.close()


class _Reader:
    def __init__(self, pages: PagesOfHosts) -> None:
        self._local = pages.local
        self._page = bytearray(pages.page_bytes)
        self._part = pages.part
        self._pieces: list[tuple[RemotePart, int, int]] = []
        """Who is asked for which bytes of a page: each byte of one host."""
        covered = [pages.part]
        for other in pages.others:
            first, end = other.part.first, other.part.end
            for part in covered:  # parts are equal, apart, or overlap at an end
                if part.first <= first < part.end:
                    first = part.end
                if part.first < end <= part.end:
                    end = part.first
            if first < end:
                covered.append(Part(first, end - first))
                self._pieces.append((other, first, end))

    async def read(self, page: int) -> memoryview:
        asked = [
            asyncio.wrap_future(other.read(page, first - other.part.first, end - first))
            for other, first, end in self._pieces
        ]
        whole = memoryview(self._page)
        whole[self._part.first : self._part.end] = await self._local.read(page)
        for (_, first, end), data in zip(self._pieces, await asyncio.gather(*asked), strict=True):
            whole[first:end] = data
        return whole


class _Writer:
    def __init__(self, pages: PagesOfHosts) -> None:
        self._local, self._part, self._others = pages.local.writer(), pages.part, pages.others
        self._running: list[Future[memoryview]] = []

    def write(self, page: int, offset: int, data: bytes) -> None:
        end = offset + len(data)
        first, last = self._part.overlap(offset, end)
        if first < last:
            self._local.write(page, first - self._part.first, data[first - offset : last - offset])
        for other in self._others:
            first, last = other.part.overlap(offset, end)
            if first < last:
                piece = data[first - offset : last - offset]
                self._running.append(other.write(page, first - other.part.first, piece))

    async def finish(self) -> None:
        running = [*self._running, *(other.flush() for other in self._others)]
        futures = [asyncio.wrap_future(each) for each in running]
        await until_done(futures)
        errors = [error for future in futures if (error := future.exception()) is not None]
        if errors:
            raise errors[0]


def serve_pages(channel: Channel, memory: memoryview, page_bytes: int) -> None:
    """The other host's side: reads and writes its part of pages until the connection ends. Raises
    ChannelError."""
    num_pages = memory.nbytes // page_bytes
    while True:
        request = channel.receive_bytes(None)
        kind, page, offset, count = _REQUEST.unpack_from(request)
        if page >= num_pages or offset + count > page_bytes or kind not in (READ, WRITE, FLUSH):
            raise ChannelError(f"{count} bytes at {offset} of page {page} were asked for")
        target = memory[page * page_bytes + offset :][:count]
        if kind == WRITE:
            target[:] = request[_REQUEST.size :]
        else:
            channel.send_bytes(bytes(target))
