"""The owner's side of the `grpc` transport: serves page bytes."""

from __future__ import annotations

from collections.abc import AsyncIterator

import grpc
import grpc.aio

from baton.rpc.errors import BatonError, internal, invalid, to_status
from baton.transport.base import PageReader, PageStore, TransportError
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
