"""A simulated deployment: its processes, their faults, and its end at rest."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from baton.engine.request import EngineRequest
from baton.engine.sampling_params import SamplingParams
from baton.handoff.messages import AttemptName, CancelPrefill, ReleaseLease, StartPrefill
from baton.kvcache import BlockTable
from baton.sim.audit import Audit
from baton.sim.checks import Ledger
from baton.sim.decode import SimDecode
from baton.sim.driver import StepDriver
from baton.sim.encode import SimEncode
from baton.sim.faults import Fault
from baton.sim.gateway import SimGateway
from baton.sim.network import Endpoint, Network
from baton.sim.prefill import SimPrefill
from baton.sim.process import SimProcess
from baton.sim.runner import Escaped, Killed
from baton.sim.scenario import Scenario
from baton.sim.scenario_requests import RequestSpec
from baton.sim.worker import Worker
from baton.sim.world import Actor, Trace, Violation, World
from baton.v1 import prefill_pb2
from baton.worker.core import is_quiet
from baton.worker.handoff_messages import request_for
from baton.worker.process import config_of
from baton.worker.ranks.runner import RanksLost

AnyProcess = SimGateway | SimPrefill | SimDecode | SimEncode
_LOOK_EVERY = 16
"""Events between two checks whether everything has come to rest."""

STOP_SECONDS = 0.05
"""From handing back what runs to the end of the process."""

_FAILED_SECONDS = 0.35
"""From an error that escapes the core to the end of the process: what its callers get of it is on the way no
longer than that, unless a fault slows it."""

_QUIET_SECONDS = 3.0
"""A change of role is given up if something is still under way after this time."""
_STEP_SECONDS = 3.0
"""A device fault without a step to hit ends after this time."""


class SimCluster:
    def __init__(self, scenario: Scenario, trace: Trace | None = None) -> None:
        self.world = World(scenario.seed, trace)
        self.scenario = scenario
        self.ledger = Ledger(self.world, scenario)
        self.network = Network(self.world, scenario.latency)
        self.processes: dict[str, AnyProcess] = {}
        self._fate = Actor("fate")
        self._ended_by_poison = 0
        self.role_changes = 0
        self._lives: dict[str, int] = {}
        self._asked: dict[int, SimGateway] = {}
        self._prefill = {f"p{i}": settings for i, settings in enumerate(scenario.prefill)}
        self._decode = {f"d{i}": settings for i, settings in enumerate(scenario.decode)}
        self._encode = {f"e{i}": settings for i, settings in enumerate(scenario.encode)}
        gateways = [f"g{i}" for i in range(scenario.gateways)]
        for name in (*self._prefill, *self._decode, *self._encode, *gateways):
            self._start(name)
        Audit(self.world, self.network, self.processes)
        for spec in scenario.requests:
            self.world.at(spec.at, self._fate, _bind(self._ask, spec))
        for fault in scenario.faults:
            self.world.at(fault.at, self._fate, _bind(self._strike, fault))

    def run(self, max_steps: int | None = None) -> None:
        """Runs until everything has come to rest, or for `max_steps` events. Raises Violation."""
        world, end = self.world, self.scenario.end
        while max_steps is None or world.steps < max_steps:
            if not world.step():
                return
            if world.now > end:
                raise Violation(f"quiescence: no rest at {world.now:.1f} s: {self._busy()}")
            if world.steps % _LOOK_EVERY == 0 and self._at_rest():
                for process in self.processes.values():
                    process.check_idle()
                return

    @property
    def pulled_pages(self) -> int:
        decode = (process for process in self.processes.values() if isinstance(process, SimDecode))
        return sum(process.fetches.counters.pulled_pages for process in decode)

    @property
    def borrowed_pages(self) -> int:
        workers = (process for process in self.processes.values() if isinstance(process, Worker))
        return sum(worker.core.sharing.borrower.counters.pulled_pages for worker in workers)

    @property
    def encoded_images(self) -> int:
        nodes = (process for process in self.processes.values() if isinstance(process, SimEncode))
        return sum(node.batches.counters.images for node in nodes if node.batches is not None)

    @property
    def disk_pages(self) -> int:
        return sum(disk.read_pages for disk in self.network.disks.values())

    def _at_rest(self) -> bool:
        return self.world.now > self.scenario.calm and self.ledger.complete and not self._busy()

    def _busy(self) -> str:
        said = (f"{process.who} has {process.busy}" for process in self.processes.values() if process.busy)
        return "; ".join(said)

    # --- processes --------------------------------------------------------------------------------------

    def _start(self, name: str) -> None:
        life = self._lives[name] = self._lives.get(name, 0) + 1
        if name in self._prefill:
            self.processes[name] = SimPrefill(self.network, name, life, *self._prefill[name])
        elif name in self._decode:
            self.processes[name] = SimDecode(self.network, name, life, *self._decode[name])
        elif name in self._encode:
            self.processes[name] = SimEncode(self.network, name, life, self._encode[name])
        else:
            peers = (tuple(self._decode), tuple(self._prefill), tuple(self._encode))
            settings = self.scenario.gateway
            gateway = SimGateway(self.network, name, life, self.ledger, settings, *peers)
            if gateway.roles is not None:
                gateway.roles.change_role = self._change_role_of
            self.processes[name] = gateway
        process = self.processes[name]
        self._tell_roles(name)
        if isinstance(process, Worker):
            process.ending = lambda error: self._ended(process, error)
        self.world.note(name, f"starts, life {life}")

    def _tell_roles(self, name: str) -> None:
        """A worker says to all gateways what it is, or all workers to a gateway; if roles change at all."""
        if not any(fault.kind == "role" for fault in self.scenario.faults):
            return
        rng = self.world.rng(f"roles {name}")
        for gateway in [each for each in self.processes.values() if isinstance(each, SimGateway)]:
            for worker in [each for each in self.processes.values() if isinstance(each, Worker)]:
                if name in (gateway.name, worker.name):
                    told = partial(gateway.nodes.told_role, worker.name, worker.role)
                    self.world.at(rng.uniform(0.0, 1.0), gateway.loop, told)

    def _change_role_of(self, worker: Worker[Any], seconds: float) -> bool:
        """By a gateway. False: it keeps its role."""
        if worker.draining or worker.ranks is not None or worker.host_tier is not None:
            return False
        assert isinstance(worker, SimPrefill | SimDecode)
        self._change_role(Fault(self.world.now, "role", worker.name, seconds=seconds), worker)
        return True

    def _change_role(self, fault: Fault, old: SimPrefill | SimDecode) -> None:
        """Follows worker.process: drains for a while, hands back, and once nothing is under way another
        node goes on with the engine. Given up if something does not end."""
        if old.draining or old.ranks is not None or old.host_tier is not None:
            return
        began = self.world.now
        self.world.at(0.0, old.loop, old.announce_drain)

        def at(seconds: float, call: Callable[[], None]) -> None:
            self.world.at(seconds, old.loop, call)

        def hand_back() -> None:
            old.hand_back()
            at(STOP_SECONDS, close)

        def close() -> None:
            old.close_streams()
            at(0.0, ask)

        def ask() -> None:
            if self.world.now < began + fault.seconds + _QUIET_SECONDS:
                steps: StepDriver[Any] = old.steps
                steps.call(lambda core, _: old.post(swap if is_quiet(core) else later))
            else:
                old.closed = old.draining = False

        def later() -> None:
            at(0.01, ask)

        def swap() -> None:
            if self.processes.get(old.name) is old:
                self._give_role(old)

        at(fault.seconds, hand_back)

    def _give_role(self, old: SimPrefill | SimDecode) -> None:
        """The other one. All of the old one's threads end; the last calls of its step thread are made."""
        name, first = old.name, self._prefill.get(old.name) or self._decode[old.name]
        roles: Any = self._decode if isinstance(old, SimPrefill) else self._prefill
        config: Any = config_of(first[0], roles.get(name, next(iter(roles.values())))[0])
        life = self._lives[name] = self._lives[name] + 1
        old.crash(silently=False)
        steps: StepDriver[Any] = old.steps
        while steps.pipeline.inbox:
            steps.pipeline.inbox.popleft()(steps.pipeline.core, old.clock())
        old.cache.check(idle=True)
        kind = SimDecode if isinstance(old, SimPrefill) else SimPrefill
        new: Any = kind(self.network, name, life, config, old.machine, old)
        self.processes[name] = new
        new.ending = lambda error: self._ended(new, error)
        self.role_changes += 1
        self.world.note(name, f"is a {new.role} node, life {life}")
        self._tell_roles(name)

    def _ask(self, spec: RequestSpec) -> None:
        gateway = self.processes.get(f"g{spec.gateway}")
        if not isinstance(gateway, SimGateway):
            self.ledger.lost(spec.number)  # no process listens: the client cannot connect
            return
        self.world.note("client", f"{spec.number} asks {gateway.who}: {len(spec.prompt)} tokens, n {spec.n}")
        self._asked[spec.number] = gateway
        self.world.at(0.0, gateway.loop, lambda: gateway.ask(spec))
        if spec.cancel_after is not None:
            self.world.at(spec.cancel_after, gateway.loop, lambda: gateway.cancel(spec))

    # --- faults -----------------------------------------------------------------------------------------

    def _strike(self, fault: Fault) -> None:
        self.world.note("fault", str(fault))
        if fault.kind == "cut":
            self.network.cut(fault.target, fault.other, fault.seconds)
        elif fault.kind == "drop":
            self.network.drop(fault.target, fault.other)
        elif fault.kind == "slow":
            self.network.slow(fault.target, fault.other, float(fault.value), fault.seconds)
        else:
            process = self.processes.get(fault.target)
            if process is not None:
                self._strike_process(fault, process)

    def _strike_process(self, fault: Fault, process: AnyProcess) -> None:
        if fault.kind == "crash":
            self._crash(process, fault.seconds, silently=bool(fault.value))
        elif fault.kind == "stall":
            process.stall(fault.seconds, fault.value)
        elif fault.kind == "drain":
            process.drain()
            self.world.at(fault.seconds, self._fate, lambda: self._stop(process))
        elif fault.kind == "role" and isinstance(process, SimPrefill | SimDecode):
            self._change_role(fault, process)
        elif fault.kind == "pull" and isinstance(process, Worker):
            process.pull_fails_after = fault.value
        elif fault.kind == "step" and isinstance(process, Worker):
            process.fail_next_read = bool(fault.value)
            process.runner.fail_next_launch = not fault.value
            self.world.at(_STEP_SECONDS, self._fate, lambda: _repair(process))
        elif fault.kind == "hang" and isinstance(process, Worker):
            process.hang(fault.seconds)
        elif fault.kind == "kill-rank" and isinstance(process, Worker):
            process.kill_rank(fault.value)
        elif fault.kind == "stall-rank" and isinstance(process, Worker):
            process.stall_rank(fault.value, fault.seconds)
        elif fault.kind == "babble" and isinstance(process, SimPrefill):
            process.babbles_until = self.world.now + fault.seconds
        elif fault.kind == "lie" and isinstance(process, Worker):
            process.lending.lies_until = self.world.now + fault.seconds
        elif fault.kind == "squeeze" and isinstance(process, Worker):
            self._squeeze(process, fault)
        elif fault.kind == "stranger":
            _Stranger(self.network, fault, self.processes)

    def _crash(self, process: SimProcess, seconds: float, silently: bool) -> None:
        name = process.name
        if self.processes.get(name) is process:
            process.crash(silently)
            del self.processes[name]
            for number in [n for n, gateway in self._asked.items() if gateway is process]:
                self.ledger.lost(number)
            self.world.at(seconds, self._fate, lambda: self._start(name))

    def _ended(self, process: SimProcess, error: BaseException | None) -> None:
        """A process ends by itself. None: because another of its ranks has ended."""
        if isinstance(error, Escaped):
            self._poisoned(process, silently=isinstance(error, Killed))
            return
        told = isinstance(error, RanksLost) and error.by_step
        seconds = _FAILED_SECONDS if told else 0.0
        self.world.at(seconds, self._fate, lambda: self._crash(process, 0.0, silently=False))

    def _poisoned(self, process: SimProcess, silently: bool) -> None:
        """A poison request ends a process. It ends two, and two others for each fault that may hide an
        attempt's result. Without a word: each prefill node, a decode node by which it is suspected, and two
        more."""
        self._ended_by_poison += 1
        self.world.note(process.name, "a signal ends it" if silently else "an error has escaped the core")
        struck = sum(fault.at <= self.world.now for fault in self.scenario.faults)
        unseen = 1 + len(self._prefill) if silently else 0
        if self._ended_by_poison > unseen + 2 + (unseen + 2) * struck:
            raise Violation(f"poison: a request has ended {self._ended_by_poison} processes")
        seconds = 0.0 if silently else _FAILED_SECONDS
        self.world.at(seconds, self._fate, lambda: self._crash(process, 0.0, silently=False))

    def _stop(self, process: AnyProcess) -> None:
        """A drained process hands back its requests, ends, and is restarted at once."""
        process.hand_back()
        self.world.at(STOP_SECONDS, self._fate, lambda: self._crash(process, 0.0, silently=False))

    def _squeeze(self, worker: Worker[Any], fault: Fault) -> None:
        """Takes unreserved pages for a while."""

        def take() -> None:
            if worker.closed:  # it changes its role: its pages are not counted again before it does
                return
            scheduler = worker.scheduler
            count = min(fault.value, scheduler.reservations.headroom) // len(scheduler.cache.groups)
            block_table = scheduler.cache.hold(())
            scheduler.cache.extend(block_table, max(0, count))
            self.world.at(fault.seconds, worker.step_thread, lambda: give_back(block_table))

        def give_back(block_table: BlockTable) -> None:
            worker.scheduler.cache.release(block_table, 0)

        self.world.at(0.0, worker.step_thread, take)


