"""The processes of prefill and decode nodes: an engine, its step thread, load, drain and stop."""

from __future__ import annotations

import asyncio
import os
import threading
import time
from collections.abc import Callable, Coroutine, Iterator, Sequence
from concurrent.futures import Future
from typing import Any, NoReturn, TypeVar

from baton.authentication.cluster import ClusterCredentials
from baton.config import WorkerConfig
from baton.discovery.etcd import Registration, register
from baton.engine.image_spans import ImageSpan
from baton.engine.request import EngineRequest
from baton.engine.step_loop import StepLoop
from baton.grammar.base import CompiledGrammar, GrammarError, GrammarSpec
from baton.kvcache.page_map import page_map
from baton.rpc.address import new_incarnation
from baton.rpc.errors import BatonError, unavailable
from baton.rpc.logs import get_logger
from baton.rpc.tasks import Tasks
from baton.step_cost import CostCalibration
from baton.tracing.recorder import Recorder
from baton.transport.base import Receiver
from baton.v1 import common_pb2, embed_pb2, node_pb2
from baton.worker.cache_service import CacheServicer
from baton.worker.caller_stream import CallerStreams
from baton.worker.embedder import Embedder
from baton.worker.engine import Engine, build_engine, measure_steps
from baton.worker.grammar_requests import compile_grammar
from baton.worker.images.requests import ImageRequests
from baton.worker.kv_event_publisher import KvEventPublisher, check_kv_events
from baton.worker.lease_stream import LeaseStream
from baton.worker.load import (
    add_encoding,
    add_grammars,
    add_sharing,
    add_step_cost,
    page_map_message,
    snapshot,
    worker_info,
)
from baton.worker.memory import keep_freed_memory
from baton.worker.model import device_of, use_device
from baton.worker.peers import PageLink, PagePeer
from baton.worker.ranks.runner import RanksLost
from baton.worker.shell import LOST_SECONDS, C, WorkerShell
from baton.worker.sources.shell import CacheLending, SourcePeers, source_link
from baton.worker.spare_steps import SpareSteps

_log = get_logger()
Answer = TypeVar("Answer")

DRAIN_POLL_SECONDS = 0.02
HAND_BACK_SECONDS = 2.0
"""How long a node waits until its callers have got the terminal events of requests handed back."""
SNAPSHOT_SECONDS = 0.02
TELL_SECONDS = 3.0
"""How long a failing process waits at most until its callers have got their messages. It takes milliseconds;
longer on a busy machine, or with a caller that does not read."""
WRITE_SECONDS = 0.05
"""Between the last message that gRPC has written and the end."""
MAP_SECONDS = 1.0
"""How long a page map waits for the step thread."""
WATCH_SECONDS = 0.25
"""How often the step thread is checked."""


