"""A simulated process with a KV pool and a device."""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Iterator, Sequence
from typing import Any

from baton.config import WorkerConfig
from baton.engine.image_spans import ImageSpan
from baton.engine.plan import PlanRow, Runner, StepPlan
from baton.engine.request import EngineRequest
from baton.engine.scheduler import Scheduler
from baton.engine.step_builder import Step
from baton.engine.step_loop import StepPipeline
from baton.grammar.base import CompiledGrammar, GrammarError, GrammarSpec
from baton.kvcache import NO_PAGE, KvCacheManager, KvGroup, PageAllocator, PrefixTree
from baton.kvcache.kv_groups import peak
from baton.kvcache.page_allocator import PageState
from baton.layers.cache_spec import CacheSpec, State, attention_cache
from baton.layers.tensor_parallel import Shard
from baton.rpc.errors import unavailable
from baton.sim.driver import StepDriver
from baton.sim.event_loop import VirtualLoop
from baton.sim.grammar import SimGrammar
from baton.sim.host_tier import SimHostTier
from baton.sim.image_requests import SimImages
from baton.sim.lending import SimLending
from baton.sim.model import STATE, VOCAB, SimPool
from baton.sim.network import Endpoint, Network, SimLink
from baton.sim.process import Machine, SimProcess
from baton.sim.ranks import SimRanks
from baton.sim.runner import Killed, SimLaunchedStep, SimRunner
from baton.sim.scheduler_rules import check_scheduler
from baton.sim.streams import SimStreams
from baton.sim.tasks import Task, sleep
from baton.sim.transport import SimPull, SimReceiver
from baton.sim.world import Actor, Violation
from baton.tracing.recorder import Recorder
from baton.v1 import common_pb2, node_pb2
from baton.worker.peers import PagePeer
from baton.worker.ranks.runner import RankedRunner, RanksLost
from baton.worker.shell import LOST_SECONDS, C, WorkerShell
from baton.worker.sources.shell import SourcePeers

LEND = "lend"
"""The method Cache.Lend."""


HOP_SECONDS = 0.0001
"""From one thread of a process to another; the same always, so that calls keep their order."""


