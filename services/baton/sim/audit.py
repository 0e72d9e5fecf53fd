"""Now and then, from above: does each side of a hand-off know what the other believes to be under way?

No process can see this; the simulator can. A process that waits for what its healthy peer knows nothing of
waits for its deadline, and one that holds what nobody wants holds it for nothing.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from baton.sim.decode import SimDecode
from baton.sim.network import Network
from baton.sim.prefill import SimPrefill
from baton.sim.process import Process, Worker
from baton.sim.world import Actor, Violation, World

EVERY_SECONDS = 0.5
TOLERATED_SECONDS = 4.0
"""How long something may be wrong, with nothing to excuse it. A pull that was stopped
may take LATEST_FIRST_LOOK_SECONDS to see that."""


class Audit:
    def __init__(self, world: World, network: Network, processes: Mapping[str, Process]) -> None:
        self._world = world
        self._network = network
        self._processes = processes
        self._actor = Actor("audit")
        self._seen: dict[tuple[object, ...], int] = {}
        self._again()

    def _again(self) -> None:
        self._world.at(EVERY_SECONDS, self._actor, self._look)

    def _look(self) -> None:
        wrong = dict((*self._waits(), *self._leaks(), *self._pulls()))
        self._seen = {what: self._seen.get(what, 0) + 1 for what in wrong}
        for what, count in self._seen.items():
            if count * EVERY_SECONDS > TOLERATED_SECONDS:
                raise Violation(wrong[what])
        self._again()

    def _of(self, kind: type[SimDecode] | type[SimPrefill]) -> Iterator[Process]:
        return (process for process in self._processes.values() if isinstance(process, kind))

    def _healthy(self, a: Process, b: Process) -> bool:
        now = self._world.now
        stalled = any(actor.stalled_until > now for p in (a, b) for actor in (p.loop, p.steps))
        stalled |= any(p.hangs_until > now for p in (a, b) if isinstance(p, Worker))
        return not (stalled or self._network.is_cut(a.name, b.name) or self._network.is_slow(a.name, b.name))

    def _waits(self) -> Iterator[tuple[tuple[object, ...], str]]:
        for decode in self._of(SimDecode):
            assert isinstance(decode, SimDecode)
            for name, address, _ in decode.core.handoffs.under_way():
                peer = decode.partner(address)
                if peer is not None and not peer.side.knows(name) and self._healthy(decode, peer):
                    text = f"{decode.who} waits for {name} at {peer.who}, which knows nothing of it"
                    yield ("waits", decode.who, peer.who, name), f"silence: {text}"

    def _leaks(self) -> Iterator[tuple[tuple[object, ...], str]]:
        for prefill in self._of(SimPrefill):
            assert isinstance(prefill, SimPrefill)
            for name, decode in prefill.under_way():
                unwanted = isinstance(decode, SimDecode) and not decode.core.handoffs.knows(name)
                if isinstance(decode, SimDecode) and unwanted and self._healthy(decode, prefill):
                    text = f"{prefill.who} holds {name} for {decode.who}, which knows nothing of it"
                    yield ("holds", decode.who, prefill.who, name), f"leak: {text}"

    def _pulls(self) -> Iterator[tuple[tuple[object, ...], str]]:
        for decode in self._of(SimDecode):
            assert isinstance(decode, SimDecode)
            awaited = {pull for _, _, pull in decode.core.handoffs.under_way()}
            for number in decode.pulls_before_their_step():
                copies = decode.copies.stalled_until <= self._world.now
                if number not in awaited and copies and self._healthy(decode, decode):
                    text = f"pull {number} of {decode.who} waits for its step, and nobody for its pages"
                    yield ("pulls", decode.who, number), f"leak: {text}"
