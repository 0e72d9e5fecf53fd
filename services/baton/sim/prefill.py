"""A simulated prefill process: the shell of prefill/server.py around the real core."""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from dataclasses import dataclass, replace

from baton.handoff.messages import (
    AttemptName,
    Beat,
    CancelPrefill,
    ChunkAnnounced,
    FirstSampled,
    LeaseFinished,
    PrefillFailed,
    PrefillOutput,
    ReleaseLease,
    StartPrefill,
)
from baton.prefill.core import PrefillCore
from baton.sim.network import Endpoint, Host, Network
from baton.sim.process import HOP_SECONDS, Worker, WorkerSettings
from baton.sim.wire import Hello, Welcome
from baton.sim.world import Violation


@dataclass(frozen=True, slots=True)
class PrefillSettings:
    lease_grace: float
    max_leased_fraction: float
    shared: bool
    """Receivers share its memory and see its generations (shm); else it is asked for pages (grpc)."""
    ahead: bool
    """Those that share it want pages announced before their step has retired."""


class _Holder:
    """One stream of a decode node; the object itself is the stream's key in the core."""

    def __init__(self, endpoint: Endpoint) -> None:
        self.endpoint = endpoint
        self.names: set[AttemptName] = set()


class SimPrefill(Worker):
    def __init__(
        self, network: Network, name: str, life: int, worker: WorkerSettings, settings: PrefillSettings
    ) -> None:
        super().__init__(network, name, life, worker)
        self.prefill = settings
        leased = int(worker.pages * settings.max_leased_fraction)
        self.core = PrefillCore(
            self.cache, self.scheduling(), settings.lease_grace, leased, self._flush, self.pool.retire
        )
        self.scheduler, self.side = self.core.scheduler, self.core.side
        self.driver = self.drive(self.core)
        self.babbles_until = 0.0
        """Until then it sends messages early, late, twice, wrong, and in the name of others."""
        self._babble = self.world.rng(f"babble {name}")

    @property
    def busy(self) -> str:
        """What it still holds, for messages; empty: nothing."""
        held = (self.side.requests, len(self.flights), len(self.driver.pipeline.inbox))
        return "{} attempts, {} steps, {} calls".format(*held) if any(held) else ""

    def under_way(self) -> list[tuple[AttemptName, Host]]:
        """Attempts that have not ended, and the hosts at the other ends of their open streams."""
        found = []
        for name, holder in self.side.under_way():
            assert isinstance(holder, _Holder)
            peer = holder.endpoint.peer
            if holder.endpoint.open and peer is not None and peer.open:
                found.append((name, peer.owner))
        return found

    def accept(self, endpoint: Endpoint) -> None:
        holder = _Holder(endpoint)
        endpoint.on_message = lambda message: self._hello(holder, message)
        endpoint.on_end = lambda reason: self._gone(holder)

    def _hello(self, holder: _Holder, message: Hello) -> None:
        holder.endpoint.on_message = lambda command: self._take(holder, command)
        self.driver.call(lambda core, now: core.side.connect(holder, now))
        pool = self.pool if self.prefill.shared else None
        holder.endpoint.send(Welcome(self.incarnation, self.prefill.lease_grace, pool))

    def _gone(self, holder: _Holder) -> None:
        self.driver.call(lambda core, now: core.side.disconnect(holder, now))

    def _take(self, holder: _Holder, message: StartPrefill | CancelPrefill | ReleaseLease | Beat) -> None:
        if isinstance(message, StartPrefill):
            if message.name in holder.names:
                raise Violation(f"names: {message.name} was started twice on one stream of {self.who}")
            holder.names.add(message.name)
            if self.draining:
                failed = PrefillFailed(message.name, "UNAVAILABLE", "DRAINING", "this node is draining")
                holder.endpoint.send((failed,))
                return
        ahead = self.prefill.shared and self.prefill.ahead
        self.driver.call(lambda core, now: core.receive(holder, message, ahead, now))

    def _flush(self, outputs: dict[Hashable, list[PrefillOutput]]) -> None:
        self.world.at(HOP_SECONDS, self.loop, lambda: self._deliver(outputs))

    def _deliver(self, outputs: dict[Hashable, list[PrefillOutput]]) -> None:
        for holder, told in outputs.items():
            assert isinstance(holder, _Holder)
            if self.world.traced:
                for output in told:
                    self.world.note(self.who, f"says   {output}")
            babbles = self.world.now < self.babbles_until
            holder.endpoint.send(tuple(self._garbled(holder, told) if babbles else told))

    def _garbled(self, holder: _Holder, events: list[PrefillOutput]) -> Iterator[PrefillOutput]:
        """Only what a receiver can tell to be wrong: tokens, generations and steps are right."""
        for name in self._names_elsewhere(holder):
            yield FirstSampled(name, ((0, None),), 0, ())
        for event in events:
            how = self._babble.randrange(6)
            if how == 0 and isinstance(event, ChunkAnnounced | FirstSampled):
                yield LeaseFinished(event.name, stood=True)
            elif how == 1:
                yield event
            elif how == 2:
                late, again = self._babble.uniform(0.0, 1.0), (event,)
                self.world.at(late, self.loop, lambda again=again: _send(holder, again))  # type: ignore[misc]
            elif how == 3 and isinstance(event, ChunkAnnounced):
                event = replace(event, pages=event.pages[1:], generations=event.generations[1:], last=True)
            elif how == 4 and isinstance(event, FirstSampled):
                event = replace(event, tokens=(*event.tokens, (0, None)))
            yield event

    def _names_elsewhere(self, holder: _Holder) -> list[AttemptName]:
        """Hand-offs of the node at the other end that other prefill nodes compute."""
        peer = holder.endpoint.peer
        handoffs = getattr(peer.owner, "handoffs", None) if peer is not None else None
        return [name for name, address, _ in handoffs.under_way() if address != self.name] if handoffs else []


def _send(holder: _Holder, events: tuple[PrefillOutput, ...]) -> None:
    holder.endpoint.send(events)
