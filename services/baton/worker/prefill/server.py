"""The prefill process: prefill.shell as a gRPC service."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import aclosing
from typing import Any

import grpc.aio

from baton.config import PrefillConfig
from baton.rpc.authentication import ClusterAuthentication
from baton.rpc.errors import unavailable
from baton.rpc.node import run_node
from baton.v1 import prefill_pb2, prefill_pb2_grpc
from baton.worker.caller_stream import CallerStreams
from baton.worker.lease_stream import LeaseStream
from baton.worker.node import WorkerNode
from baton.worker.prefill.core import PrefillCore
from baton.worker.prefill.shell import PrefillShell


class PrefillNode(PrefillShell, WorkerNode[PrefillCore], prefill_pb2_grpc.PrefillServicer):
    """One engine that computes prompts, and the callers connected to it."""

    role = "prefill"

    def __init__(self, config: PrefillConfig) -> None:
        super().__init__(config)
        self.streams: CallerStreams[LeaseStream] = CallerStreams(self, self.tasks)

    def add_services(self, server: grpc.aio.Server) -> Sequence[str]:
        prefill_pb2_grpc.add_PrefillServicer_to_server(self, server)
        return [prefill_pb2.DESCRIPTOR.services_by_name["Prefill"].full_name, *self.serve_pages(server)]

    def retire(self, step: int) -> None:
        segment = self.engine.published.segment
        if segment is not None:
            segment.retire(step)

    def make_stream(self, incarnation: int) -> LeaseStream:
        return LeaseStream(incarnation)

    async def Run(self, request_iterator: Any, context: Any) -> AsyncIterator[prefill_pb2.PrefillResponse]:
        async with aclosing(self.streams.serve(request_iterator, context, "Prefill.Run")) as messages:
            async for message in messages:
                yield message

    async def stop(self) -> None:
        self.streams.close(unavailable("the node is stopping", "STOPPING"))
        await asyncio.sleep(0)
        await super().stop()


async def serve(
    config: PrefillConfig, *, ready: asyncio.Event | None = None, stop: asyncio.Event | None = None
) -> int:
    """Runs the process until it is stopped. Returns its exit code."""
    node = PrefillNode(config)
    return await run_node(
        node, config, authentication=ClusterAuthentication(node.cluster), ready=ready, stop=stop
    )