class WorkerNode(WorkerShell[C]):
    """Base class of the two worker processes, which add `role` and their services."""

    role: str
    engine: Engine
    steps: StepLoop[C]
    loop: asyncio.AbstractEventLoop
    streams: CallerStreams[Any]

    def __init__(self, config: WorkerConfig, recorder: Recorder | None = None) -> None:
        """`recorder`: the process's; None: a new one. Raises BatonError when the device, the cluster secret
        or a certificate cannot be used."""
        if device_of(config.device).type == "cpu":
            keep_freed_memory()
        self.config = config
        self.cluster = ClusterCredentials.load(config)
        self.incarnation = new_incarnation()
        self.recorder = Recorder(config.recorder_events, self.clock) if recorder is None else recorder
        self.draining = False
        self.tasks = Tasks()
        self.core_or_none: C | None = None
        self._load = node_pb2.Load()
        self.observed = 0.0
        """When the last snapshot of the load was taken, on the monotonic clock."""
        self.lending, self.sources = CacheLending(self, LeaseStream), SourcePeers(self)
        self.borrowers = CallerStreams(self.lending, self.tasks)
        self.cache_service = CacheServicer(self)
        self._stopping = threading.Event()
        self._registration: Registration | None = None
        self._kv_events: KvEventPublisher | None = None
        self._images: ImageRequests | None = None

    # --- life -------------------------------------------------------------------------------------------

    async def start(self, address: str) -> None:
        """Loads the model and starts the step thread. Raises BatonError."""
        if self.config.kv_events:
            check_kv_events(self.config)
            self._kv_events = KvEventPublisher(self.config)
        engine = await asyncio.to_thread(build_engine, self.config, self.incarnation, self._stopping)
        try:
            calibration = CostCalibration(await asyncio.to_thread(measure_steps, engine))
        except BatonError:
            engine.close()  # as `stop` does, but for a node without a core
            raise
        self.config = engine.config
        self._run_engine(address, engine, calibration, None)
        engine.ranks.watch(self._rank_lost)
        caches = {"GPU": engine.cache}
        if engine.host_memory is not None:
            engine.host_memory.start(engine.in_steps, lambda: calibration.cost)
            caches["CPU"] = engine.host_memory.tier.cache
        if self._kv_events is not None:
            self._kv_events.start(caches, engine.in_steps)

    def take_over(self, old: WorkerNode[Any]) -> None:
        """Goes on with the engine of a node that has left it (`leave_engine`). Raises BatonError."""
        assert old.core_or_none is not None
        self._kv_events, calibration = old._kv_events, old.core_or_none.step_stats.calibration
        assert calibration is not None
        self._run_engine(old._address, old.engine, calibration, old.steps)

    def _run_engine(
        self, address: str, engine: Engine, calibration: CostCalibration, before: StepLoop[Any] | None
    ) -> None:
        """Starts the step thread. `before`: the one that the engine had, which has ended."""
        self.loop = asyncio.get_running_loop()
        self._address, self.engine, self.model_info = address, engine, engine.model_info
        self.device, self.layout, self.page_bytes = engine.device.type, engine.layout, engine.pages.page_bytes
        self.draft_layout = engine.drafter.layout if engine.drafter and self.config.draft_model else None
        core = self.core_or_none = self.make_core(engine.cache)
        if before is not None:  # receivers wait for a step that is at least the announced one
            core.scheduler.step_number = before.core.scheduler.step_number
        core.step_stats.calibration = calibration
        if core.scheduler.drafts is not None:
            core.scheduler.drafts.lengths.times.cost = calibration.cost
        spare = SpareSteps(engine)
        self.steps = StepLoop(
            core,
            engine.runner,
            name=f"{self.role}-steps",
            overlap=engine.overlap,
            crashed=self._crashed,
            warm=engine.warm,
            cooled=lambda error: _log.warning("first tokens come later: no warm turns", exc_info=error),
            spare=lambda interrupted: None if self.requests else spare.turn(calibration, interrupted),
        )
        engine.in_steps.move_to(lambda function: self.steps.call(lambda core, now: function()))
        if before is not None:
            before.finish_calls()
        self._embedder = Embedder(self.config, self.steps, self.model_info)
        if engine.images is not None:
            self._images = ImageRequests.of_engine(self, engine, self.cluster.dial)
        self.observe()
        self.steps.call(lambda core, now: use_device(engine.device))
        self.steps.start()
        self.tasks.spawn(self._watch_steps(), "watch of the step thread")
        self._registration = register(self.config, self.role, self.incarnation, address)

    async def drain(self, seconds: float) -> int:
        """Refuses new requests and waits for running ones; returns the number of those left."""
        self.announce_drain()
        self.cache_service.wake()
        deadline = time.monotonic() + seconds
        # The step thread does not signal: a poll costs nothing next to a drain.
        while self.requests and time.monotonic() < deadline:  # noqa: ASYNC110
            await asyncio.sleep(DRAIN_POLL_SECONDS)
        return self.requests

    @property
    def requests(self) -> int:
        return super().requests + (self._embedder.running if self.core_or_none is not None else 0)

    async def stop(self) -> None:
        self._stopping.set()
        await self.hand_back_all()
        self.close_streams(unavailable("the node is stopping", "STOPPING"))
        await asyncio.sleep(0)
        if self._kv_events is not None:
            await asyncio.to_thread(self._kv_events.close)
        await self.leave_engine()
        if self.core_or_none is not None:
            self.engine.close()

    async def leave_engine(self) -> bool:
        """Ends all but the engine. Returns whether the step thread has ended."""
        self.cache_service.close()
        await self.sources.close()
        if self._registration is not None:
            await self._registration.close()
        ended = self.core_or_none is None or await asyncio.to_thread(self.steps.stop)
        await self.tasks.close()
        if self._images is not None:
            await self._images.contents.close()
        return ended

    def close_streams(self, error: BatonError) -> None:
        """Ends those of all callers, but for watchers of the cache."""
        self.streams.close(error)
        self.borrowers.close(error)

    async def hand_back_all(self) -> int:
        """Hands running requests back. Returns their number, once the messages have left."""
        count = self.requests
        if self.core_or_none is None or not (self.streams.open or count):
            return 0
        self.hand_back()
        self._embedder.hand_back()
        deadline = time.monotonic() + HAND_BACK_SECONDS
        while time.monotonic() < deadline and (self.requests or self.streams.unsent):  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        return count

    async def _watch_steps(self) -> None:
        while True:
            if self.stuck():
                self.close_streams(self.stuck_error())
            await asyncio.sleep(WATCH_SECONDS)

    def _crashed(self, error: BaseException) -> None:
        """An error has escaped the core: a bug. Pages and leases are in doubt, so the process ends at once.
        Peers see the connection break, and a supervisor starts a new incarnation. First, callers learn which
        requests may be the cause, so that the next node computes these one at a time."""
        self.engine.failing = self.draining = True
        if isinstance(error, RanksLost):
            _log.critical("the ranks do not go on together; the process ends", error=str(error))
        else:
            _log.critical("the step thread has failed; the process ends", exc_info=error)
        try:
            if not isinstance(error, RanksLost) or self.engine.ranks.failed(error):
                self._tell_callers(error)
        except Exception as another:
            _log.error("callers could not be told", exc_info=another)
        finally:
            self.end_process()

    def _rank_lost(self, rank: int, code: int) -> None:
        """Another rank has ended: so must this one. The step thread says so if a step was running."""
        _log.critical("another rank has ended; the process ends", rank=rank, exit_code=code)
        time.sleep(LOST_SECONDS)
        if not self.engine.failing:  # else the step thread ends the process, when it has told the callers
            self.end_process()

    def end_process(self) -> NoReturn:
        """At once; leaves neither processes nor shared memory behind."""
        try:
            self.engine.abandon()
        finally:
            os._exit(70)

    def _tell_callers(self, error: BaseException) -> None:
        assert self.core_or_none is not None
        deadline, delivered = time.monotonic() + TELL_SECONDS, threading.Event()
        self.core_or_none.node_failed(f"the node ended with {type(error).__name__} in its step thread")
        self.loop.call_soon_threadsafe(delivered.set)
        delivered.wait(TELL_SECONDS)
        while time.monotonic() < deadline:
            while self.streams.unsent and time.monotonic() < deadline:
                time.sleep(0.005)
            time.sleep(WRITE_SECONDS)
            if not self.streams.unsent:  # a message may have been on its way between outbox and gRPC
                return

    async def embed(self, request: embed_pb2.EmbedPrompts, context: Any) -> embed_pb2.PromptEmbeddings:
        """Serves Embed of both roles. Raises BatonError."""
        if self.draining:
            raise unavailable("this node is draining; use another one", "DRAINING")
        self.require_turning()
        left = context.time_remaining()
        return await self._embedder.embed(request, self.config.request_seconds if left is None else left)

    # --- what the roles use -----------------------------------------------------------------------------

    def make_source_link(self, address: str, peer: PagePeer) -> PageLink:
        return source_link(address, peer, self.cluster.dial)

    def clock(self) -> float:
        return time.monotonic()

    def post(self, function: Callable[..., object], *arguments: Any) -> None:
        self.loop.call_soon_threadsafe(function, *arguments)

    def spawn(self, work: Coroutine[Any, Any, Any], name: str) -> Any:
        return self.tasks.spawn(work, name)

    def endpoints(self, pool: int = 0) -> list[common_pb2.Endpoint]:
        return self.engine.endpoints(pool)

    async def open_receiver(
        self, endpoints: Sequence[common_pb2.Endpoint], address: str, pool: int = 0
    ) -> Receiver:
        busy, dial = (lambda: self._load.running > 0), self.cluster.dial
        return await self.engine.open_receiver(endpoints, address, busy, dial, pool)

    def compile_grammar(
        self, spec: GrammarSpec, done: Callable[[CompiledGrammar | GrammarError], None]
    ) -> None:
        assert self.engine.grammars is not None, "refused by check_start"
        compile_grammar(self.engine.grammars, spec, done, self.spawn)

    def want_images(self, request: EngineRequest, images: tuple[ImageSpan, ...]) -> None:
        assert self._images is not None, "refused by check_start"
        self.post(self._images.want, request, images)

    # --- what others are told ---------------------------------------------------------------------------

    def info(self) -> node_pb2.NodeInfo:
        return worker_info(self.engine if self.core_or_none is not None else None, self.incarnation)

    def observe(self) -> None:
        """Delivers embeddings, and takes a snapshot for `load`. Called in the step thread after each flush.
        While there is work, a snapshot is reused for a while, because taking one costs as much as planning a
        step."""
        core, now = self.core_or_none, time.monotonic()
        if core is not None and core.scheduler.embedded:
            self.post(self._embedder.deliver, core.scheduler.take_embedded())
        if core is None or (core.requests and now - self.observed < SNAPSHOT_SECONDS):
            return
        self.observed = now
        before, self._load = self._load, snapshot(core.scheduler, core.requests)
        if not (before.requests and core.requests) and before != self._load:
            self.post(self.cache_service.wake)

    def load(self) -> node_pb2.Load:
        load = node_pb2.Load()
        load.CopyFrom(self._load)
        load.draining = self.draining
        if self.core_or_none is not None:
            load.step_age_ms = int(1000 * self.steps.step_age)
            add_step_cost(load, self.core_or_none.step_stats)
            add_sharing(load, self.core_or_none.sharing)
            load.problems.extend(self.problems(load))
            add_grammars(load, self.engine)
            if self.engine.images is not None and self._images is not None:
                add_encoding(load, self.engine.images.counters, self._images.choice.local.cost)
            self.engine.ranks.add_plans(load)
        return load

    def problems(self, load: node_pb2.Load) -> Iterator[node_pb2.Problem]:
        """Current problems."""
        if self.stuck():
            error = self.stuck_error()
            yield node_pb2.Problem(reason=error.reason, message=error.message, stops_serving=True)
        if self.core_or_none is not None and self.steps.broken:
            yield node_pb2.Problem(
                reason="STEPS_FAIL", message=self.steps.broken, stops_serving=True, ends_process=True
            )
        if load.pages.quarantined:
            text = f"{load.pages.quarantined} pages wait for the end of a copy that is overdue"
            yield node_pb2.Problem(reason="PAGES_QUARANTINED", message=text)

    async def ask(self, question: Callable[[C], Answer], seconds: float) -> Answer | None:
        """What the question says of the core, in the step thread. None: no answer within `seconds`."""
        answer: asyncio.Future[Answer] = self.loop.create_future()

        def take(found: Answer) -> None:
            if not answer.done():  # it was waited for
                answer.set_result(found)

        self.steps.call(lambda core, now: self.post(take, question(core)))
        try:
            async with asyncio.timeout(seconds):
                return await answer
        except TimeoutError:
            return None

    async def page_map(self, max_cells: int) -> node_pb2.PageMap | None:
        """See rpc.node_watch. None: the step thread does not answer, or there is no pool yet."""
        if self.core_or_none is None:
            return None
        uses = await self.ask(lambda core: core.page_uses(), MAP_SECONDS)
        return page_map_message(page_map(uses, max_cells)) if uses is not None else None

    def check_idle(self, seconds: float = 5.0) -> None:
        """Checks the page pool's accounting; raises AccountingError unless nothing is held.

        Waits for the step thread; TimeoutError when it does not answer.
        """
        done: Future[None] = Future()

        def check(core: C, now: float) -> None:
            try:
                self.engine.check_idle()
                done.set_result(None)
            except BaseException as error:
                done.set_exception(error)

        self.steps.call(check)
        done.result(seconds)
