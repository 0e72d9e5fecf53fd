"""`Audit` checks that processes agree: on the hand-offs that run between two nodes, and on which requests are
paused."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from baton.sim.decode import SimDecode
from baton.sim.gateway import SimGateway
from baton.sim.network import Network
from baton.sim.prefill import SimPrefill
from baton.sim.process import SimProcess
from baton.sim.worker import Worker
from baton.sim.world import Actor, Violation, World
from baton.worker.decode.stream import DecodeStream

EVERY_SECONDS = 0.5
TOLERATED_SECONDS = 4.0
"""How long a difference may last without an excuse. A pull that was stopped may take
LATEST_FIRST_LOOK_SECONDS to see that."""


class Audit:
    def __init__(self, world: World, network: Network, processes: Mapping[str, SimProcess]) -> None:
        self._world = world
        self._network = network
        self._processes = processes
        self._actor = Actor("audit")
        self._seen: dict[tuple[object, ...], int] = {}
        self._again()

    def _again(self) -> None:
        self._world.at(EVERY_SECONDS, self._actor, self._look)

    def _look(self) -> None:
        wrong = dict((*self._waits(), *self._leaks(), *self._overdue(), *self._pulls(), *self._pauses()))
        self._seen = {what: self._seen.get(what, 0) + 1 for what in wrong}
        for what, count in self._seen.items():
            if count * EVERY_SECONDS > TOLERATED_SECONDS:
                raise Violation(wrong[what])
        self._again()

    def _of(self, kind: type[SimDecode] | type[SimPrefill]) -> Iterator[SimProcess]:
        return (process for process in self._processes.values() if isinstance(process, kind))

    def _healthy(self, a: SimProcess, b: SimProcess) -> bool:
        now = self._world.now
        stalled = any(actor.stalled_until > now for p in (a, b) for actor in (p.loop, p.step_thread))
        stalled |= any(p.hangs_until > now for p in (a, b) if isinstance(p, Worker))
        return not (stalled or self._network.is_cut(a.name, b.name) or self._network.is_slow(a.name, b.name))

    def _waits(self) -> Iterator[tuple[tuple[object, ...], str]]:
        for decode in self._of(SimDecode):
            assert isinstance(decode, SimDecode)
            for name, fetch in decode.fetches.running.items():
                peer = decode.partner(fetch.address)
                if peer is not None and name not in peer.core.leases.running and self._healthy(decode, peer):
                    text = f"{decode.who} waits for {name} at {peer.who}, which knows nothing of it"
                    yield ("waits", decode.who, peer.who, name), f"silence: {text}"

    def _leaks(self) -> Iterator[tuple[tuple[object, ...], str]]:
        for prefill in self._of(SimPrefill):
            assert isinstance(prefill, SimPrefill)
            for name, decode in prefill.under_way():
                unwanted = isinstance(decode, SimDecode) and name not in decode.fetches.running
                if isinstance(decode, SimDecode) and unwanted and self._healthy(decode, prefill):
                    text = f"{prefill.who} holds {name} for {decode.who}, which knows nothing of it"
                    yield ("holds", decode.who, prefill.who, name), f"leak: {text}"

    def _overdue(self) -> Iterator[tuple[tuple[object, ...], str]]:
        """Each node keeps the time limits of what it holds, whatever its peers say."""
        for prefill in self._of(SimPrefill):
            assert isinstance(prefill, SimPrefill)
            leases, grace = prefill.core.leases, prefill.config.lease_grace_seconds
            for name, lease in leases.running.items():
                limit = min(lease.deadline, leases._last_seen[lease.holder] + grace)
                if limit < prefill.clock() and self._healthy(prefill, prefill):
                    text = f"{prefill.who} holds {name} beyond its deadline or its lease"
                    yield ("overdue", prefill.who, name), f"leak: {text}"
        for decode in self._of(SimDecode):
            assert isinstance(decode, SimDecode)
            for key, state in decode.core.unfinished.items():
                if state.request.deadline < decode.clock() and self._healthy(decode, decode):
                    text = f"{decode.who} runs request {key.request} beyond its deadline"
                    yield ("overdue", decode.who, key), f"leak: {text}"

    def _pauses(self) -> Iterator[tuple[tuple[object, ...], str]]:
        """A request is paused at its decode node while its client does not read, and at no other time."""
        gateways = [process for process in self._processes.values() if isinstance(process, SimGateway)]
        for decode in self._of(SimDecode):
            assert isinstance(decode, SimDecode)
            for key, state in decode.core.unfinished.items():
                assert isinstance(key.caller, DecodeStream)
                name = (key.caller.incarnation, key.request)
                for gateway in gateways:
                    paused = gateway.paused(decode.name, key.request)
                    differs = gateway.incarnation == name[0] and paused not in (None, state.request.paused)
                    if differs and self._healthy(gateway, decode):
                        text = f"request {key.request} of {gateway.who} is "
                        text += (
                            "read, and still paused" if state.request.paused else "not read, and not paused"
                        )
                        yield ("pauses", decode.who, name), f"pause: {text} at {decode.who}"

    def _pulls(self) -> Iterator[tuple[tuple[object, ...], str]]:
        for decode in self._of(SimDecode):
            assert isinstance(decode, SimDecode)
            awaited = {fetch.pull for fetch in decode.fetches.running.values()}
            for number in decode.pulls_before_their_step():
                copies = decode.copy_thread.stalled_until <= self._world.now
                if number not in awaited and copies and self._healthy(decode, decode):
                    text = f"pull {number} of {decode.who} waits for its step, and nobody for its pages"
                    yield ("pulls", decode.who, number), f"leak: {text}"
