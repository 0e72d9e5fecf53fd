"""The owner's side of the `grpc` transport: serves page bytes."""

from __future__ import annotations

from collections.abc import AsyncIterator

import grpc
import grpc.aio

from baton.rpc.errors import invalid, to_status
from baton.v1 import prefill_pb2, prefill_pb2_grpc

PIECE_BYTES = 2**20


class PageSourceServicer(prefill_pb2_grpc.PageSourceServicer):
    """Reads pages as they are at the moment: whether they were the right ones, the lease tells."""

    def __init__(self, pages: memoryview, page_bytes: int, num_pages: int) -> None:
        if pages.nbytes < page_bytes * num_pages:
            raise ValueError(f"{pages.nbytes} bytes hold no {num_pages} pages of {page_bytes}")
        self._pages = pages.cast("B")
        self._page_bytes = page_bytes
        self._num_pages = num_pages

    async def Fetch(
        self,
        request_iterator: AsyncIterator[prefill_pb2.FetchRequest],
        context: grpc.aio.ServicerContext,
    ) -> AsyncIterator[prefill_pb2.FetchResponse]:
        async for request in request_iterator:
            wrong = next((page for page in request.page_ids if page >= self._num_pages), None)
            if wrong is not None:
                error = invalid("page_ids", f"page {wrong} is not one of the pool's {self._num_pages}")
                yield prefill_pb2.FetchResponse(id=request.id, error=to_status(error))
            elif not request.page_ids:
                yield prefill_pb2.FetchResponse(id=request.id, last=True)
            else:
                for index in range(len(request.page_ids)):
                    async for piece in self._page(request, index):
                        yield piece

    async def _page(
        self, request: prefill_pb2.FetchRequest, index: int
    ) -> AsyncIterator[prefill_pb2.FetchResponse]:
        start = request.page_ids[index] * self._page_bytes
        for offset in range(0, self._page_bytes, PIECE_BYTES):
            end = min(offset + PIECE_BYTES, self._page_bytes)
            yield prefill_pb2.FetchResponse(
                id=request.id,
                index=index,
                offset=offset,
                data=bytes(self._pages[start + offset : start + end]),
                last=index == len(request.page_ids) - 1 and end == self._page_bytes,
            )
