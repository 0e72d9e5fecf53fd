"""grpc.health.v1.Health. Unlike the servicer of grpcio-health-checking, a watcher that leaves does not
silence the other watchers of its service, and a watcher that does not read delays nobody.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from typing import Any

import grpc
import grpc.aio
from grpc_health.v1 import health_pb2, health_pb2_grpc

from baton.rpc.errors import abort, exhausted

MAX_WATCHERS = 1024
"""Whoever can connect may watch, for as long as they like: strangers can hold nothing else."""
SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING
SERVICE_UNKNOWN = health_pb2.HealthCheckResponse.SERVICE_UNKNOWN


class HealthServicer(health_pb2_grpc.HealthServicer):  # type: ignore[misc]
    """All services of a process share one state: NOT_SERVING until set."""

    SERVICE: str = health_pb2.DESCRIPTOR.services_by_name["Health"].full_name

    def __init__(self) -> None:
        self._services: frozenset[str] = frozenset({""})
        self._serving = False
        self._watchers = 0
        self._changed = asyncio.Event()

    def add_to(self, server: grpc.aio.Server, services: Sequence[str]) -> None:
        """Registers at the server; answers for "" (the process) and these services."""
        self._services = frozenset({"", *services})
        health_pb2_grpc.add_HealthServicer_to_server(self, server)

    @property
    def serving(self) -> bool:
        return self._serving

    def set_all(self, serving: bool) -> None:
        if serving == self._serving:
            return
        self._serving = serving
        self._changed.set()
        self._changed = asyncio.Event()

    async def Check(self, request: Any, context: grpc.aio.ServicerContext) -> Any:
        status = self._status(request.service)
        if status == SERVICE_UNKNOWN:
            await context.abort(grpc.StatusCode.NOT_FOUND, f"no service {request.service!r} here")
        return health_pb2.HealthCheckResponse(status=status)

    async def Watch(self, request: Any, context: grpc.aio.ServicerContext) -> AsyncIterator[Any]:
        if self._watchers >= MAX_WATCHERS:
            text = f"{self._watchers} watch this process already: use Check"
            await abort(context, exhausted(text, "TOO_MANY_WATCHERS", 1000))
        self._watchers += 1
        told = None
        try:
            while True:
                changed = self._changed
                status = self._status(request.service)
                if status != told:
                    told = status
                    yield health_pb2.HealthCheckResponse(status=status)
                await changed.wait()
        finally:
            self._watchers -= 1

    def _status(self, service: str) -> int:
        if service not in self._services:
            return int(SERVICE_UNKNOWN)
        return int(SERVING if self._serving else NOT_SERVING)