def _repair(worker: Worker[Any]) -> None:
    worker.fail_next_read = worker.runner.fail_next_launch = False


class _Stranger:
    """A stranger who sends a prefill node what only an attempt's holder may send."""

    def __init__(self, network: Network, fault: Fault, processes: dict[str, AnyProcess]) -> None:
        self.name, self.role = "stranger", "decode"
        self.loop = Actor("stranger")
        gateway = processes.get(fault.other)
        endpoint = network.connect(self, fault.target)
        if endpoint is None or gateway is None:
            return
        endpoint.send(prefill_pb2.PrefillRequest(hello=prefill_pb2.PrefillHello(incarnation=1)))
        for number in range(1, 1 + fault.value):
            name = AttemptName(gateway.incarnation, number, 0, 0)
            prompt, params = tuple(range(6)), SamplingParams(max_tokens=1)
            request = EngineRequest(name, prompt, params)
            for effect in (
                ReleaseLease(fault.target, name),
                CancelPrefill(fault.target, name),
                StartPrefill(fault.target, name, request, params, prompt, 0, 1, fault.seconds),
            ):
                endpoint.send(request_for(effect, ahead=True))
        network.world.at(fault.seconds, self.loop, lambda: endpoint.close("bored"))

    def accept(self, endpoint: Endpoint) -> None:
        raise AssertionError("a stranger serves nothing")


def _bind(
    function: Callable[[Fault], None] | Callable[[RequestSpec], None], item: object
) -> Callable[[], None]:
    return lambda: function(item)  # type: ignore[arg-type]