class Worker(SimProcess, WorkerShell[C]):
    """A process with a KV pool and a device. Steps run on the device one after the other."""

    core: C
    steps: StepDriver[C]
    streams: SimStreams
    lending: SimLending

    def __init__(
        self,
        network: Network,
        name: str,
        life: int,
        config: WorkerConfig,
        machine: Machine,
        before: Worker[Any] | None = None,
    ) -> None:
        """`before`: a node of one rank and one tier whose engine this one has from now on."""
        super().__init__(network, name, life)
        self.config = config
        self.recorder = Recorder(config.recorder_events, self.clock)
        self.machine = machine
        groups = tuple(KvGroup(_spec(window)) for window in machine.windows)
        # Enough for one sequence of as many tokens.
        pages = peak(groups, config.kv_tokens, config.page_size, 2 * config.token_budget)
        self.pool = SimPool(pages, config.page_size, machine.heads)
        self.allocator = PageAllocator(pages, self.pool.generations)
        sees = machine.images is not None
        tree = PrefixTree(config.page_size, config.eviction, groups, images=sees)
        self.cache = KvCacheManager(self.allocator, tree)
        has_tier = machine.tier_rows and machine.ranks == 1
        self.host_tier = SimHostTier(self, machine.tier_rows, machine.tier_pace) if has_tier else None
        self.model_info = node_pb2.ModelInfo(
            context_length=config.kv_tokens,
            vocab_size=VOCAB,
            grammars=True,
            images=sees,
        )
        self.layout = common_pb2.Layout(page_size=config.page_size)
        self.page_bytes = self.pool.page_bytes
        self.device = "cpu"
        self.closed = False
        """It takes no calls."""
        self.virtual = VirtualLoop(self.world, self.loop, self.clock)
        self.images = SimImages(self, machine.images) if machine.images is not None else None
        self._before = before
        self.runner = self._make_runner(Shard(0, machine.ranks))
        if before is not None:
            self.pool, self.allocator, self.cache = before.pool, before.allocator, before.cache
            self.runner = before.runner
            self.runner.move_to(self._submit, self._check_write)
        self.ranks = self._make_ranks() if machine.ranks > 1 else None
        self.launched: list[SimLaunchedStep] = []
        """Launched and not yet retired."""
        self.retired = 0
        """The last step whose results have been read."""
        self.ending: Callable[[BaseException | None], None] = lambda error: None
        """Called when an error has escaped the core, or, with None, another rank has ended."""
        self.fail_next_read = False
        self.hangs_until = 0.0
        """Until then the device may do nothing at all."""
        self.pull_fails_after: int | None = None
        """The next pull breaks after this many pieces."""
        self.pulls: list[SimPull] = []
        """Running ones."""
        self.lending, self.sources = SimLending(self), SourcePeers(self)
        self._borrowers = SimStreams(self.lending, self.world, self.loop)
        network.segments[self.who] = self.pool
        self._device_free = 0.0
        self._device_rng = self.world.rng(f"device {name}")

    def _make_runner(self, shard: Shard) -> SimRunner:
        machine = self.machine
        return SimRunner(
            self.pool,
            self.config.max_rows,
            self._submit,
            self._check_write,
            machine.windows,
            shard.kv_heads(machine.heads),
            self.images.encoder if self.images is not None else None,
        )

    def _make_ranks(self) -> SimRanks:
        machine = self.machine
        followers = [Shard(rank, machine.ranks) for rank in range(1, machine.ranks)]
        return SimRanks(
            self.world,
            self.name,
            [self.runner, *(self._make_runner(shard) for shard in followers)],
            [self.device_thread, *(Actor(f"{self.who}.rank{shard.rank}") for shard in followers)],
            machine.heads,
            machine.step_seconds,
            machine.collective_seconds,
            self._rank_lost,
        )

    def hang(self, seconds: float) -> None:
        """The device does nothing for `seconds`. Overlapping hangs end with the last of them."""
        self._device_free = self.hangs_until = max(self._device_free, self.world.now + seconds)
        if self.ranks is not None:
            self.ranks.stall(0, seconds)

    def kill_rank(self, rank: int) -> None:
        """One rank at least, a follower."""
        if self.ranks is not None:
            self.hangs_until = max(self.hangs_until, self.world.now + 2 * LOST_SECONDS)
            self.ranks.kill(1 + rank % (self.machine.ranks - 1))

    def stall_rank(self, rank: int, seconds: float) -> None:
        """Any rank; the others wait for it, as for a hanging device."""
        if self.ranks is not None:
            self.hangs_until = max(self.hangs_until, self.world.now + seconds + 2 * LOST_SECONDS)
            self.ranks.stall(rank % self.machine.ranks, seconds)

    def _rank_lost(self, why: str) -> None:
        """Like worker.node: the step thread says so if a step is running."""
        self.world.note(self.who, f"ranks  {why}")
        self.world.at(LOST_SECONDS, self.loop, lambda: self.ending(None))

    def crash(self, silently: bool) -> None:
        super().crash(silently)
        if self.ranks is not None:
            self.ranks.orphan()

    @property
    def scheduler(self) -> Scheduler:
        return self.core.scheduler

    def post(self, function: Callable[..., object], *arguments: Any) -> None:
        def run() -> None:
            function(*arguments)

        self.world.at(HOP_SECONDS, self.loop, run)

    def spawn(self, work: Coroutine[Any, Any, Any], name: str) -> Task:
        return Task(self.world, self.loop, work)

    def compile_grammar(
        self, spec: GrammarSpec, done: Callable[[CompiledGrammar | GrammarError], None]
    ) -> None:
        done(SimGrammar())

    def want_images(self, request: EngineRequest, images: tuple[ImageSpan, ...]) -> None:
        assert self.images is not None, "refused by check_start"
        self.post(self.images.want, request, images)

    def endpoints(self, pool: int = 0) -> list[common_pb2.Endpoint]:
        if "shm" in self.config.transports:
            return [common_pb2.Endpoint(shm=common_pb2.ShmEndpoint(path=self.who))]
        return [common_pb2.Endpoint(grpc=common_pb2.GrpcEndpoint())]

    async def open_receiver(
        self, endpoints: Sequence[common_pb2.Endpoint], address: str, pool: int = 0
    ) -> SimReceiver:
        await sleep(self.world, self.loop, self.world.rng(f"open {self.name}").uniform(0.0, 0.02))
        path = endpoints[0].shm.path
        return SimReceiver(self, address, self.network.segments[path] if path else None)

    def make_source_link(self, address: str, peer: PagePeer) -> SimLink:
        return self.link(address, peer.hello, peer.received, peer.welcomed, peer.lost, LEND)

    def accept(self, endpoint: Endpoint) -> None:
        caller = endpoint.peer.owner.role if endpoint.peer is not None else ""
        asked = self.role if endpoint.method == LEND else "decode" if caller == "gateway" else "prefill"
        if self.closed or asked != self.role:
            endpoint.close("this node has another role")
            return
        (self._borrowers if endpoint.method == LEND else self.streams).accept(endpoint)

    def close_streams(self) -> None:
        """Takes no calls any more, and ends those that there are."""
        self.closed = True
        for streams in (self.streams, self._borrowers):
            for stream in streams.open:
                stream.close(unavailable("this node becomes one of the other role", "OTHER_ROLE"))

    @property
    def shared(self) -> tuple[int, ...]:
        """How many leases it has lent, how many fetches and pulls of cached pages run, copies between the
        pool and the host tier, and images that are fetched."""
        sharing = self.core.sharing
        fetches = sharing.borrower.fetches
        copies = self.host_tier.copies if self.host_tier is not None else 0
        lent = len(sharing.lender.leases.running)
        images = self.images.fetches if self.images is not None else 0
        return lent, len(fetches.running), len(fetches.pulls), copies, images

    def start_steps(self) -> None:
        rng = self.world.rng(f"steps {self.name}")
        self.core = self.core_or_none = self.make_core(self.cache)
        if self._before is not None:
            self.scheduler.step_number = self._before.scheduler.step_number
        self.steps = StepDriver(
            self.world,
            self.step_thread,
            StepPipeline(self.core, self._executor(), bool(self.config.overlap), self.clock),
            when_done=self._when_done,
            hop=HOP_SECONDS,
            pause=lambda step: rng.uniform(0.0001, 0.001),
            turned=self._turned,
            crashed=self._end_with_error,
        )

    def _executor(self) -> Runner[SimLaunchedStep]:
        if self.ranks is None:
            return self.runner
        return RankedRunner(self.runner, self.ranks.channels, lambda: 1)

    def _when_done(self, step: SimLaunchedStep, finish: Callable[[], None]) -> None:
        world = self.world
        if self.ranks is None:
            world.at(max(0.0, step.done_at - world.now) + HOP_SECONDS, self.step_thread, finish)
        elif self.runner.done(step):
            world.at(HOP_SECONDS, self.step_thread, finish)
        else:
            step.ended = lambda: world.at(HOP_SECONDS, self.step_thread, finish)

    def _end_with_error(self, error: BaseException) -> None:
        """Like worker.node: callers learn which requests may be the cause; then the process ends."""
        self.step_thread.alive = False
        if not isinstance(error, Killed | RanksLost) or (isinstance(error, RanksLost) and error.by_step):
            self.core.node_failed("an error has escaped the core")
        self.ending(error)

    def _turned(self, step: Step | None) -> None:
        if step is not None:
            self.retired = step.plan.number
        self.check()

    def _submit(self, step: SimLaunchedStep) -> None:
        """The device begins with it after all earlier steps."""
        if step.plan.num_tokens > self.config.token_budget:
            raise Violation(f"budget: step {step.plan.number} of {self.who} exceeds its token budget")
        self.launched.append(step)
        if self.fail_next_read:
            self.fail_next_read = False
            step.error = "the device gave no answer"
        if self.ranks is None:
            self._schedule(step)
        else:
            self.ranks.all[0].take(step)
        if self.world.traced:
            rows = [
                (r.slot, r.start, r.count, r.tables[0][r.start // self.pool.page_size :])
                for r in step.plan.rows
            ]
            self.world.note(self.who, f"launch {step.plan.number} {rows} {step.plan.copies}")

    def _schedule(self, step: SimLaunchedStep) -> None:
        usual = self.machine.step_seconds * (1 + step.plan.num_tokens / 16)
        start = max(self._device_free, self.world.now)
        run_at = start + usual * self._device_rng.uniform(0.1, 1.0)
        step.done_at = self._device_free = run_at + usual * self._device_rng.uniform(0.0, 0.5)
        self.world.at(run_at - self.world.now, self.device_thread, lambda: self._execute(step))

    def _execute(self, step: SimLaunchedStep) -> None:
        self.runner.execute(step)
        if self.world.traced:
            tokens = [token for row in step.result.rows for token in row.tokens] if step.result else []
            self.world.note(self.who, f"ran    {step.plan.number} {tokens}")

    def _check_write(self, plan: StepPlan, page: int) -> None:
        state = self.allocator.state(page)
        if state is not PageState.OWNED:
            raise Violation(
                f"writer: step {plan.number} of {self.who} writes page {page}, which is {state.name}"
            )

    def check(self) -> None:
        """Checks the pool's accounting and design rule 5: nothing that a step in flight uses is free or
        reused."""
        self.cache.check()
        if self.host_tier is not None:
            self.host_tier.check()
        check_scheduler(self.scheduler)
        if self.scheduler.reservations.total > self.cache.available:
            raise Violation(f"promises: {self.who} has promised more pages than it has")
        self.launched = [step for step in self.launched if step.plan.number > self.retired]
        namespaces = {page: namespace for namespace, page in self.cache.cached_pages()}
        for request in self.scheduler.requests.values():
            for sequence in request.sequences:
                tables = sequence.block_table.tables if sequence.block_table is not None else []
                cached = (page for table in tables for page in table if page in namespaces)
                if any(namespaces[page] != request.namespace for page in cached):
                    raise Violation(f"namespaces: {self.who} uses pages of another one for {request.key}")
        for pull in self.pulls:
            for step in self.launched:
                for row in step.plan.rows:
                    first = row.start // self.pool.page_size
                    last = (row.longest - 1) // self.pool.page_size
                    for table in row.tables:
                        both = pull.targets.intersection(table[first : last + 1])
                        if both:
                            text = f"a step and a pull of {self.who} both write {sorted(both)}"
                            raise Violation(f"writer: {text}")
        slots = self.scheduler.slots
        size = self.pool.page_size
        for step in self.launched:
            for page in (page for pair in step.plan.copies for page in pair):
                if self.allocator.state(page) is PageState.FREE:
                    raise Violation(
                        f"free late: page {page} of {self.who} is free, step {step.plan.number} copies it"
                    )
            for row in step.plan.rows:
                for page in _used(row, self.cache.groups, size):
                    if page == NO_PAGE:
                        raise Violation(f"window: step {step.plan.number} of {self.who} sees what is gone")
                    if self.allocator.state(page) is PageState.FREE:
                        raise Violation(
                            f"free late: page {page} of {self.who} is free, step {step.plan.number} uses it"
                        )
                for slot in (row.slot, *row.sample):
                    if slots.is_free(slot):
                        raise Violation(
                            f"free late: slot {slot} of {self.who} is free, step {step.plan.number} uses it"
                        )

    def check_idle(self) -> None:
        """Design rule 5 at quiescence."""
        self.cache.check(idle=True)
        if self.host_tier is not None:
            self.host_tier.check(idle=True)
        if self.images is not None:
            self.images.check_idle()
        counts = self.cache.counts()
        if counts.free + counts.cached != counts.total:
            raise Violation(f"quiescence: pages of {self.who}: {counts}")
        if self.scheduler.reservations.total or self.scheduler.slots.in_use:
            raise Violation(
                f"quiescence: {self.who} still promises {self.scheduler.reservations.total} pages and has "
                f"{self.scheduler.slots.in_use} slots in use"
            )


def _spec(window: int | None) -> CacheSpec:
    return State(((1,),)) if window == STATE else attention_cache(window)


def _used(row: PlanRow, groups: Sequence[KvGroup], size: int) -> Iterator[int]:
    """The pages that a row reads or writes; of one that follows unread drafts those that it surely does."""
    start, end = row.start + row.ahead, row.longest
    for group, table in zip(groups, row.tables, strict=True):
        if isinstance(group.spec, State):
            yield from (table[(stop - 1) // size] for stop in State.stops(start, end, size))
            yield from table[group.spec.sees(start, size) :][: start > 0]
        else:
            yield from table[group.spec.sees(start, size) : -(-end // size)]
