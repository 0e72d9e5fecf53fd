"""The simulated gateway: the real router and the real decision between split and local. Nodes report their
caches and load to it as often as workers do."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from baton.gateway.cache_view import PromptPages
from baton.gateway.metrics import GatewayMetrics
from baton.gateway.routing import RequestRouting, Router
from baton.gateway.split_decision import Split
from baton.sim.world import Actor, World
from baton.sizing.nodes import SizingDecode, SizingNode, SizingPrefill
from baton.worker.cache_service import UPDATE_SECONDS


@dataclass(frozen=True, slots=True)
class NodeRoute:
    """The nodes of a request."""

    decode: str
    prefill: tuple[str, ...]
    """In the order to try them."""
    local_tokens: int | None
    """The decode node prefills at most this many uncached tokens itself; None: it decides."""


class SizingGateway:
    def __init__(
        self,
        world: World,
        routing: str,
        split: str,
        prefill: Mapping[str, SizingPrefill],
        decode: Mapping[str, SizingDecode],
    ) -> None:
        self._world = world
        self._actor = Actor("gateway")
        self._router = Router(routing, lambda: world.now)
        self._split = Split(split, GatewayMetrics(), lambda: world.now)
        self._prefill = list(prefill)
        self._decode = list(decode)
        self._nodes: dict[str, SizingNode[Any]] = {**prefill, **decode}
        self._requests: dict[int, RequestRouting] = {}
        self._update_views()

    def _update_views(self) -> None:
        for address, node in self._nodes.items():
            view = self._router.view(address)
            for update in node.cache_updates(view.sequence if view.page_size else None):
                self._router.update(address, update)
        self._world.at(UPDATE_SECONDS, self._actor, self._update_views)

    def route(self, number: int, prompt: Sequence[int]) -> NodeRoute:
        """As gateway.requests does for a request without a session."""
        routing = self._requests[number] = RequestRouting(self._router, number, PromptPages(prompt, ""))
        decode = routing.pick_decode(self._decode)
        prefill = routing.order_prefill(self._prefill)
        limit = routing.decide(self._split, decode, prefill)
        routing.sent(decode, prefill)
        return NodeRoute(decode, tuple(prefill), limit)

    def computed(self, number: int) -> None:
        """The request's prompt has been computed."""
        self._requests[number].computed()

    def ended(self, number: int) -> None:
        self._requests.pop(number).ended()
