"""The simulated gateway: the real router, and the real decision between split and local, told of the nodes'
caches and load as often as workers tell.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from baton.gateway.cache_view import PromptPages
from baton.gateway.handoff_cost import Split
from baton.gateway.metrics import GatewayMetrics
from baton.gateway.routing import RequestRouting, Router
from baton.plan.nodes import SimDecode, SimNode, SimPrefill
from baton.sim.world import Actor, World

UPDATE_SECONDS = 0.05
"""Between two updates of a worker: worker.cache_service.UPDATE_SECONDS."""


@dataclass(frozen=True, slots=True)
class Route:
    """Where a request goes."""

    decode: str
    prefill: tuple[str, ...]
    """In the order to try them."""
    local_tokens: int | None
    """At most so many tokens left to compute are prefilled by the decode node; None: as it sees fit."""


class Gateway:
    def __init__(
        self,
        world: World,
        routing: str,
        split: str,
        prefill: Mapping[str, SimPrefill],
        decode: Mapping[str, SimDecode],
    ) -> None:
        self._world = world
        self._actor = Actor("gateway")
        self._router = Router(routing, lambda: world.now)
        self._split = Split(split, GatewayMetrics(), lambda: world.now)
        self._prefill = list(prefill)
        self._decode = list(decode)
        self._nodes: dict[str, SimNode[Any]] = {**prefill, **decode}
        self._ways: dict[int, RequestRouting] = {}
        self._hear()

    def _hear(self) -> None:
        for address, node in self._nodes.items():
            view = self._router.view(address)
            self._router.update(address, node.cache_update(view.sequence if view.page_size else None))
        self._world.at(UPDATE_SECONDS, self._actor, self._hear)

    def route(self, number: int, prompt: Sequence[int]) -> Route:
        """As gateway.requests does for a request without a session."""
        way = self._ways[number] = RequestRouting(self._router, number, PromptPages(prompt, ""))
        decode = way.pick_decode(self._decode)
        prefill = way.order_prefill(self._prefill)
        limit = way.decide(self._split, decode, prefill)
        way.sent(decode, prefill)
        return Route(decode, tuple(prefill), limit)

    def computed(self, number: int) -> None:
        """The request's prompt has been."""
        self._ways[number].computed()

    def ended(self, number: int) -> None:
        self._ways.pop(number).ended()
