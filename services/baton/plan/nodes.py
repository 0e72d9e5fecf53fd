"""Simulated nodes: the real cores over pools without bytes and a device in virtual time.
Messages and pulls take their time and never fail."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass

from baton.config import DecodeConfig, PrefillConfig
from baton.decode.core import DecodeCore
from baton.decode.core import make_core as make_decode_core
from baton.decode.types import Done, Failed, Key, Output, Peer, Tokens
from baton.engine.batch import Step
from baton.engine.plan import PlanRow, RowResult, StepPlan, StepResult, step_load
from baton.engine.request import Request
from baton.engine.scheduler import SchedulerConfig
from baton.engine.step_loop import C, StepPipeline
from baton.handoff.messages import (
    Beat,
    CancelPrefill,
    DecodeEffect,
    PrefillOutput,
    ReleaseLease,
    StartPrefill,
    StartPull,
    StopPull,
)
from baton.handoff.pull_cost import PullMeter
from baton.kvcache import KvCache, PageAllocator, PrefixTree
from baton.kvcache.kv_events import TreeEvents, TreeLog
from baton.plan.profile import Profile
from baton.prefill.core import PrefillCore
from baton.prefill.core import make_core as make_prefill_core
from baton.sim.driver import StepDriver
from baton.sim.world import Actor, World
from baton.stepcost import CostCalibration, StepCost
from baton.v1 import cache_pb2, node_pb2
from baton.worker.load import add_step_cost, cache_update, snapshot


@dataclass(slots=True)
class VirtualFlight:
    plan: StepPlan
    ends: float


class VirtualRunner:
    """Implements `engine.plan.Runner`: executes one step after the other, each in the time that it costs.
    `read` does not wait: whoever drives it reads a step when it has ended. All tokens are 0."""

    vocab_size = 1

    def __init__(self, cost: StepCost, max_slots: int, clock: Callable[[], float]) -> None:
        self.max_slots = max_slots
        self.busy = 0.0
        """Seconds of all steps so far, until `stop_counting`."""
        self._counting = True
        self._cost = cost
        self._clock = clock
        self._free = 0.0
        self._one_token = RowResult((0,))
        """Of most rows; nobody changes it."""

    def launch(self, plan: StepPlan) -> VirtualFlight:
        seconds = self._cost.seconds(step_load(plan.rows)) if plan.rows else 0.0
        if self._counting:
            self.busy += seconds
        self._free = max(self._clock(), self._free) + seconds
        return VirtualFlight(plan, self._free)

    def stop_counting(self) -> None:
        """Steps launched from now on do not count as busy, nor does what is left of those in flight."""
        self._counting = False
        self.busy -= max(0.0, self._free - self._clock())

    def done(self, flight: VirtualFlight) -> bool:
        return self._clock() >= flight.ends

    def read(self, flight: VirtualFlight) -> StepResult:
        return StepResult(flight.plan.number, tuple(self._result(row) for row in flight.plan.rows))

    def _result(self, row: PlanRow) -> RowResult:
        return self._one_token if len(row.sample) == 1 else RowResult((0,) * len(row.sample))


class Messages:
    """As decode.stream, whose one caller the simulated gateway is: after a message with everybody's tokens,
    tokens gather for a while. Events and first tokens do not wait; they take along the tokens of their own
    request, and the others' gather on."""

    def __init__(
        self, world: World, actor: Actor, gather: float, deliver: Callable[[list[Output]], None]
    ) -> None:
        """gather: seconds. deliver: called with the outputs of a message as it leaves."""
        self._world = world
        self._actor = actor
        self._gather = gather
        self._deliver = deliver
        self._unsent: list[Output] = []
        self._begun: set[int] = set()  # running requests of which a token has been said
        self._due = 0.0
        self._waking = False

    def put(self, outputs: list[Output]) -> None:
        """What the node says at one moment, in order."""
        self._unsent += outputs
        urgent: set[int] = set()
        for output in outputs:
            if not isinstance(output, Tokens) or output.request not in self._begun:
                urgent.add(output.request)
            if isinstance(output, Tokens):
                self._begun.add(output.request)
            elif isinstance(output, Done | Failed):
                self._begun.discard(output.request)
        if self._world.now >= self._due:
            self._send(urgent)
        elif urgent:
            leaving = [output for output in self._unsent if output.request in urgent]
            self._unsent = [output for output in self._unsent if output.request not in urgent]
            self._deliver(leaving)
        self._wake_when_due()

    def _wake_when_due(self) -> None:
        if self._unsent and not self._waking:
            self._waking = True
            self._world.at(self._due - self._world.now, self._actor, self._wake)

    def _wake(self) -> None:
        self._waking = False
        if self._unsent and self._world.now >= self._due:
            self._send(set())
        self._wake_when_due()

    def _send(self, urgent: set[int]) -> None:
        unsent, self._unsent = self._unsent, []
        if any(output.request not in urgent for output in unsent):
            self._due = self._world.now + self._gather
        self._deliver(unsent)


