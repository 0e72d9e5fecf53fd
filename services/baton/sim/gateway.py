"""A simulated gateway: routing of gateway/, and in place of its shells a simple caller of decode nodes."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from baton.decode.outputs import Done, Failed, Tokens
from baton.gateway.routing import Candidate, order_prefill, pick_decode
from baton.sim.ledger import BOUND_SECONDS, Ledger
from baton.sim.network import Network, SimLink
from baton.sim.process import Process
from baton.sim.scenario import RequestSpec
from baton.sim.wire import CancelDecode, Hello, StartDecode

RETRYABLE = ("UNAVAILABLE", "RESOURCE_EXHAUSTED")


@dataclass(slots=True, eq=False)
class _Running:
    spec: RequestSpec
    number: int
    deadline: float
    attempt: int = 0
    node: str = ""
    tried: set[str] = field(default_factory=set)
    output: list[int] = field(default_factory=list)


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
        self._cancelled: dict[tuple[str, int], int] = {}
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
        running = _Running(spec, spec.number + 1, self.world.now + spec.timeout)
        self._running[running.number] = running
        self.world.at(spec.timeout, self.loop, lambda: self._expire(running))
        # Made after the gateway's own timer: when both are due at the end of a stall, that one comes first.
        self.world.at(spec.timeout + BOUND_SECONDS, self.loop, lambda: self._ledger.overdue(spec.number))
        self._attempt(running)

    def cancel(self, spec: RequestSpec) -> None:
        running = self._running.get(spec.number + 1)
        if self._ledger.cancelled(spec.number) and running is not None:
            self._fail(running, "CANCELLED", "CANCELLED", "cancelled by the client")

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
                tuple(running.output),
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
                if isinstance(output, Done | Failed):
                    self._cancelled.pop((address, output.request), None)
            elif isinstance(output, Tokens):
                running.output.append(output.token)
                self._ledger.deliver(running.spec.number, output.choice, output.token)
            elif isinstance(output, Done) and output.attempt == running.attempt:
                del self._running[running.number]
                self._ledger.finished(running.spec.number)
            elif isinstance(output, Failed) and output.attempt == running.attempt:
                self._retry(running, output.code, output.reason, output.message)

    def _lost(self, address: str) -> None:
        for running in [r for r in self._running.values() if r.node == address]:
            self._retry(running, "UNAVAILABLE", "DECODE_LOST", f"{address} was lost")

    def _retry(self, running: _Running, code: str, reason: str, message: str) -> None:
        """Elsewhere, with the tokens delivered so far; one choice only, for a resume has one."""
        running.node = ""
        left = [a for a, link in self._links.items() if link.connected and a not in running.tried]
        if code not in RETRYABLE or not left or (running.output and running.spec.n > 1):
            self._fail(running, code, reason, message)
            return
        running.attempt += 1
        self._attempt(running)

    def _fail(self, running: _Running, code: str, reason: str, message: str) -> None:
        del self._running[running.number]
        if running.node:
            self._cancelled[running.node, running.number] = running.attempt
            self._links[running.node].send(CancelDecode(running.number, running.attempt))
        self._ledger.failed(running.spec.number, code, reason, message)
