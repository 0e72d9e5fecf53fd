"""The `grpc` transport: page bytes in a stream, on a connection that carries nothing else."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Iterable, Sequence

import grpc
import grpc.aio

from baton.rpc.channel import Dial, open_channel
from baton.rpc.client_stream import ClientStream
from baton.rpc.errors import BatonError, from_status, internal, invalid, to_status
from baton.transport.base import (
    PageReader,
    PageStore,
    PageWriter,
    TransportError,
    check_pairs,
    check_step,
    ignore_time,
)
from baton.v1 import prefill_pb2, prefill_pb2_grpc

PIECE_BYTES = 2**20

_Stream = ClientStream[prefill_pb2.FetchRequest, prefill_pb2.FetchResponse]


class PageSourceServicer(prefill_pb2_grpc.PageSourceServicer):
    """Reads pages as they are at the moment; the answer to `release` says whether they were valid."""

    def __init__(self, *pools: PageStore) -> None:
        """`pools`: by FetchRequest.pool; may be set later, before the first call."""
        self.pools: Sequence[PageStore] = pools

    async def Fetch(
        self,
        request_iterator: AsyncIterator[prefill_pb2.FetchRequest],
        context: grpc.aio.ServicerContext,
    ) -> AsyncIterator[prefill_pb2.FetchResponse]:
        readers = [pages.reader() for pages in self.pools]
        async for request in request_iterator:
            if request.pool >= len(readers):
                yield _error(request, invalid("pool", f"pool {request.pool} is not one of {len(readers)}"))
                continue
            reader, count = readers[request.pool], self.pools[request.pool].num_pages
            wrong = next((page for page in request.page_ids if page >= count), None)
            if wrong is not None:
                yield _error(request, invalid("page_ids", f"page {wrong} is not one of the pool's {count}"))
            elif not request.page_ids:
                yield prefill_pb2.FetchResponse(id=request.id, last=True)
            else:
                try:
                    for index in range(len(request.page_ids)):
                        async for piece in _pieces(reader, request, index):
                            yield piece
                except TransportError as error:
                    yield _error(request, internal(str(error)))


def _error(request: prefill_pb2.FetchRequest, error: BatonError) -> prefill_pb2.FetchResponse:
    return prefill_pb2.FetchResponse(id=request.id, error=to_status(error))


async def _pieces(
    reader: PageReader, request: prefill_pb2.FetchRequest, index: int
) -> AsyncIterator[prefill_pb2.FetchResponse]:
    page = await reader.read(request.page_ids[index])
    for offset in range(0, page.nbytes, PIECE_BYTES):
        end = min(offset + PIECE_BYTES, page.nbytes)
        yield prefill_pb2.FetchResponse(
            id=request.id,
            index=index,
            offset=offset,
            data=bytes(page[offset:end]),
            last=index == len(request.page_ids) - 1 and end == page.nbytes,
        )


PROGRESS_SECONDS = 10.0


class GrpcReceiver:
    """Several pulls may run at once, each on a stream of its own: one that is cancelled or fails ends its
    stream, and with it what the peer still sends. Others leave theirs to the next pull."""

    kind = "grpc"
    sees_steps = False

    def __init__(
        self,
        address: str,
        local: PageStore,
        num_pages: int,
        progress_seconds: float = PROGRESS_SECONDS,
        dial: Dial = open_channel,
        pool: int = 0,
    ) -> None:
        """`address`: host:port of a PageSource whose pool has `num_pages` pages, as many bytes each as ours.
        Connects with the first pull. To be made on an event loop. `progress_seconds`: the longest pause
        between two pieces."""
        self._local = local
        self._num_pages, self._pool = num_pages, pool
        self._progress_seconds = progress_seconds
        self._channel: grpc.aio.Channel = dial(address)
        self._stub = prefill_pb2_grpc.PageSourceStub(self._channel)
        self._running: dict[_Stream, PageWriter] = {}
        self._idle: list[_Stream] = []
        self._closed = False

    async def pull(
        self,
        pairs: Sequence[tuple[int, int]],
        step: int = 0,
        copied: Callable[[float], None] = ignore_time,
    ) -> None:
        check_pairs(pairs, self._num_pages, self._local.num_pages)
        check_step(step, self)
        if self._closed:
            raise TransportError("the receiver is closed")
        began = time.monotonic()
        if pairs:
            call, writer = self._stream(), self._local.writer()
            self._running[call] = writer
            try:
                await self._fetch(call, pairs, writer)
                await writer.finish()
            except BaseException:
                call.cancel()
                await _finish([writer])  # the destinations are free then
                raise
            finally:
                del self._running[call]
            self._idle.append(call)
        copied(time.monotonic() - began)

    def generations(self, pages: Sequence[int]) -> None:
        """The owner's generations cannot be read over this transport."""

    async def close(self) -> None:
        self._closed = True
        for call in (*self._running, *self._idle):
            call.cancel()
        await _finish(self._running.values())
        await self._channel.close()

    def _stream(self) -> _Stream:
        while self._idle:
            call = self._idle.pop()
            if not call.done():
                return call
        return _Stream(self._stub.Fetch())

    async def _fetch(self, call: _Stream, pairs: Sequence[tuple[int, int]], writer: PageWriter) -> None:
        """Writes pages as they arrive. Raises TransportError, also for a piece that is not the next one."""
        page_bytes = self._local.page_bytes
        source_ids = [source for source, _ in pairs]
        await call.write(prefill_pb2.FetchRequest(id=1, page_ids=source_ids, pool=self._pool))
        for index, (_, target) in enumerate(pairs):
            offset = 0
            while offset < page_bytes:
                piece = await self._next_piece(call)
                end = offset + len(piece.data)
                last = index == len(pairs) - 1 and end == page_bytes
                if (piece.id, piece.index, piece.offset, piece.last) != (1, index, offset, last) or not (
                    offset < end <= page_bytes
                ):
                    text = f"{len(piece.data)} bytes at {piece.offset} of page {piece.index} came out of turn"
                    raise TransportError(text)
                writer.write(target, offset, piece.data)
                offset = end

    async def _next_piece(self, call: _Stream) -> prefill_pb2.FetchResponse:
        try:
            async with asyncio.timeout(self._progress_seconds):
                piece = await call.read()
        except TimeoutError:
            raise TransportError(f"no page bytes for {self._progress_seconds:g} s") from None
        except BatonError as error:
            why = "the receiver is closed" if self._closed else f"{error.code.name}: {error.message}"
            raise TransportError(f"the page stream broke: {why}") from error
        if self._closed:
            raise TransportError("the receiver is closed")
        if piece is grpc.aio.EOF:
            raise TransportError("the peer ended the page stream")
        if piece.HasField("error"):
            raise TransportError(from_status(piece.error).message)
        response: prefill_pb2.FetchResponse = piece
        return response


async def _finish(writers: Iterable[PageWriter]) -> None:
    """Waits until they write nothing more; their results are reported elsewhere."""
    await asyncio.gather(*(writer.finish() for writer in writers), return_exceptions=True)
