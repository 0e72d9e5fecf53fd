"""A simulated prefill process: worker.prefill.shell over simulated streams."""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from dataclasses import replace
from typing import Any

from baton.config import PrefillConfig
from baton.handoff.messages import AttemptName, ChunkAnnounced, FirstSampled, LeaseFinished, PrefillOutput
from baton.sim.network import Host, Network
from baton.sim.process import Machine
from baton.sim.streams import SimStreams, VirtualPrefillStream
from baton.sim.worker import Worker
from baton.worker.prefill.core import PrefillCore
from baton.worker.prefill.shell import PrefillShell
from baton.worker.sources.sharing import LeaseOutputs


class SimPrefill(PrefillShell, Worker[PrefillCore]):
    config: PrefillConfig
    role = "prefill"

    def __init__(
        self,
        network: Network,
        name: str,
        life: int,
        config: PrefillConfig,
        machine: Machine,
        before: Worker[Any] | None = None,
    ) -> None:
        super().__init__(network, name, life, config, machine, before)
        self.streams = SimStreams(self, self.world, self.loop)
        self.babbles_until = 0.0
        """Until then it sends messages early, late, twice, wrong, and in the name of others."""
        self._babble = self.world.rng(f"babble {name}")
        self.start_steps()

    @property
    def busy(self) -> str:
        """What it still holds, for messages; empty: nothing."""
        held = (self.core.requests, len(self.launched), len(self.steps.pipeline.inbox), *self.shared)
        text = "{} attempts, {} steps, {} calls, {} lent, {} borrowed, {} borrowing, {} copies, "
        text += "{} images"
        return text.format(*held) if any(held) else ""

    def under_way(self) -> list[tuple[AttemptName, Host]]:
        """Attempts that have not ended, and the hosts at the other ends of their open streams."""
        held = ((name, lease.holder) for name, lease in self.core.leases.running.items())
        hosts = ((name, self._peer(holder)) for name, holder in held)
        return [(name, host) for name, host in hosts if host is not None]

    def _peer(self, holder: Hashable) -> Host | None:
        assert isinstance(holder, VirtualPrefillStream)
        endpoint = self.streams.endpoints.get(holder)
        peer = endpoint.peer if endpoint is not None and endpoint.open else None
        return peer.owner if peer is not None and peer.open else None

    def make_stream(self, incarnation: int) -> VirtualPrefillStream:
        return VirtualPrefillStream(incarnation)

    def retire(self, step: int) -> None:
        self.pool.retire(step)

    def _deliver(self, outputs: LeaseOutputs) -> None:
        if self.world.now < self.babbles_until:
            outputs = {holder: list(self._garbled(holder, sent)) for holder, sent in outputs.items()}
        self._send(outputs)

    def _send(self, outputs: LeaseOutputs) -> None:
        if self.world.traced:
            for sent in outputs.values():
                for output in sent:
                    self.world.note(self.who, f"says   {output}")
        super()._deliver(outputs)

    def _garbled(self, holder: Hashable, events: list[PrefillOutput]) -> Iterator[PrefillOutput]:
        """Only what a receiver can tell to be wrong: tokens, generations and steps are right."""
        for name in self._names_elsewhere(holder):
            yield FirstSampled(name, ((0, None),), 0, ())
        for event in events:
            how = self._babble.randrange(7)
            if how == 0 and isinstance(event, ChunkAnnounced | FirstSampled):
                yield LeaseFinished(event.name, stood=True)
            elif how == 1:
                yield event
            elif how == 2:
                late, again = self._babble.uniform(0.0, 1.0), {holder: [event]}
                self.world.at(late, self.loop, lambda again=again: self._send(again))  # type: ignore[misc]
            elif how == 3 and isinstance(event, ChunkAnnounced):
                short = (replace(g, pages=g.pages[1:], generations=g.generations[1:]) for g in event.groups)
                event = replace(event, groups=tuple(short), last=True)
            elif how == 5 and isinstance(event, ChunkAnnounced) and len(event.groups[0].pages) > 1:
                first, *rest = event.groups
                twice, generations = ((*each[:-1], each[0]) for each in (first.pages, first.generations))
                event = replace(event, groups=(replace(first, pages=twice, generations=generations), *rest))
            elif how == 4 and isinstance(event, FirstSampled):
                event = replace(event, tokens=(*event.tokens, (0, None)))
            yield event

    def _names_elsewhere(self, holder: Hashable) -> list[AttemptName]:
        """Hand-offs of the node at the other end that other prefill nodes compute."""
        fetches = getattr(self._peer(holder), "fetches", None)
        running = fetches.running.values() if fetches is not None else ()
        return [fetch.name for fetch in running if fetch.address != self.name]
