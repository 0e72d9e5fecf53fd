"""Simulated nodes: the real shells and cores over pools without bytes and a device in virtual time.
Messages and pulls take their time and never fail."""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from baton.config import DecodeConfig, PrefillConfig
from baton.engine.step_builder import Step
from baton.engine.step_loop import StepPipeline
from baton.engine.timed_runner import TimedRunner
from baton.kvcache import KvCacheManager, PageAllocator, PrefixTree
from baton.kvcache.kv_events import TreeEvents, TreeLog
from baton.rpc.errors import BatonError
from baton.sim.driver import StepDriver
from baton.sim.streams import VirtualDecodeStream, VirtualPrefillStream
from baton.sim.tasks import Future, Task, sleep
from baton.sim.world import Actor, World
from baton.sizing.profile import Profile
from baton.step_cost import CostCalibration
from baton.tracing.recorder import Recorder
from baton.transport.base import ignore_time
from baton.v1 import cache_pb2, common_pb2, node_pb2
from baton.worker.decode.core import DecodeCore
from baton.worker.decode.peers import PrefillPeers
from baton.worker.decode.shell import DecodeShell
from baton.worker.load import add_step_cost, cache_updates, snapshot
from baton.worker.peers import PagePeer
from baton.worker.prefill.core import PrefillCore
from baton.worker.prefill.shell import PrefillShell
from baton.worker.shell import C, WorkerShell
from baton.worker.sources.shell import CacheLending, SourcePeers


@dataclass(frozen=True, slots=True)
class NodeSetup:
    """How nodes are configured, with everything that a real one finds out at its start."""

    profile: Profile
    prefill: PrefillConfig
    decode: DecodeConfig
    routing: str = "cache"
    """`--routing` of the gateway."""


class SizingNode(WorkerShell[C]):
    """What both kinds share."""

    core: C
    steps: StepDriver[C]
    incarnation, draining = 1, False

    def __init__(
        self, world: World, name: str, profile: Profile, config: PrefillConfig | DecodeConfig
    ) -> None:
        engine = profile.engine
        self.name = name
        self.recorder = Recorder(0)
        self.world = world
        self.actor = Actor(name)
        self.profile = profile
        self.config = replace(config, token_budget=engine.token_budget, max_rows=engine.max_rows)
        self.pages = engine.pages
        tree = PrefixTree(engine.page_size, groups=engine.groups)
        self.cache = KvCacheManager(PageAllocator(self.pages), tree)
        self._changes = TreeEvents()
        self._tree = TreeLog(engine.page_size)
        self.cache.observe(self._changes)
        self.model_info = node_pb2.ModelInfo(context_length=engine.longest, vocab_size=2**31)
        self.layout = common_pb2.Layout(page_size=engine.page_size)
        self.page_bytes, self.device = engine.page_bytes, engine.device
        self.runner = TimedRunner(
            profile.step,
            max_slots=engine.max_rows,
            vocab_size=1,
            clock=self.clock,
            sleep=lambda seconds: None,
        )
        self.most_pages = 0
        """Held by requests at any moment; cached ones that nobody uses are not counted."""
        # Never used: nodes of one incarnation do not name each other as sources.
        self.lending, self.sources = CacheLending(self, VirtualPrefillStream), SourcePeers(self)
        self.core = self.core_or_none = self.make_core(self.cache)
        self.core.step_stats.calibration = CostCalibration(profile.step)
        self.steps = StepDriver(
            world,
            self.actor,
            StepPipeline(self.core, self.runner, engine.overlap, self.clock),
            when_done=lambda launched, finish: self.after(max(0.0, launched.ends - world.now), finish),
            hop=0.0,
            pause=self._step_pause,
            turned=self._turned,
        )

    def clock(self) -> float:
        return self.world.now

    def post(self, function: Callable[..., object], *arguments: Any) -> None:
        function(*arguments)

    def spawn(self, work: Coroutine[Any, Any, Any], name: str) -> Task:
        return Task(self.world, self.actor, work)

    def endpoints(self, pool: int = 0) -> list[common_pb2.Endpoint]:
        return []

    def cache_updates(self, known: int | None) -> Iterator[cache_pb2.CacheUpdate]:
        """For a gateway that knows the prefix tree up to this change; None: nothing of it."""
        while (event := self._changes.take()) is not None:
            self._tree.apply(event)
        return cache_updates(self._tree, known, 1, "", self.load())

    def load(self) -> node_pb2.Load:
        load = snapshot(self.core.scheduler, self.core.requests)
        add_step_cost(load, self.core.step_stats)
        return load

    def after(self, seconds: float, function: Callable[[], None]) -> None:
        self.world.at(seconds, self.actor, function)

    def _step_pause(self, step: Step | None) -> float:
        host = self.profile.host
        return host.turn + host.row * (len(step.plan.rows) if step is not None else 0)

    def _turned(self, step: Step | None) -> None:
        self.most_pages = max(self.most_pages, self.pages - self.cache.available)


