"""The simulated gateway: the real router, and the real decision between split and local, told of the nodes'
caches and load as often as workers tell; and when a simulated decode node's messages leave for it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from baton.decode.outputs import Done, Failed, Output, Tokens
from baton.gateway.cache_view import PromptPages
from baton.gateway.metrics import GatewayMetrics
from baton.gateway.router import Router, Way
from baton.gateway.split import Split
from baton.plan.nodes import SimDecode, SimNode, SimPrefill
from baton.sim.world import Actor, World


class Messages:
    """As decode.callers, whose one caller the simulated gateway is: after a message with everybody's tokens,
    tokens gather for a while. Events and first tokens do not wait; they take along the tokens of their own
    request, and the others' gather on."""

    def __init__(
        self, world: World, actor: Actor, gather: float, deliver: Callable[[list[Output]], None]
    ) -> None:
        """gather: seconds. deliver: called with the outputs of a message as it leaves."""
        self._world = world
        self._actor = actor
        self._gather = gather
        self._deliver = deliver
        self._unsent: list[Output] = []
        self._begun: set[int] = set()  # running requests of which a token has been said
        self._due = 0.0
        self._waking = False

    def put(self, outputs: list[Output]) -> None:
        """What the node says at one moment, in order."""
        self._unsent += outputs
        urgent: set[int] = set()
        for output in outputs:
            if not isinstance(output, Tokens) or output.request not in self._begun:
                urgent.add(output.request)
            if isinstance(output, Tokens):
                self._begun.add(output.request)
            elif isinstance(output, Done | Failed):
                self._begun.discard(output.request)
        if self._world.now >= self._due:
            self._send(urgent)
        elif urgent:
            leaving = [output for output in self._unsent if output.request in urgent]
            self._unsent = [output for output in self._unsent if output.request not in urgent]
            self._deliver(leaving)
        self._wake_when_due()

    def _wake_when_due(self) -> None:
        if self._unsent and not self._waking:
            self._waking = True
            self._world.at(self._due - self._world.now, self._actor, self._wake)

    def _wake(self) -> None:
        self._waking = False
        if self._unsent and self._world.now >= self._due:
            self._send(set())
        self._wake_when_due()

    def _send(self, urgent: set[int]) -> None:
        unsent, self._unsent = self._unsent, []
        if any(output.request not in urgent for output in unsent):
            self._due = self._world.now + self._gather
        self._deliver(unsent)


UPDATE_SECONDS = 0.05
"""Between two updates of a worker: worker.cache_service.UPDATE_SECONDS."""


@dataclass(frozen=True, slots=True)
class Place:
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
        self._nodes: dict[str, SimNode] = {**prefill, **decode}
        self._ways: dict[int, Way] = {}
        self._hear()

    def _hear(self) -> None:
        for address, node in self._nodes.items():
            view = self._router.view(address)
            view.apply(node.tell(view.sequence if view.page_size else None), self._world.now)
            self._router.settle(address)
        self._world.at(UPDATE_SECONDS, self._actor, self._hear)

    def place(self, number: int, prompt: Sequence[int]) -> Place:
        """As gateway.requests does for a request without a session."""
        way = self._ways[number] = Way(self._router, number, PromptPages(prompt, ""))
        decode = way.pick_decode(self._decode)
        prefill = way.order_prefill(self._prefill)
        limit = way.decide(self._split, decode, prefill)
        way.sent(decode, prefill)
        return Place(decode, tuple(prefill), limit)

    def computed(self, number: int) -> None:
        """The request's prompt has been."""
        self._ways[number].computed()

    def ended(self, number: int) -> None:
        self._ways.pop(number).ended()
