"""A simulated gateway: routing, token log and stop strings of gateway/, and in place of its shells a simple
caller of decode nodes. A token's text is its number and a space; clients read when they come to it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from google.rpc import status_pb2

from baton.decode.outputs import Done, Failed, Tokens
from baton.gateway.routing import Candidate, order_prefill, pick_decode
from baton.gateway.token_log import TokenLog
from baton.sim.ledger import Ledger, text_of
from baton.sim.network import Network, SimLink
from baton.sim.process import Process
from baton.sim.scenario import RequestSpec
from baton.sim.wire import CancelDecode, Hello, StartDecode
from baton.sim.world import Violation
from baton.v1 import common_pb2, inference_pb2
from baton.worker.convert import FINISH_REASONS

BOUND_SECONDS = 0.5
"""How much later than its deadline a request may end, while its gateway runs."""
RETRYABLE = ("UNAVAILABLE", "RESOURCE_EXHAUSTED")


@dataclass(slots=True, eq=False)
class _Running:
    spec: RequestSpec
    number: int
    deadline: float
    log: TokenLog
    attempt: int = 0
    node: str = ""
    tried: set[str] = field(default_factory=set)
    read_due: bool = False
    """The client will come to read."""

    @property
    def delivered(self) -> tuple[int, ...]:
        """What a resume carries; only a request of one choice can be resumed."""
        return tuple(self.log.choices[0].token_ids) if self.spec.n == 1 else ()

    @property
    def has_output(self) -> bool:
        return self.log.output_tokens > 0


class SimGateway(Process):
    def __init__(
        self,
        network: Network,
        name: str,
        life: int,
        ledger: Ledger,
        decode: tuple[str, ...],
        prefill: tuple[str, ...],
    ) -> None:
        super().__init__(network, name, life)
        self._ledger = ledger
        self._prefill = prefill
        self._running: dict[int, _Running] = {}
        self._links: dict[str, SimLink] = {}
        for address in decode:
            self._links[address] = self._connect(address)

    @property
    def busy(self) -> str:
        return f"{len(self._running)} requests" if self._running else ""

    def _connect(self, address: str) -> SimLink:
        link = self.link(
            address,
            lambda: Hello(self.incarnation),
            lambda welcome: None,
            lambda outputs: self._received(address, outputs),
            lambda reason: self._lost(address),
        )
        link.start()
        return link

    # --- what clients ask -------------------------------------------------------------------------------

    def ask(self, spec: RequestSpec) -> None:
        log = TokenLog(str(spec.number), n=spec.n, stop=spec.stop)
        running = _Running(spec, spec.number + 1, self.world.now + spec.timeout, log)
        self._running[running.number] = running
        self.world.at(spec.timeout, self.loop, lambda: self._expire(running))
        # Made after the gateway's own timer: when both are due at the end of a stall, that one comes first.
        self.world.at(spec.timeout + BOUND_SECONDS, self.loop, lambda: self._look(running))
        self._attempt(running)

    def cancel(self, spec: RequestSpec) -> None:
        running = self._running.get(spec.number + 1)
        if self._ledger.cancelled(spec.number) and running is not None:
            self._fail(running, "CANCELLED", "CANCELLED", "cancelled by the client")

    def _look(self, running: _Running) -> None:
        if running.number in self._running:
            raise Violation(
                f"deadline: request {running.spec.number} has not ended within its deadline and a bound"
            )

    def _expire(self, running: _Running) -> None:
        if running.number in self._running:
            self._fail(running, "DEADLINE_EXCEEDED", "DEADLINE_EXCEEDED", "the request's time is over")

    # --- decode nodes -----------------------------------------------------------------------------------

    def _attempt(self, running: _Running) -> None:
        spec = running.spec
        while True:
            load = [r.node for r in self._running.values()]
            usable = [Candidate(a, load.count(a)) for a, link in self._links.items() if link.connected]
            address = pick_decode(usable, "", running.tried)
            if address is None:
                self._fail(running, "UNAVAILABLE", "NO_DECODE_NODE", "no decode node can be reached")
                return
            running.tried.add(address)
            start = StartDecode(
                running.number,
                running.attempt,
                spec.prompt,
                running.delivered,
                spec.params,
                spec.n,
                spec.priority,
                running.deadline - self.world.now,
                tuple(order_prefill(self._prefill, running.number)),
            )
            if self._links[address].send(start):
                running.node = address
                return

    def _received(self, address: str, outputs: tuple[Any, ...]) -> None:
        for output in outputs:
            running = self._running.get(output.request)
            if running is None or running.node != address:
                continue  # cancelled here, or an attempt that is over: what was under way is dropped
            if isinstance(output, Tokens):
                self._append(running, output)
            elif isinstance(output, Done) and output.attempt == running.attempt:
                running.node = ""
                self._finish(running)
            elif isinstance(output, Failed) and output.attempt == running.attempt:
                self._retry(running, output.code, output.reason, output.message)

    def _append(self, running: _Running, tokens: Tokens) -> None:
        """As gateway.requests: a choice that a stop string has ended takes no more, and the request ends when
        all have ended."""
        choice = running.log.choices[tokens.choice]
        if choice.finished:
            return
        unspecified = common_pb2.FINISH_REASON_UNSPECIFIED
        reason = FINISH_REASONS[tokens.finish] if tokens.finish is not None else unspecified
        choice.append([tokens.token], text_of([tokens.token]), (), reason)
        if running.log.complete and any(choice.stop_matched for choice in running.log.choices):
            self._finish(running)
        else:
            self._changed(running)

    def _finish(self, running: _Running) -> None:
        self._settle(running)
        running.log.finish(inference_pb2.Finished())
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

    def _lost(self, address: str) -> None:
        for running in [r for r in self._running.values() if r.node == address]:
            self._retry(running, "UNAVAILABLE", "DECODE_LOST", f"{address} was lost")

    def _retry(self, running: _Running, code: str, reason: str, message: str) -> None:
        """Elsewhere, with the tokens delivered so far; one choice only, for a resume has one."""
        running.node = ""
        left = [a for a, link in self._links.items() if link.connected and a not in running.tried]
        if running.log.complete:
            self._finish(running)
            return
        if code not in RETRYABLE or not left or (running.has_output and running.spec.n > 1):
            self._fail(running, code, reason, message)
            return
        running.attempt += 1
        self._attempt(running)

    def _fail(self, running: _Running, code: str, reason: str, message: str) -> None:
        self._settle(running)
        running.log.fail(status_pb2.Status(message=f"{code}|{reason}|{message}"))
        self._changed(running)

    def _settle(self, running: _Running) -> None:
        del self._running[running.number]
        if running.node:
            self._links[running.node].send(CancelDecode(running.number, running.attempt))
