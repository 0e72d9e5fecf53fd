"""When what a simulated decode node says leaves it."""

from __future__ import annotations

from collections.abc import Callable

from baton.decode.types import Done, Failed, Output, Tokens
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
