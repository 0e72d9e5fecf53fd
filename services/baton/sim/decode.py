"""A simulated decode process: worker.decode.shell over simulated streams and pulls."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from baton.config import DecodeConfig
from baton.engine.draft.base import Drafter
from baton.handoff.fetch import Fetches
from baton.handoff.messages import FetchEffect, StartPull
from baton.rpc.errors import BatonError
from baton.sim.draft import SimDrafter
from baton.sim.network import Network, SimLink
from baton.sim.prefill import SimPrefill
from baton.sim.process import Machine
from baton.sim.streams import SimStreams, VirtualDecodeStream
from baton.sim.worker import Worker
from baton.sim.world import Violation
from baton.v1 import decode_pb2
from baton.worker.decode.core import DecodeCore, DecodeOutputs
from baton.worker.decode.peers import PrefillPeers
from baton.worker.decode.remote_prefill import Handoff
from baton.worker.decode.shell import DecodeShell
from baton.worker.peers import PagePeer


class CheckedStream(VirtualDecodeStream):
    """Checks design rule 4 for one stream of a gateway."""

    def __init__(self, incarnation: int, gather: float, who: str) -> None:
        super().__init__(incarnation, gather)
        self._who = who
        self._seen: set[tuple[int, int, int]] = set()
        """Choices that have finished."""
        self._prompts: set[tuple[int, int]] = set()

    def send(self, message: decode_pb2.StepEvents) -> bool:
        for delta in message.tokens:
            self._check_running(delta.request, delta)
            name = (delta.request, delta.attempt, delta.choice)
            if name in self._seen:
                raise Violation(f"terminal: {self._who} sends a token after the last of {name}")
            if delta.finish_reason:
                self._seen.add(name)
        for event in message.events:
            kind = event.WhichOneof("kind")
            if kind in ("prompt", "finished", "failed"):
                self._check_running(event.request, event)
            if kind == "prompt":
                if (event.request, event.attempt) in self._prompts:
                    raise Violation(f"terminal: {self._who} completes the prompt of {event.request} twice")
                self._prompts.add((event.request, event.attempt))
        return super().send(message)

    def _check_running(self, request: int, said: object) -> None:
        if self.attempt_of(request) is None:
            raise Violation(f"terminal: {self._who} says {said} of request {request}, which has ended there")

    def refuse(self, request: int, attempt: int, error: BatonError) -> None:
        if error.reason != "DRAINING":
            raise Violation(f"names: {self._who} refuses request {request}: {error.message}")
        super().refuse(request, attempt, error)


class SimDecode(DecodeShell, Worker[DecodeCore]):
    config: DecodeConfig
    role = "decode"

    def __init__(
        self,
        network: Network,
        name: str,
        life: int,
        config: DecodeConfig,
        machine: Machine,
        before: Worker[Any] | None = None,
    ) -> None:
        super().__init__(network, name, life, config, machine, before)
        self.streams = SimStreams(self, self.world, self.loop)
        self.peers = PrefillPeers(self, config)
        self.start_steps()

    @property
    def fetches(self) -> Fetches[Handoff]:
        return self.core.fetches

    @property
    def busy(self) -> str:
        held = (self.core.requests, len(self.fetches.running), len(self.fetches.pulls), len(self.launched))
        text = "{} requests, {} hand-offs, {} pulls, {} steps, {} lent, "
        text += "{} borrowed, {} borrowing, {} copies, {} images"
        return text.format(*held, *self.shared) if any((*held, *self.shared)) else ""

    def partner(self, address: str) -> SimPrefill | None:
        """The process that this one is connected to there."""
        link = self.links.get(address)
        host = link.partner if link is not None else None
        return host if isinstance(host, SimPrefill) else None

    def pulls_before_their_step(self) -> list[int]:
        """Numbers of the pulls that wait for the step which writes what they are to copy."""
        waiting = [pull.targets for pull in self.pulls if pull.waits]
        running = self.fetches.pulls.running
        return [number for number, pull in running.items() if set(pull.targets) in waiting]

    def make_drafter(self) -> Drafter | None:
        if self.config.draft == "off":
            return None
        rng = self.world.rng(f"drafts {self.name}")
        return SimDrafter(rng, self.machine.windows, rng.choice((0.5, 0.8, 0.95, 1.0)))

    def drain(self) -> None:
        self.announce_drain()

    def make_stream(self, incarnation: int) -> CheckedStream:
        return CheckedStream(incarnation, self.config.message_seconds, self.who)

    def make_link(self, address: str, peer: PagePeer) -> SimLink:
        return self.link(address, peer.hello, peer.received, peer.welcomed, peer.lost)

    def _deliver(self, step: int, outputs: DecodeOutputs, effects: Sequence[FetchEffect]) -> None:
        if self.world.traced:
            for _, output in outputs:
                self.world.note(self.who, f"says   {output}")
            for effect in effects:
                self.world.note(self.who, f"does   {_short(effect)}")
        super()._deliver(step, outputs, effects)


def _short(effect: FetchEffect) -> str:
    """Without the whole request, for the trace."""
    text = f"{type(effect).__name__} {effect.address} {getattr(effect, 'name', '')}"
    return (
        f"{text} {effect.pull} {effect.pairs} after {effect.step}" if isinstance(effect, StartPull) else text
    )
