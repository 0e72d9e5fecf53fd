"""The seeded scheduler: virtual time, the order of events, and the trace."""

from __future__ import annotations

import heapq
import random
from collections.abc import Callable


class Violation(Exception):
    """A rule of the design was broken. The message begins with the rule, in a word or two and a colon."""


class Actor:
    """A thread of a process. Its events wait while it stalls, and are dropped when it is dead."""

    __slots__ = ("alive", "name", "stalled_until")

    def __init__(self, name: str) -> None:
        self.name = name
        self.alive = True
        self.stalled_until = 0.0

    def stall(self, until: float) -> None:
        self.stalled_until = max(self.stalled_until, until)


Trace = Callable[[str], None]


class World:
    """Runs events in the order of virtual time; those of one moment in the order in which they were made.

    Everything random comes from `rng(name)`: one generator for each name, so that what one part draws does
    not change what another part draws when a scenario is made smaller.
    """

    def __init__(self, seed: int, trace: Trace | None = None) -> None:
        self.seed = seed
        self.now = 0.0
        self.steps = 0
        self._trace = trace
        self._heap: list[tuple[float, int, Actor, Callable[[], None]]] = []
        self._serial = 0
        self._rngs: dict[str, random.Random] = {}

    def rng(self, name: str) -> random.Random:
        """Seeded by a string, which Python hashes with SHA-512: the same in every process."""
        rng = self._rngs.get(name)
        if rng is None:
            rng = self._rngs[name] = random.Random(f"{self.seed}/{name}")
        return rng

    def at(self, delay: float, actor: Actor, function: Callable[[], None]) -> None:
        """Calls `function` for the actor `delay` seconds from now."""
        self._serial += 1
        heapq.heappush(self._heap, (self.now + delay, self._serial, actor, function))

    def step(self) -> bool:
        """Runs the next event; False: there is none."""
        while self._heap:
            time, serial, actor, function = heapq.heappop(self._heap)
            if not actor.alive:
                continue
            if actor.stalled_until > time:
                # With its old serial number: events due during a stall keep their order after it.
                heapq.heappush(self._heap, (actor.stalled_until, serial, actor, function))
                continue
            self.now = max(self.now, time)
            self.steps += 1
            function()
            return True
        return False

    @property
    def traced(self) -> bool:
        return self._trace is not None

    def note(self, who: str, what: str) -> None:
        """A line of the trace."""
        if self._trace is not None:
            self._trace(f"{self.now:12.6f} {who:<10} {what}")
