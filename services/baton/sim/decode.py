"""A simulated decode process: the shells of decode/server.py and decode/peers.py around the real core."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from typing import Any

from baton.decode.core import DecodeCore
from baton.decode.types import DecodePolicy, Done, Failed, Key, Output, Peer, Prompt, Tokens
from baton.engine.request import Request
from baton.handoff.decode_side import DecodeSide
from baton.handoff.messages import DecodeEffect, StartPull, StopPull
from baton.sim.model import SimPool
from baton.sim.network import Endpoint, Network, SimLink
from baton.sim.prefill import SimPrefill
from baton.sim.process import HOP_SECONDS, Worker, WorkerSettings
from baton.sim.transport import Pull
from baton.sim.wire import CancelDecode, Draining, Heartbeat, Hello, StartDecode, Welcome
from baton.sim.world import Violation

MESSAGE_SECONDS = 0.005


class _Caller:
    """One stream of a gateway; the object itself is the stream's key in the core."""

    def __init__(self, node: SimDecode, endpoint: Endpoint) -> None:
        self.incarnation = 0
        self.running: dict[int, int] = {}
        self.ended: set[int] = set()
        self._node = node
        self.endpoint = endpoint
        self._unsent: list[Output] = []
        self._seen: set[tuple[int, int, int]] = set()
        """Choices that have finished."""
        self._prompts: set[tuple[int, int]] = set()

    def put(self, output: Output) -> None:
        """Checks design rule 4 for this stream; then the outbox, which may merge steps."""
        self._check(output)
        if isinstance(output, Done | Failed):
            self.running.pop(output.request, None)
            self.ended.add(output.request)
        if not self._unsent:
            delay = self._node.world.rng(f"outbox {self._node.name}").choice((0.0, MESSAGE_SECONDS))
            self._node.world.at(delay, self._node.loop, self._send)
        self._unsent.append(output)

    def _check(self, output: Output) -> None:
        number, who = output.request, self._node.who
        if number not in self.running:
            raise Violation(f"terminal: {who} says {output} of request {number}, which has ended there")
        if isinstance(output, Tokens):
            name = (number, output.attempt, output.choice)
            if name in self._seen:
                raise Violation(f"terminal: {who} sends a token after the last of request {number}")
            if output.finish is not None:
                self._seen.add(name)
        elif isinstance(output, Prompt):
            if (number, output.attempt) in self._prompts:
                raise Violation(f"terminal: {who} completes the prompt of request {number} twice")
            self._prompts.add((number, output.attempt))

    def _send(self) -> None:
        unsent, self._unsent = self._unsent, []
        self.endpoint.send(tuple(unsent))


class _Prefill:
    """A prefill node as this process sees it: usable once its pool has been opened."""

    def __init__(self, node: SimDecode, address: str) -> None:
        self.address = address
        self.usable = False
        self.pool: SimPool | None = None
        self.pulls: list[Pull] = []
        """Pulls of the receiver that was opened last."""
        self._node = node
        self._session = 0
        self.link: SimLink = node.link(
            address, lambda: Hello(node.incarnation), self._welcomed, self._received, self._lost
        )
        self.link.start()

    def _welcomed(self, welcome: Welcome) -> None:
        self._session += 1
        session = self._session
        delay = self._node.world.rng(f"open {self._node.name}").uniform(0.0, 0.02)
        self._node.world.at(delay, self._node.loop, lambda: self._open(welcome, session))

    def _open(self, welcome: Welcome, session: int) -> None:
        if session != self._session or not self.link.connected:
            return
        self.pool, self.pulls, self.usable = welcome.pool, [], True
        grace = welcome.lease_grace
        self._node.driver.call(lambda core, now: core.handoffs.shorten_beat(grace))
        self._changed(True, "")

    def _received(self, messages: tuple[Any, ...]) -> None:
        address = self.address

        self._node.driver.call(lambda core, now: core.receive(address, messages, now))

    def _lost(self, reason: str) -> None:
        self._session += 1
        self.pool, self.usable = None, False
        for pull in self.pulls:
            pull.close("the receiver is closed")
        self._changed(False, reason)

    def _changed(self, up: bool, reason: str) -> None:
        address = self.address
        peer = Peer(up=up, since=self._node.clock() if up else 0.0, transport="sim")
        self._node.driver.call(lambda core, now: core.peer_changed(address, peer, reason, now))


@dataclass(frozen=True, slots=True)
class DecodeSettings:
    local_prefill_tokens: int
    fallback_tokens: int
    silence: float
    pull_seconds: float
    pull_pace: float
    """Seconds for half a page."""


