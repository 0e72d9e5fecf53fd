"""The simulated gateway: gateway.shell and its requests over connections that never break. Nodes report their
caches and load to it as often as workers do."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from baton.config import GatewayConfig
from baton.gateway.request import GatewayRequest
from baton.rpc.errors import BatonError
from baton.sim.virtual_gateway import VirtualGateway, VirtualTimer, VirtualTokenizer
from baton.sim.world import Actor, World
from baton.sizing.nodes import DirectLink, NodeSetup, SizingDecode, SizingNode, SizingPrefill
from baton.tokenizer.vocabulary import Vocabulary
from baton.v1 import decode_pb2, inference_pb2, node_pb2
from baton.worker.cache_service import UPDATE_SECONDS

VOCABULARY = Vocabulary([b""], [b""], frozenset(), byte_fallback=False, size=2**31)
"""Tokens have no text."""
NEVER = 10**6
"""More requests, or seconds, than are simulated."""


class SizingGateway(VirtualGateway):
    incarnation = 1

    def __init__(
        self,
        world: World,
        setup: NodeSetup,
        split: str,
        prefill: Mapping[str, SizingPrefill],
        decode: Mapping[str, SizingDecode],
    ) -> None:
        actor = Actor("gateway")
        self._nodes: dict[str, SizingNode[Any]] = {**prefill, **decode}
        self._decode = decode
        config = GatewayConfig(
            tokenizer=(),
            decode=(),
            routing=setup.routing,  # type: ignore[arg-type]  # Router and Split check them
            split=split,  # type: ignore[arg-type]
            request_seconds=setup.decode.request_seconds,
            silence_seconds=NEVER,  # steps never hang
            max_requests=NEVER,
            max_unread_tokens=2**31,
            recorder_events=0,
        )
        tokenizer = VirtualTokenizer(world, actor, VOCABULARY, lambda: 0.0)
        super().__init__(world, actor, "gateway", config, tokenizer)
        for role, addresses in (("decode", decode), ("prefill", prefill)):
            for address in addresses:
                self.nodes.add(role, address)

    def clock(self) -> float:
        return self.world.now

    def make_link(
        self,
        address: str,
        hello: Callable[[], decode_pb2.GenerateCommand],
        on_message: Callable[[decode_pb2.StepEvents], None],
        on_up: Callable[[decode_pb2.StepEvents], None],
        on_down: Callable[[BatonError], None],
    ) -> DirectLink:
        return DirectLink(self.world, self.loop, self._decode[address], 0.0, hello, on_message, on_up)

    async def node_info(self, address: str) -> node_pb2.NodeInfo:
        node = self._decode[address]
        return node_pb2.NodeInfo(
            role="decode", address=address, incarnation=node.incarnation, model=node.model_info
        )

    def follow_load(self, address: str) -> VirtualTimer:
        view = self.router.view(address)
        for update in self._nodes[address].cache_updates(view.sequence if view.page_size else None):
            self.router.update(address, update)
        return self.after(UPDATE_SECONDS, lambda: self.follow_load(address))

    def ask(self, start: inference_pb2.GenerateStart, on_change: Callable[[], None]) -> GatewayRequest:
        request = GatewayRequest(self, start, on_change, self.api_key)
        request.begin()
        return request
