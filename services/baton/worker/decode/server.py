"""The node of the decode role: decode.shell in a process."""

from __future__ import annotations

import asyncio
from typing import Any

from baton.config import DecodeConfig
from baton.engine.draft.base import Drafter
from baton.rpc.link import Link
from baton.tracing.recorder import Recorder
from baton.v1 import node_pb2, prefill_pb2, prefill_pb2_grpc
from baton.worker.caller_stream import CallerStreams
from baton.worker.decode.core import DecodeCore
from baton.worker.decode.drafters import make_drafter
from baton.worker.decode.peers import PrefillPeers
from baton.worker.decode.shell import DecodeShell
from baton.worker.decode.stream import DecodeStream
from baton.worker.handoff_messages import several
from baton.worker.node import WorkerNode
from baton.worker.peers import PagePeer

CONNECT_SECONDS = 10.0
"""How long a starting node waits for the prefill nodes of its own configuration."""
LET_GO_SECONDS = 1.0
"""How often logs of requests whose caller is gone are looked through."""


class DecodeNode(DecodeShell, WorkerNode[DecodeCore]):
    """One engine that decodes, the callers connected to it and the prefill nodes it is connected to."""

    role = "decode"

    def __init__(self, config: DecodeConfig, recorder: Recorder | None = None) -> None:
        super().__init__(config, recorder)
        self.streams: CallerStreams[DecodeStream] = CallerStreams(self, self.tasks)
        self.peers = PrefillPeers(self, config)

    def make_drafter(self) -> Drafter | None:
        return make_drafter(self.config, self.engine.drafter, self.engine.cache)

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
        self._begin_work()
        await self.peers.wait_connected(CONNECT_SECONDS)

    def take_over(self, old: WorkerNode[Any]) -> None:
        super().take_over(old)
        self._begin_work()

    def _begin_work(self) -> None:
        for peer in self.config.prefill:
            self.peers.connect(peer)
        self.tasks.spawn(self._let_logs_go(), "kept logs")

    async def _let_logs_go(self) -> None:
        while True:
            await asyncio.sleep(LET_GO_SECONDS)
            self.let_logs_go()

    def info(self) -> node_pb2.NodeInfo:
        info = super().info()
        info.peers.extend(self.peers.describe())
        return info

    async def leave_engine(self) -> bool:
        await self.peers.close()
        return await super().leave_engine()