@dataclass(frozen=True, slots=True)
class Setup:
    """How nodes are configured, with everything that a real one finds out at its start."""

    profile: Profile
    prefill: PrefillConfig
    decode: DecodeConfig
    routing: str = "cache"
    """`--routing` of the gateway."""


class SimNode:
    """What both kinds share."""

    core: DecodeCore | PrefillCore

    def __init__(self, world: World, name: str, profile: Profile) -> None:
        engine = profile.engine
        self.name = name
        self.world = world
        self.actor = Actor(name)
        self.profile = profile
        self.pages = engine.kv_tokens // engine.page_size
        self.cache = KvCache(PageAllocator(self.pages), PrefixTree(engine.page_size))
        self._changes = TreeEvents()
        self._tree = TreeLog(engine.page_size)
        self.cache.observe(self._changes)
        self.runner = VirtualRunner(profile.step, engine.max_rows, self.clock)
        self.most_pages = 0
        """Held by requests at any moment; cached ones that nobody uses are not counted."""

    def clock(self) -> float:
        return self.world.now

    def limits(self) -> SchedulerConfig:
        engine = self.profile.engine
        context = min(engine.context_length, self.pages * engine.page_size)
        return SchedulerConfig(context, engine.token_budget, engine.max_rows)

    def drive(self, core: C) -> StepDriver[C]:
        return StepDriver(
            self.world,
            self.actor,
            StepPipeline(core, self.runner, self.profile.engine.overlap, self.clock),
            done_at=lambda flight: float(flight.ends),
            hop=0.0,
            pause=self._pause,
            turned=self._turned,
        )

    def tell(self, known: int | None) -> cache_pb2.CacheUpdate:
        """What a gateway is told which knows the prefix tree up to this change; None: nothing of it."""
        while (event := self._changes.take()) is not None:
            self._tree.apply(event)
        return cache_update(self._tree, known, 1, self.load())

    def load(self) -> node_pb2.Load:
        load = snapshot(self.core.scheduler, self.core.requests)
        add_step_cost(load, self.core.step_stats)
        return load

    def after(self, seconds: float, function: Callable[[], None]) -> None:
        self.world.at(seconds, self.actor, function)

    def _pause(self, step: Step | None) -> float:
        host = self.profile.host
        return host.turn + host.row * (len(step.plan.rows) if step is not None else 0)

    def _turned(self, step: Step | None) -> None:
        self.most_pages = max(self.most_pages, self.pages - self.cache.available)


class SimPrefill(SimNode):
    def __init__(self, world: World, name: str, setup: Setup) -> None:
        super().__init__(world, name, setup.profile)
        self._retired = 0
        self._waiting: list[tuple[int, Callable[[], None]]] = []
        device = setup.profile.engine.device
        self.core = make_prefill_core(
            setup.prefill, self.limits(), device, self.cache, self._flush, self._retire
        )
        self.core.step_stats.calibration = CostCalibration(setup.profile.step)
        self.driver = self.drive(self.core)

    def when_retired(self, step: int, begin: Callable[[], None]) -> None:
        """Calls `begin` once the step has retired."""
        if step <= self._retired:
            begin()
        else:
            self._waiting.append((step, begin))

    def _retire(self, step: int) -> None:
        self._retired = step
        waiting, self._waiting = self._waiting, []
        for wanted, begin in waiting:
            self.when_retired(wanted, begin)

    def connect(self, node: SimDecode) -> None:
        self.driver.call(lambda core, now: core.side.connect(node, now))

    def take(self, node: SimDecode, effect: StartPrefill | CancelPrefill | ReleaseLease | Beat) -> None:
        """What a decode node says has arrived."""
        ahead = self.profile.pull.seen
        self.driver.call(lambda core, now: core.receive(node, effect, ahead, now))

    def _flush(self, outputs: dict[Hashable, list[PrefillOutput]]) -> None:
        for node, told in outputs.items():
            assert isinstance(node, SimDecode)
            node.after(self.profile.host.hop, _hear(node, self.name, told))


