"""Refuses calls to a node's own services while it is still loading."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable
from typing import Any

import grpc
import grpc.aio

from baton.rpc.errors import abort, unavailable


class ReadyGate(grpc.aio.ServerInterceptor):  # type: ignore[misc]
    """Closed until open(): calls to guarded services end with UNAVAILABLE (NOT_READY)."""

    def __init__(self) -> None:
        self._guarded: frozenset[str] = frozenset()
        self._open = False

    def guard(self, services: Iterable[str]) -> None:
        self._guarded = frozenset(services)

    def open(self) -> None:
        self._open = True

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Any]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Any:
        service = handler_call_details.method.rpartition("/")[0].removeprefix("/")
        if self._open or service not in self._guarded:
            return await continuation(handler_call_details)
        # Every kind of call accepts a stream of requests and ends here before the first is read.
        return grpc.stream_stream_rpc_method_handler(_refuse)


async def _refuse(_requests: Any, context: grpc.aio.ServicerContext) -> None:
    await abort(context, unavailable("still loading; try again in a second", "NOT_READY", 1000))
