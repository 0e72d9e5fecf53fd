"""A simulated gateway: routing, attempts, liveness, token log and stop strings of gateway/, in a small shell.
A token's text is its number and a space; clients read at times that the scenario draws."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from google.rpc import status_pb2

from baton.gateway.decode_client import Liveness
from baton.gateway.node_load import NodeLoad
from baton.gateway.resume import ResumeAttempts, ResumePolicy, Wait
from baton.gateway.routing import order_prefill, pick_decode
from baton.gateway.token_log import TokenLog
from baton.rpc.errors import BatonError, cancelled, deadline_exceeded, from_status, unavailable
from baton.sim.checks import Ledger, text_of
from baton.sim.network import Network
from baton.sim.process import SimProcess
from baton.sim.scenario import GatewaySettings, RequestSpec
from baton.sim.world import Violation
from baton.v1 import common_pb2, decode_pb2, inference_pb2
from baton.worker.convert import prompt_logprobs_from
from baton.worker.decode.messages import sampling_to

POLICY = "least-loaded"
"""Routing policy. Cache views are not simulated."""
BOUND_SECONDS = 0.5
"""How much later than its deadline a request may end, while its gateway runs."""


@dataclass(slots=True, eq=False)
class _Running:
    spec: RequestSpec
    number: int
    deadline: float
    log: TokenLog
    attempts: ResumeAttempts
    read_due: bool = False
    """A read of the client is scheduled."""


class _SimNode:
    """A small version of gateway/decode_client.py."""

    def __init__(self, gateway: SimGateway, address: str, silence: float) -> None:
        self.address = address
        self.leaving = False
        self.owed: set[int] = set()
        """Requests cancelled there whose terminal events have not come yet."""
        self._gateway = gateway
        self._liveness = Liveness(silence)
        hello = decode_pb2.GenerateCommand(hello=decode_pb2.DecodeHello(incarnation=gateway.incarnation))
        self.link = gateway.link(address, lambda: hello, self._received, self._welcomed, self._lost)
        self.link.start()
        self._tick()

    def takes(self, request: int) -> bool:
        silent = self._liveness.silent(self._gateway.world.now)
        return self.link.connected and not self.leaving and not silent and request not in self.owed

    def cancel(self, running: _Running) -> None:
        if self.link.connected:
            self.owed.add(running.number)
            cancel = decode_pb2.DecodeCancel(request=running.number, attempt=running.attempts.number)
            self.link.send(decode_pb2.GenerateCommand(cancel=cancel))

    def _welcomed(self, welcome: Any) -> None:
        self.leaving = False

    def _received(self, message: decode_pb2.StepEvents) -> None:
        """In the order in which gateway.decode_node reads a message."""
        self._liveness.heard()
        gateway, address = self._gateway, self.address
        for event in message.events:
            if event.HasField("prompt"):
                gateway.take_prompt(address, event)
        for delta in message.tokens:
            gateway.take_tokens(address, delta)
        for event in message.events:
            if event.HasField("draining"):
                self.leaving = True
            elif event.HasField("turn"):
                gateway.take_turn(address, event)
            elif event.HasField("finished") or event.HasField("failed"):
                self.owed.discard(event.request)
                gateway.take_end(address, event)

    def _lost(self, error: BatonError) -> None:
        self.owed.clear()
        self._liveness.reset()
        ResumeAttempts.node_lost([running.attempts for running in self._gateway.runs_at(self.address)])
        self._gateway.lose(self, unavailable(f"{self.address} was lost", "DECODE_LOST"))

    def _tick(self) -> None:
        world = self._gateway.world
        if self.link.connected:
            wanted = bool(self._gateway.runs_at(self.address))
            if self._liveness.tick(world.now, wanted):
                self.link.send(decode_pb2.GenerateCommand(heartbeat=decode_pb2.DecodeHeartbeat()))
            if self._liveness.silent(world.now):
                self._gateway.lose(self, unavailable(f"{self.address} is silent", "DECODE_SILENT"))
        world.at(self._liveness.interval, self._gateway.loop, self._tick)


class SimGateway(SimProcess):
    def __init__(
        self,
        network: Network,
        name: str,
        life: int,
        ledger: Ledger,
        settings: GatewaySettings,
        decode: tuple[str, ...],
        prefill: tuple[str, ...],
    ) -> None:
        super().__init__(network, name, life)
        self._ledger = ledger
        self._prefill = prefill
        self._policy = ResumePolicy(settings.max_resumes, settings.wait)
        self._running: dict[int, _Running] = {}
        self._nodes = {address: _SimNode(self, address, settings.silence) for address in decode}

    @property
    def busy(self) -> str:
        return f"{len(self._running)} requests" if self._running else ""

    def runs_at(self, address: str) -> list[_Running]:
        return [r for r in self._running.values() if r.attempts.address == address]

    # --- what clients ask -------------------------------------------------------------------------------

    def ask(self, spec: RequestSpec) -> None:
        log = TokenLog(str(spec.number), n=spec.n, stop=spec.stop)
        attempts = ResumeAttempts(log, self._policy, resumable=spec.resume)
        running = _Running(spec, spec.number + 1, self.world.now + spec.timeout, log, attempts)
        self._running[running.number] = running
        self.world.at(spec.timeout, self.loop, lambda: self._expire(running))
        # Made after the gateway's own timer: when both are due at the end of a stall, that one comes first.
        self.world.at(spec.timeout + BOUND_SECONDS, self.loop, lambda: self._look(running))
        self._place(running)

    def cancel(self, spec: RequestSpec) -> None:
        running = self._running.get(spec.number + 1)
        if self._ledger.cancelled(spec.number) and running is not None:
            self._fail(running, cancelled("cancelled by the client"))

    def _look(self, running: _Running) -> None:
        if running.number in self._running:
            raise Violation(
                f"deadline: request {running.spec.number} has not ended within its deadline and a bound"
            )

    def _expire(self, running: _Running) -> None:
        if running.number in self._running:
            self._fail(running, deadline_exceeded("the request's time is over"))

    # --- decode nodes -----------------------------------------------------------------------------------

    def _place(self, running: _Running) -> None:
        spec, attempts = running.spec, running.attempts
        if running.number not in self._running:
            return
        nodes = [address for address, node in self._nodes.items() if node.takes(running.number)]
        try:
            place = attempts.place(nodes, self.world.now, lambda left: self._pick(left, len(spec.prompt)))
        except BatonError as error:
            self._fail(running, error)
            return
        if isinstance(place, Wait):
            self.world.at(place.seconds, self.loop, lambda: self._place(running))
            return
        prefill = [self._figures(address) for address in self._prefill]
        start = decode_pb2.DecodeStart(
            request=running.number,
            token_ids=spec.prompt,
            sampling=sampling_to(spec.params),
            n=spec.n,
            timeout_ms=max(1, int(1000 * (running.deadline - self.world.now))),
            prefill=order_prefill(POLICY, prefill, len(spec.prompt), running.number),
            namespace=spec.namespace,
            priority=spec.priority,
        )
        attempts.fill(start)
        self._nodes[place].link.send(decode_pb2.GenerateCommand(start=start))
        attempts.begin(place)

    def _pick(self, addresses: Sequence[str], tokens: int) -> str:
        return pick_decode(POLICY, [self._figures(address) for address in addresses], tokens)

    def _figures(self, address: str) -> NodeLoad:
        return NodeLoad(address, rows=len(self.runs_at(address)))

    def _current(self, address: str, request: int, attempt: int) -> _Running | None:
        """The request, if the attempt runs there; else what was under way is dropped: it was cancelled here,
        or the attempt is over."""
        running = self._running.get(request)
        return running if running is not None and running.attempts.current(address, attempt) else None

    def take_prompt(self, address: str, event: decode_pb2.DecodeEvent) -> None:
        running = self._current(address, event.request, event.attempt)
        if running is not None:
            running.attempts.progress()
            logprobs = event.prompt.prompt_logprobs
            self._ledger.prompt(running.spec.number, prompt_logprobs_from(logprobs) if logprobs else None)

    def take_tokens(self, address: str, delta: decode_pb2.TokenDelta) -> None:
        running = self._current(address, delta.request, delta.attempt)
        if running is not None:
            running.attempts.progress()
            self._append(running, delta)

    def take_turn(self, address: str, event: decode_pb2.DecodeEvent) -> None:
        running = self._current(address, event.request, event.attempt)
        if running is not None:
            running.attempts.has_turn = True
            begin = decode_pb2.DecodeBegin(request=event.request, attempt=event.attempt)
            self._nodes[address].link.send(decode_pb2.GenerateCommand(begin=begin))

    def take_end(self, address: str, event: decode_pb2.DecodeEvent) -> None:
        running = self._current(address, event.request, event.attempt)
        if running is None:
            return
        if event.HasField("failed"):
            self._end_attempt(running, from_status(event.failed), lost=False)
        else:
            running.attempts.done = True
            self._finish(running)

    def lose(self, node: _SimNode, error: BatonError) -> None:
        for running in self.runs_at(node.address):
            node.cancel(running)
            self._end_attempt(running, error, lost=True)

    def _end_attempt(self, running: _Running, error: BatonError, *, lost: bool) -> None:
        try:
            running.attempts.ended(error, self.world.now, lost=lost)
        except BatonError as last:
            self._fail(running, last)
            return
        if running.attempts.done:
            self._finish(running)
            return
        self._ledger.resumed += bool(running.log.has_output)
        self._place(running)

    def _append(self, running: _Running, delta: decode_pb2.TokenDelta) -> None:
        """Like gateway.requests: a choice ended by a stop string takes no more tokens, and the request
        ends when all choices have ended."""
        choice = running.log.choices[delta.choice]
        for number, token in enumerate(delta.token_ids, 1):
            if choice.finished:
                break
            reason = (
                delta.finish_reason
                if number == len(delta.token_ids)
                else common_pb2.FINISH_REASON_UNSPECIFIED
            )
            choice.append([token], text_of([token]), (), reason)
        if running.log.complete and any(choice.stop_matched for choice in running.log.choices):
            self._finish(running)
        else:
            self._changed(running)

    # --- what clients read ------------------------------------------------------------------------------

    def _changed(self, running: _Running) -> None:
        if not running.read_due:
            running.read_due = True
            delay = self.world.rng(f"client {self.name}").choice((0.0, 0.0, 0.05, 0.3))
            self.world.at(delay, self.loop, lambda: self._read(running))

    def _read(self, running: _Running) -> None:
        running.read_due = False
        number = running.spec.number
        while events := running.log.take():
            for event in events:
                kind = event.WhichOneof("kind")
                if kind == "delta":
                    self._ledger.deliver(number, event.delta.choice, event.delta.token_ids, event.delta.text)
                elif kind == "finished":
                    self._ledger.finished(number)
                else:
                    code, reason, message = event.failed.message.split("|")
                    self._ledger.failed(number, code, reason, message)

    def _finish(self, running: _Running) -> None:
        self._end(running)
        running.log.finish(inference_pb2.Finished())
        self._changed(running)

    def _fail(self, running: _Running, error: BatonError) -> None:
        self._end(running)
        text = f"{error.code.name}|{error.reason}|{error.message}"
        running.log.fail(status_pb2.Status(message=text))
        self._changed(running)

    def _end(self, running: _Running) -> None:
        """Like gateway.requests: cancels what still runs at a decode node."""
        del self._running[running.number]
        node = self._nodes.get(running.attempts.address)
        if node is not None and not running.attempts.done:
            node.cancel(running)
