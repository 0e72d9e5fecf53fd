"""The decode process: decode.shell as a gRPC service."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import aclosing
from typing import Any

import grpc.aio

from baton.config import DecodeConfig
from baton.engine.draft.base import Drafter
from baton.rpc.authentication import ClusterAuthentication
from baton.rpc.errors import unavailable
from baton.rpc.link import Link
from baton.rpc.node import run_node
from baton.v1 import decode_pb2, decode_pb2_grpc, node_pb2, prefill_pb2, prefill_pb2_grpc
from baton.worker.caller_stream import CallerStreams
from baton.worker.decode.core import DecodeCore
from baton.worker.decode.drafters import make_drafter
from baton.worker.decode.peers import PrefillPeers
from baton.worker.decode.shell import DecodeShell
from baton.worker.decode.stream import DecodeStream
from baton.worker.handoff_messages import several
from baton.worker.node import WorkerNode
from baton.worker.peers import PagePeer

HAND_BACK_SECONDS = 2.0
"""How long a stopping node waits until its callers have got the terminal events of requests handed back."""
CONNECT_SECONDS = 10.0
"""How long a starting node waits for the prefill nodes of its own configuration."""


class DecodeNode(DecodeShell, WorkerNode[DecodeCore], decode_pb2_grpc.DecodeServicer):
    """One engine that decodes, the callers connected to it and the prefill nodes it is connected to."""

    role = "decode"

    def __init__(self, config: DecodeConfig) -> None:
        super().__init__(config)
        self.streams: CallerStreams[DecodeStream] = CallerStreams(self, self.tasks)
        self.peers = PrefillPeers(self, config)

    def make_drafter(self) -> Drafter | None:
        return make_drafter(self.config, self.engine.drafter, self.engine.cache)

    def add_services(self, server: grpc.aio.Server) -> Sequence[str]:
        decode_pb2_grpc.add_DecodeServicer_to_server(self, server)
        return [decode_pb2.DESCRIPTOR.services_by_name["Decode"].full_name, *self.serve_pages(server)]

    def make_link(
        self, address: str, peer: PagePeer
    ) -> Link[prefill_pb2.PrefillRequest, prefill_pb2.PrefillResponse]:
        return Link(
            address,
            lambda channel: prefill_pb2_grpc.PrefillStub(channel).Run,
            hello=peer.hello,
            on_message=peer.received,
            on_up=peer.welcomed,
            on_down=peer.lost,
            join=several,
            dial=self.cluster.dial,
        )

    def make_stream(self, incarnation: int) -> DecodeStream:
        return DecodeStream(incarnation, self.config.message_seconds)

    async def start(self, address: str) -> None:
        await super().start(address)
        for peer in self.config.prefill:
            self.peers.connect(peer)
        await self.peers.wait_connected(CONNECT_SECONDS)

    def info(self) -> node_pb2.NodeInfo:
        info = super().info()
        info.peers.extend(self.peers.describe())
        return info

    async def drain(self, seconds: float) -> int:
        self.announce_drain()
        return await super().drain(seconds)

    async def stop(self) -> None:
        await self._hand_back_all()
        self.streams.close(unavailable("the node is stopping", "STOPPING"))
        await asyncio.sleep(0)
        await self.peers.close()
        await super().stop()

    async def _hand_back_all(self) -> None:
        """Hands running requests back to their callers, each with its terminal event."""
        if self.core_or_none is None or not self.streams.open:
            return
        self.hand_back()
        deadline = time.monotonic() + HAND_BACK_SECONDS
        # The step thread does not signal. Its messages must also have left the outboxes.
        while time.monotonic() < deadline and (  # noqa: ASYNC110
            self.core_or_none.requests or self.streams.unsent
        ):
            await asyncio.sleep(0.01)

    # --- the service ------------------------------------------------------------------------------------

    async def Generate(self, request_iterator: Any, context: Any) -> AsyncIterator[decode_pb2.StepEvents]:
        async with aclosing(self.streams.serve(request_iterator, context, "Decode.Generate")) as messages:
            async for message in messages:
                yield message


async def serve(
    config: DecodeConfig, *, ready: asyncio.Event | None = None, stop: asyncio.Event | None = None
) -> int:
    """Runs the process until it is stopped. Returns its exit code."""
    node = DecodeNode(config)
    return await run_node(
        node, config, authentication=ClusterAuthentication(node.cluster), ready=ready, stop=stop
    )
