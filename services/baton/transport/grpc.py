"""The `grpc` transport: page bytes in a stream, on a connection that carries nothing else."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable, Sequence

import grpc.aio

from baton.rpc.channel import Dial, open_channel
from baton.transport.base import PageStore, TransportError, unheard
from baton.transport.fetch import Fetch, FetchStream
from baton.transport.pages import check_pairs, check_step
from baton.v1 import prefill_pb2_grpc

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