def _hear(node: SimDecode, address: str, events: list[PrefillOutput]) -> Callable[[], None]:
    return lambda: node.hear(address, events)


class SimDecode(SimNode):
    """deliver: called with the outputs of a message when it reaches the client."""

    def __init__(
        self,
        world: World,
        name: str,
        setup: Setup,
        prefill: Mapping[str, SimPrefill],
        deliver: Callable[[list[Output]], None],
    ) -> None:
        super().__init__(world, name, setup.profile)
        config = setup.decode
        self._prefill = prefill
        self._messages = Messages(world, self.actor, config.message_seconds, deliver)
        self._link_free = 0.0
        self.core: DecodeCore = make_decode_core(config, self.limits(), self.cache, self._flush)
        self.core.step_stats.calibration = CostCalibration(setup.profile.step)
        self._pull_meter = PullMeter()
        self.driver = self.drive(self.core)
        peer = Peer(up=True, since=0.0, transport=setup.profile.pull.transport)
        for address, node in prefill.items():
            node.connect(self)
            self.driver.call(lambda core, now, a=address: core.peer_changed(a, peer, "", now))  # type: ignore[misc]

    def start(
        self, number: int, request: Request, candidates: tuple[str, ...], local_tokens: int | None
    ) -> None:
        """A request has arrived; its key is `key(number)`."""
        key = self.key(number)
        self.driver.call(lambda core, now: core.start(key, 1, 0, request, candidates, now, local_tokens))

    def load(self) -> node_pb2.Load:
        load = super().load()
        load.wait_ms = int(1000 * self.core.overload.wait)
        if (pull := self._pull_meter.cost) is not None:
            load.pull_cost.CopyFrom(node_pb2.PullCost(fixed=pull.fixed, token=pull.token))
        return load

    def key(self, number: int) -> Key:
        return Key(self.name, number)

    def hear(self, address: str, events: list[PrefillOutput]) -> None:
        self.driver.call(lambda core, now: core.receive(address, events, now))

    def _flush(self, step: int, outputs: list[tuple[Hashable, Output]], effects: list[DecodeEffect]) -> None:
        if outputs:
            self._messages.put([output for _, output in outputs])
        for effect in effects:
            node = self._prefill[effect.address]
            if isinstance(effect, StartPull):
                node.when_retired(effect.step, self._pull_of(node, effect))
            elif isinstance(effect, StopPull):
                pass  # a pull ends by itself here: steps never hang
            else:
                node.after(self.profile.host.hop, self._tell(node, effect))

    def _tell(
        self, node: SimPrefill, effect: StartPrefill | CancelPrefill | ReleaseLease | Beat
    ) -> Callable[[], None]:
        return lambda: node.take(self, effect)

    def _pull_of(self, node: SimPrefill, effect: StartPull) -> Callable[[], None]:
        return lambda: self._pull(node, effect)

    def _pull(self, node: SimPrefill, effect: StartPull) -> None:
        """One after the other: they share the link."""
        cost = self.profile.pull
        seconds = cost.seconds(len(effect.pairs) * self.profile.engine.page_bytes)
        self._link_free = max(self._link_free, self.clock()) + seconds
        taken = max(self._link_free - self.clock(), 1e-6)

        def ended() -> None:
            self._pull_meter.add(len(effect.pairs) * self.cache.page_size, taken)
            pages = [node.cache.generation(source) for source, _ in effect.pairs] if cost.seen else None
            self.driver.call(lambda core, now: core.handoffs.pull_ended(effect.pull, None, pages, now))

        self.after(self._link_free - self.clock(), ended)