class SizingPrefill(PrefillShell, SizingNode[PrefillCore]):
    config: PrefillConfig

    def __init__(self, world: World, name: str, setup: NodeSetup) -> None:
        super().__init__(world, name, setup.profile, setup.prefill)
        self._retired = 0
        self._waiting: list[tuple[int, Future]] = []

    def make_stream(self, incarnation: int) -> VirtualPrefillStream:
        return VirtualPrefillStream(incarnation)

    def when_retired(self, step: int) -> Future:
        """Done once the step has retired."""
        future = Future()
        if step <= self._retired:
            future.done()
        else:
            self._waiting.append((step, future))
        return future

    def retire(self, step: int) -> None:
        self._retired = step
        retired = [future for awaited, future in self._waiting if awaited <= step]
        self._waiting = [(awaited, future) for awaited, future in self._waiting if awaited > step]
        for future in retired:
            future.done()


class DirectLink:
    """A connection that never breaks: each message takes `hop` seconds. The callbacks are rpc.link.Link's."""

    last_error = None

    def __init__(
        self,
        world: World,
        client: Actor,
        server: SizingPrefill | SizingDecode,
        hop: float,
        hello: Callable[[], Any],
        on_message: Callable[[Any], None],
        on_up: Callable[[Any], None],
    ) -> None:
        self.connected = False
        self._world = world
        self._client = client
        self._server: Any = server
        self._hop = hop
        self._hello = hello
        self._on_message = on_message
        self._on_up = on_up

    def start(self) -> None:
        server = self._server
        self._stream = server.open(self._hello().hello)
        self._stream.attach(self._world, server.actor, self._write)
        self.connected = True
        self._on_up(server.welcome()[0])

    def _write(self, message: Any) -> None:
        self._world.at(self._hop, self._client, lambda: self._on_message(message))

    def send(self, request: Any) -> bool:
        self._server.after(self._hop, lambda: self._server.handle_command(request, self._stream))
        return True

    def reset(self, error: BatonError) -> None:
        """A node that has been silent is slow: its steps never hang."""

    async def close(self) -> None:
        """There is nothing to close."""


class VirtualReceiver:
    """Pulls one after the other: they share the link."""

    def __init__(self, node: SizingDecode, server: SizingPrefill) -> None:
        self._node = node
        self._server = server
        self._cost = node.profile.pull
        self.kind, self.sees_steps = self._cost.transport, self._cost.seen

    async def pull(
        self, pairs: Sequence[tuple[int, int]], step: int = 0, copied: Callable[[float], None] = ignore_time
    ) -> None:
        node = self._node
        await self._server.when_retired(step)
        begun = node.clock()
        node.link_free = max(node.link_free, begun) + self._cost.seconds(len(pairs) * node.page_bytes)
        await sleep(node.world, node.actor, node.link_free - begun)
        copied(node.clock() - begun)

    def generations(self, pages: Sequence[int]) -> list[int] | None:
        return [self._server.cache.generation(page) for page in pages] if self._cost.seen else None

    async def close(self) -> None:
        """There is nothing to close."""


class SizingDecode(DecodeShell, SizingNode[DecodeCore]):
    config: DecodeConfig

    def __init__(
        self,
        world: World,
        name: str,
        setup: NodeSetup,
        prefill: Mapping[str, SizingPrefill],
    ) -> None:
        super().__init__(world, name, setup.profile, setup.decode)
        self._prefill = prefill
        self.link_free = 0.0
        """When all pulls so far will have ended."""
        self.peers = PrefillPeers(self, self.config)
        for address in prefill:
            self.peers.connect(address)

    def make_stream(self, incarnation: int) -> VirtualDecodeStream:
        return VirtualDecodeStream(incarnation, self.config.message_seconds)

    def make_link(self, address: str, peer: PagePeer) -> DirectLink:
        hop, server = self.profile.host.hop, self._prefill[address]
        return DirectLink(self.world, self.actor, server, hop, peer.hello, peer.received, peer.welcomed)

    async def open_receiver(
        self, endpoints: Sequence[common_pb2.Endpoint], address: str, pool: int = 0
    ) -> VirtualReceiver:
        return VirtualReceiver(self, self._prefill[address])
