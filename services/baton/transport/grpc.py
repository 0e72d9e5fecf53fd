"""The `grpc` transport: page bytes in a stream, on a connection that carries nothing else."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import grpc
import grpc.aio

from baton.rpc.channel import Dial, open_channel
from baton.rpc.errors import BatonError, from_status, internal, invalid, to_status
from baton.rpc.streams import Outbox
from baton.transport.base import (
    PageReader,
    PageStore,
    PageWriter,
    TransportError,
    check_pairs,
    check_step,
    unheard,
)
from baton.v1 import prefill_pb2, prefill_pb2_grpc

PIECE_BYTES = 2**20


class PageSourceServicer(prefill_pb2_grpc.PageSourceServicer):
    """Reads pages as they are at the moment; the answer to `release` says whether they were valid."""

    def __init__(self, pages: PageStore) -> None:
        self._pages = pages

    async def Fetch(
        self,
        request_iterator: AsyncIterator[prefill_pb2.FetchRequest],
        context: grpc.aio.ServicerContext,
    ) -> AsyncIterator[prefill_pb2.FetchResponse]:
        reader = self._pages.reader()
        count = self._pages.num_pages
        async for request in request_iterator:
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


@dataclass(slots=True, eq=False)
class Fetch:
    """Pages that were asked for."""

    number: int
    targets: list[int]
    writer: PageWriter
    arrived: asyncio.Future[None]
    """Done: no piece of this request goes to its writer any more."""
    index: int = 0
    offset: int = 0
    """Where the next piece belongs."""


class FetchStream:
    """Asks for pages and passes on what arrives. Lives on one event loop.

    Requests are answered in their order, each page from its start to its end; any other answer fails the
    stream, as do its end and a pause. A failed stream is finished: take another.
    """

    def __init__(
        self,
        method: Callable[[AsyncIterator[prefill_pb2.FetchRequest]], Any],
        local: PageStore,
        progress_seconds: float,
    ) -> None:
        """`local`: the local pool. `progress_seconds`: the longest pause between two pieces."""
        self._local = local
        self._progress_seconds = progress_seconds
        self._loop = asyncio.get_running_loop()
        # No asynchronous generator: one that gRPC leaves while it waits cannot be closed.
        self._outbox: Outbox[prefill_pb2.FetchRequest] = Outbox(None)
        self._unanswered: deque[Fetch] = deque()
        self._numbers = itertools.count(1)
        self._last_progress = 0.0
        self._error: str | None = None
        self._call = method(self._outbox)
        self._reader = asyncio.create_task(self._read())

    @property
    def failed(self) -> bool:
        return self._error is not None

    def fetch(self, pairs: Sequence[tuple[int, int]]) -> Fetch:
        """Asks for pages (peer's, local). Wait with `arrival`; cancel `arrived` to drop what still comes."""
        if self._error is not None:
            raise TransportError(self._error)
        if not self._unanswered:
            self._last_progress = self._loop.time()
        targets = [target for _, target in pairs]
        request = Fetch(next(self._numbers), targets, self._local.writer(), self._loop.create_future())
        request.arrived.add_done_callback(lambda future: future.cancelled() or future.exception())
        self._unanswered.append(request)
        sources = [source for source, _ in pairs]
        self._outbox.put(prefill_pb2.FetchRequest(id=request.number, page_ids=sources))
        return request

    async def arrival(self, request: Fetch) -> None:
        """Returns when all pages are in the pool. Raises TransportError. Cancelling this call cancels the
        request."""
        arrived = request.arrived
        try:
            while not arrived.done():
                quiet = self._loop.time() - self._last_progress
                if quiet >= self._progress_seconds:
                    self._fail(f"no page bytes for {self._progress_seconds:g} s")
                else:
                    await asyncio.wait([arrived], timeout=self._progress_seconds - quiet)
        finally:
            if not arrived.done():
                arrived.cancel()
        arrived.result()
        await request.writer.finish()

    async def close(self) -> None:
        """Fails what is still waiting."""
        self._fail("the receiver is closed")
        await asyncio.wait([self._reader])

    async def _read(self) -> None:
        try:
            async for response in self._call:
                self._last_progress = self._loop.time()
                self._accept(response)
            self._fail("the peer ended the page stream")
        except grpc.aio.AioRpcError as error:
            self._fail(f"the page stream broke: {error.code().name}: {error.details()}")
        except TransportError as error:
            self._fail(str(error))
        except asyncio.CancelledError:
            self._fail("the page stream was cancelled")
        except Exception as error:
            self._fail(f"an answer of the peer could not be used: {error!r}")
            raise

    def _accept(self, response: prefill_pb2.FetchResponse) -> None:
        if not self._unanswered or response.id != self._unanswered[0].number:
            raise TransportError(f"an answer to request {response.id} out of turn")
        request = self._unanswered[0]
        if response.HasField("error"):
            self._unanswered.popleft()
            if not request.arrived.done():
                request.arrived.set_exception(TransportError(from_status(response.error).message))
            return
        end = response.offset + len(response.data)
        page_bytes = self._local.page_bytes
        at = (response.index, response.offset)
        if at != (request.index, request.offset) or not response.data or end > page_bytes:
            raise TransportError(
                f"bytes {response.offset} to {end} of page {response.index} came out of turn"
            )
        if not request.arrived.done():
            request.writer.write(request.targets[request.index], response.offset, response.data)
        request.offset = end
        if end == page_bytes:
            request.index, request.offset = request.index + 1, 0
        if response.last != (request.index == len(request.targets)):
            raise TransportError(f"request {response.id} ended early or late")
        if response.last:
            self._unanswered.popleft()
            if not request.arrived.done():
                request.arrived.set_result(None)

    def _fail(self, message: str) -> None:
        if self._error is not None:
            return
        self._error = message
        for request in self._unanswered:
            if not request.arrived.done():
                request.arrived.set_exception(TransportError(message))
        self._unanswered.clear()
        self._outbox.close()
        self._call.cancel()


PROGRESS_SECONDS = 10.0
REQUEST_BYTES = 8 * 2**20
"""A pull asks in requests of about this size, for at most two at a time: what still comes after a cancelled
one, and keeps others waiting, is bounded."""


class GrpcReceiver:
    """Several pulls may run at once; their requests take turns."""

    kind = "grpc"
    sees_steps = False

    def __init__(
        self,
        address: str,
        local: PageStore,
        num_pages: int,
        progress_seconds: float = PROGRESS_SECONDS,
        dial: Dial = open_channel,
    ) -> None:
        """`address`: host:port of a PageSource whose pool has `num_pages` pages, as many bytes each as ours.
        Connects with the first pull. To be made on an event loop."""
        self._local = local
        self._num_pages = num_pages
        self._progress_seconds = progress_seconds
        self._request_pages = max(1, REQUEST_BYTES // local.page_bytes)
        self._channel: grpc.aio.Channel = dial(address)
        self._stream: FetchStream | None = None
        self._running: set[Fetch] = set()
        self._closed = False

    async def pull(
        self,
        pairs: Sequence[tuple[int, int]],
        step: int = 0,
        copied: Callable[[float], None] = unheard,
    ) -> None:
        check_pairs(pairs, self._num_pages, self._local.num_pages)
        check_step(step, self)
        if self._closed:
            raise TransportError("the receiver is closed")
        began = time.monotonic()
        if self._stream is None or self._stream.failed:
            stub = prefill_pb2_grpc.PageSourceStub(self._channel)
            self._stream = FetchStream(stub.Fetch, self._local, self._progress_seconds)
        stream = self._stream
        asked: list[Fetch] = []
        try:
            for begin in range(0, len(pairs), self._request_pages):
                asked.append(stream.fetch(pairs[begin : begin + self._request_pages]))
                self._running.add(asked[-1])
                if len(asked) == 2:
                    await stream.arrival(asked[0])
                    self._running.discard(asked.pop(0))
            for request in asked:
                await stream.arrival(request)
        except BaseException:
            # Drop what still comes, and wait for what is being written: the destinations are free then.
            for request in asked:
                request.arrived.cancel()
            await _settle(asked)
            raise
        finally:
            self._running.difference_update(asked)
        copied(time.monotonic() - began)

    def generations(self, pages: Sequence[int]) -> None:
        """The owner's generations cannot be read over this transport."""

    async def close(self) -> None:
        self._closed = True
        if self._stream is not None:
            await self._stream.close()
        await _settle(self._running)
        await self._channel.close()


async def _settle(requests: Iterable[Fetch]) -> None:
    """Waits until nothing is written for them; their results are reported elsewhere."""
    await asyncio.gather(*(request.writer.finish() for request in requests), return_exceptions=True)
