"""One `PageSource.Fetch` stream as its receiver sees it."""

from __future__ import annotations

import asyncio
import itertools
from collections import deque
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from typing import Any

import grpc.aio

from baton.rpc.errors import from_status
from baton.rpc.outbox import Outbox
from baton.transport.base import PageStore, PageWriter, TransportError
from baton.v1 import prefill_pb2


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