class SimDecode(Worker):
    def __init__(
        self, network: Network, name: str, life: int, worker: WorkerSettings, settings: DecodeSettings
    ) -> None:
        super().__init__(network, name, life, worker)
        policy = DecodePolicy(
            settings.local_prefill_tokens, settings.fallback_tokens, settings.silence, settings.pull_seconds
        )
        self.core = DecodeCore(self.cache, self.scheduling(), policy, self._flush)
        self.scheduler = self.core.scheduler
        self.driver = self.drive(self.core)
        self.pull_pace = settings.pull_pace
        self.pull_fails_after: int | None = None
        """The next pull breaks after this many pieces."""
        self._callers: list[_Caller] = []
        self._peers: dict[str, _Prefill] = {}
        self._pulls: dict[int, Pull] = {}

    @property
    def handoffs(self) -> DecodeSide:
        return self.core.handoffs

    @property
    def busy(self) -> str:
        held = (self.core.requests, self.core.handoffs.active, self.core.handoffs.pulls, len(self.flights))
        return "{} requests, {} hand-offs, {} pulls, {} steps".format(*held) if any(held) else ""

    def partner(self, address: str) -> SimPrefill | None:
        """The process that this one is connected to there."""
        host = self._peers[address].link.partner
        return host if isinstance(host, SimPrefill) else None

    def pulls_before_their_step(self) -> list[int]:
        """Numbers of the pulls that wait for the step which writes what they are to copy."""
        return [number for number, pull in self._pulls.items() if pull.waits]

    def check(self) -> None:
        super().check()
        for pull in self._pulls.values():
            for flight in self.flights:
                for row in flight.plan.rows:
                    first = row.start // self.pool.page_size
                    last = (row.start + row.count - 1) // self.pool.page_size
                    both = pull.targets.intersection(row.pages[first : last + 1])
                    if both:
                        raise Violation(f"writer: a step and a pull of {self.who} both write {sorted(both)}")

    # --- callers ----------------------------------------------------------------------------------------

    def drain(self) -> None:
        super().drain()
        for caller in self._callers:
            if caller.incarnation:  # else it follows the welcome
                caller.endpoint.send((Draining(),))

    def hand_back(self) -> None:
        self.driver.call(lambda core, now: core.hand_back(now))

    def accept(self, endpoint: Endpoint) -> None:
        caller = _Caller(self, endpoint)
        self._callers.append(caller)
        endpoint.on_message = lambda message: self._hello(caller, endpoint, message)
        endpoint.on_end = lambda reason: self.driver.call(lambda core, now: core.caller_gone(caller, now))

    def _hello(self, caller: _Caller, endpoint: Endpoint, hello: Hello) -> None:
        caller.incarnation = hello.incarnation
        endpoint.on_message = lambda message: self._take(caller, message)
        endpoint.send(Welcome(self.incarnation))
        if self.draining:
            endpoint.send((Draining(),))

    def _answer(self, caller: _Caller) -> None:
        def send() -> None:
            caller.endpoint.send(())

        self.world.at(HOP_SECONDS, self.loop, send)

    def _take(self, caller: _Caller, message: StartDecode | CancelDecode | Heartbeat) -> None:
        if isinstance(message, Heartbeat):
            self.driver.call(lambda core, now: self._answer(caller))
            return
        number = message.request
        if isinstance(message, StartDecode):
            self._start(caller, message)
        elif caller.running.get(number) == message.attempt:
            self.driver.call(lambda core, now: core.cancel(Key(caller, number), now))
        elif number not in caller.ended:
            raise Violation(f"names: {self.who} is asked to cancel {message}, of which it knows nothing")

    def _start(self, caller: _Caller, start: StartDecode) -> None:
        if start.request in caller.running:
            raise Violation(f"names: request {start.request} was started twice on a stream of {self.who}")
        caller.running[start.request] = start.attempt
        if self.draining:
            caller.put(Failed(start.request, start.attempt, "UNAVAILABLE", "DRAINING", "draining"))
            return
        key = Key(caller, start.request)
        request = Request(
            key=key,
            prompt=start.prompt,
            delivered=start.delivered,
            params=start.params,
            n=start.n,
            namespace=start.namespace,
            priority=start.priority,
            deadline=self.clock() + start.seconds,
            failed_steps=start.failed_steps,
        )
        for address in start.prefill:
            if address not in self._peers:
                self._peers[address] = _Prefill(self, address)
        gateway, attempt, prefill = caller.incarnation, start.attempt, start.prefill
        self.driver.call(lambda core, now: core.start(key, gateway, attempt, request, prefill, now))

    # --- what the core has decided ----------------------------------------------------------------------

    def _flush(self, step: int, outputs: list[tuple[Hashable, Output]], effects: list[DecodeEffect]) -> None:
        self.world.at(HOP_SECONDS, self.loop, lambda: self._deliver(outputs, effects))

    def _deliver(self, outputs: list[tuple[Hashable, Output]], effects: list[DecodeEffect]) -> None:
        for caller, output in outputs:
            assert isinstance(caller, _Caller)
            if self.world.traced:
                self.world.note(self.who, f"says   {output}")
            caller.put(output)
        for effect in effects:
            if self.world.traced:
                self.world.note(self.who, f"does   {_short(effect)}")
            peer = self._peers[effect.address]
            if isinstance(effect, StartPull):
                self._pull(peer, effect)
            elif isinstance(effect, StopPull):
                if effect.pull in self._pulls:
                    self._pulls[effect.pull].close("the pull was interrupted")
            else:
                peer.link.send(effect)

    def _pull(self, peer: _Prefill, effect: StartPull) -> None:
        def ended(error: str | None, generations: list[int] | None) -> None:
            del self._pulls[effect.pull]
            if self.world.traced:
                self.world.note(self.who, f"pulled {effect.pull} {error or 'well'} {generations}")
            self.driver.call(lambda core, now: core.handoffs.pull_ended(effect.pull, error, generations, now))

        host = self.network.host(effect.address)
        server = host if isinstance(host, SimPrefill) and peer.pool is None else None
        fail_after, self.pull_fails_after = self.pull_fails_after, None
        if not peer.usable or (peer.pool is None and server is None):
            pull = Pull(self, (), 0, [], SimPool(1, 2), None, ended, 0)
        else:
            pull = Pull(self, effect.pairs, effect.step, peer.pulls, peer.pool, server, ended, fail_after)
        self._pulls[effect.pull] = pull


def _short(effect: DecodeEffect) -> str:
    """Without the whole request, for the trace."""
    text = f"{type(effect).__name__} {effect.address} {getattr(effect, 'name', '')}"
    return (
        f"{text} {effect.pull} {effect.pairs} after {effect.step}" if isinstance(effect, StartPull) else text
    )
