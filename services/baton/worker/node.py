"""The processes of prefill and decode nodes: an engine, its step thread, load, drain and stop."""

from __future__ import annotations

import asyncio
import os
import threading
import time
from collections.abc import Callable, Coroutine, Iterator, Sequence
from concurrent.futures import Future
from functools import partial
from typing import Any

import grpc.aio

from baton.config import WorkerConfig
from baton.discovery.etcd import Registration, register
from baton.engine.idle_steps import IdleSteps
from baton.engine.image_spans import ImageSpan
from baton.engine.request import EngineRequest
from baton.engine.step_loop import StepLoop
from baton.grammar.base import CompiledGrammar, GrammarBusy, GrammarError, GrammarSpec
from baton.grammar.compiler import GrammarCompiler
from baton.kvcache.page_map import page_map
from baton.rpc.address import new_incarnation
from baton.rpc.authentication import ClusterCredentials
from baton.rpc.errors import BatonError, unavailable
from baton.rpc.logs import get_logger
from baton.rpc.tasks import Tasks
from baton.step_cost import CostCalibration
from baton.tracing.recorder import Recorder
from baton.transport.base import Receiver
from baton.transport.grpc import PageSourceServicer
from baton.v1 import cache_pb2, cache_pb2_grpc, common_pb2, embed_pb2, node_pb2, prefill_pb2, prefill_pb2_grpc
from baton.worker.cache_service import CacheServicer
from baton.worker.caller_stream import CallerStreams
from baton.worker.embedder import Embedder
from baton.worker.engine import Engine, build_engine, log_cost, measure_steps, step_limits
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
)
from baton.worker.memory import keep_freed_memory
from baton.worker.model import device_of, use_device
from baton.worker.peers import PageLink, PagePeer
from baton.worker.ranks.runner import RanksLost
from baton.worker.shell import LOST_SECONDS, C, WorkerShell
from baton.worker.sources.shell import CacheLending, SourcePeers, source_link

_log = get_logger()

DRAIN_POLL_SECONDS = 0.02
SNAPSHOT_SECONDS = 0.02
TELL_SECONDS = 3.0
"""How long a failing process waits at most until its callers have got their messages. It takes milliseconds;
longer on a busy machine, or with a caller that does not read."""
WRITE_SECONDS = 0.05
"""Between the last message that gRPC has written and the end."""
MAP_SECONDS = 1.0
"""How long a page map waits for the step thread."""
COMPILE_SECONDS = 10.0
"""A request whose grammar is not compiled by then is refused."""
LOAD_SECONDS = 60.0
"""For the vocabulary, which is loaded when the first grammar comes."""
WATCH_SECONDS = 0.25
"""How often the step thread is checked."""


class WorkerNode(WorkerShell[C]):
    """Base class of the two worker processes, which add `role` and their services."""

    role: str
    engine: Engine
    steps: StepLoop[C]
    loop: asyncio.AbstractEventLoop
    streams: CallerStreams[Any]

    def __init__(self, config: WorkerConfig) -> None:
        """Raises BatonError when the device, the cluster secret or a certificate cannot be used."""
        if device_of(config.device).type == "cpu":
            keep_freed_memory()
        self.config = config
        self.cluster = ClusterCredentials.load(config)
        self.incarnation = new_incarnation()
        self.recorder = Recorder(config.recorder_events, self.clock)
        self.draining = False
        self._crashing = False
        self.tasks = Tasks()
        self.core_or_none: C | None = None
        self._address = ""
        self._load = node_pb2.Load()
        self.observed = 0.0
        """When the last snapshot of the load was taken, on the monotonic clock."""
        self.lending, self.sources = CacheLending(self, LeaseStream), SourcePeers(self)
        self._borrowers = CallerStreams(self.lending, self.tasks)
        self._cache_service = CacheServicer(self, self._borrowers)
        self._page_source: PageSourceServicer | None = None
        self._stopping = threading.Event()
        self._registration: Registration | None = None
        self._kv_events: KvEventPublisher | None = None
        self._images: ImageRequests | None = None

    # --- life -------------------------------------------------------------------------------------------

    async def start(self, address: str) -> None:
        """Loads the model and starts the step thread. Raises BatonError."""
        self.loop = asyncio.get_running_loop()
        self._address = address
        if self.config.kv_events:
            check_kv_events(self.config)
            self._kv_events = KvEventPublisher(self.config)
        self.engine = await asyncio.to_thread(build_engine, self.config, self.incarnation, self._stopping)
        self.config, self.model_info = self.engine.config, self.engine.model_info
        self.device = self.engine.device.type
        self.layout, self.page_bytes = self.engine.layout, self.engine.pages.page_bytes
        if self._page_source is not None:
            self._page_source.pages = self.engine.pages
        try:
            cost = await asyncio.to_thread(measure_steps, self.engine)
        except BatonError:
            self.engine.close()  # as `stop` does, but for a node without a core
            raise
        core = self.core_or_none = self.make_core(self.engine.cache)
        calibration = core.step_stats.calibration = CostCalibration(cost)
        if core.scheduler.drafts is not None:
            core.scheduler.drafts.lengths.times.cost = cost
        self.steps = StepLoop(
            core,
            self.engine.runner,
            name=f"{self.role}-steps",
            overlap=self.engine.overlap,
            crashed=self._crashed,
            warm=self.engine.warm,
            cooled=lambda error: _log.warning("first tokens come later: no warm turns", exc_info=error),
            spare=partial(self._spare_turn, core),
        )
        if self.engine.host_memory is not None:
            self.engine.host_memory.start(self._in_steps, lambda: calibration.cost)
        if self._kv_events is not None:
            caches = {"GPU": self.engine.cache}
            if self.engine.host_memory is not None:
                caches["CPU"] = self.engine.host_memory.tier.cache
            self._kv_events.start(caches, self._in_steps)
        # Other processes do not slow a GPU's steps at the start, and a node that shares the GPU would wait.
        self._idle_steps: IdleSteps | None = None
        if self.engine.device.type == "cpu":
            limits = step_limits(self.engine)
            self._idle_steps = IdleSteps(self.engine.runner, limits, self.engine.cache, time.monotonic)
        self.engine.ranks.watch(self._rank_lost)
        self._embedder = Embedder(self.config, self.steps, self.model_info)
        if self.engine.images is not None:
            self._images = ImageRequests.of_engine(self, self.engine, self.cluster.dial)
        self.observe()
        self.steps.call(lambda core, now: use_device(self.engine.device))
        self.steps.start()
        self.tasks.spawn(self._watch_steps(), "watch of the step thread")
        self._registration = register(self.config, self.role, self.incarnation, address)

    def _in_steps(self, function: Callable[[], None]) -> None:
        self.steps.call(lambda core, now: function())

    def _spare_turn(self, core: C, wanted: Callable[[], bool]) -> None:
        if self._idle_steps is None or self.requests:
            return
        try:
            calibration = core.step_stats.calibration
            if calibration is not None and self._idle_steps.turn(calibration, wanted):
                log_cost("steps measured again", calibration.cost)
        except Exception as error:  # if the device is broken, the next request's step fails too
            self._idle_steps = None
            _log.warning("steps are not measured again", exc_info=error)

    async def drain(self, seconds: float) -> int:
        """Refuses new requests and waits for running ones; returns the number of those left."""
        self.draining = True
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
        self._cache_service.close()
        if self._kv_events is not None:
            await asyncio.to_thread(self._kv_events.close)
        self._borrowers.close(unavailable("the node is stopping", "STOPPING"))
        await self.sources.close()
        if self._registration is not None:
            await self._registration.close()
        if self.core_or_none is not None:
            await asyncio.to_thread(self.steps.stop)
        await self.tasks.close()
        if self._images is not None:
            await self._images.contents.close()
        if self.core_or_none is not None:
            self.engine.close()

    async def _watch_steps(self) -> None:
        while True:
            if self.stuck():
                self.streams.close(self.stuck_error())
                self._borrowers.close(self.stuck_error())
            await asyncio.sleep(WATCH_SECONDS)

    def _crashed(self, error: BaseException) -> None:
        """An error has escaped the core: a bug. Pages and leases are in doubt, so the process ends at once.
        Peers see the connection break, and a supervisor starts a new incarnation. First, callers learn which
        requests may be the cause, so that the next node computes these one at a time."""
        self._crashing = self.draining = True
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
            self._end()

    def _rank_lost(self, rank: int, code: int) -> None:
        """Another rank has ended: so must this one. The step thread says so if a step was running."""
        _log.critical("another rank has ended; the process ends", rank=rank, exit_code=code)
        time.sleep(LOST_SECONDS)
        if not self._crashing:  # else the step thread ends the process, when it has told the callers
            self._end()

    def _end(self) -> None:
        """Leaves neither processes nor shared memory behind."""
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

    async def Embed(self, request: embed_pb2.EmbedPrompts, context: Any) -> embed_pb2.PromptEmbeddings:
        """Serves Embed of both roles."""
        if self.draining:
            raise unavailable("this node is draining; use another one", "DRAINING")
        self.require_turning()
        left = context.time_remaining()
        return await self._embedder.embed(request, self.config.request_seconds if left is None else left)

    # --- what the roles use -----------------------------------------------------------------------------

    def serve_pages(self, server: grpc.aio.Server) -> list[str]:
        """Registers Cache and PageSource, which answers once the pool exists; returns their full names."""
        cache_pb2_grpc.add_CacheServicer_to_server(self._cache_service, server)
        self._page_source = PageSourceServicer()
        prefill_pb2_grpc.add_PageSourceServicer_to_server(self._page_source, server)
        services = {**prefill_pb2.DESCRIPTOR.services_by_name, **cache_pb2.DESCRIPTOR.services_by_name}
        return [services[name].full_name for name in ("PageSource", "Cache")]

    def make_source_link(self, address: str, peer: PagePeer) -> PageLink:
        return source_link(address, peer, self.cluster.dial)

    def clock(self) -> float:
        return time.monotonic()

    def post(self, function: Callable[..., object], *arguments: Any) -> None:
        self.loop.call_soon_threadsafe(function, *arguments)

    def spawn(self, work: Coroutine[Any, Any, Any], name: str) -> Any:
        return self.tasks.spawn(work, name)

    def endpoints(self) -> list[common_pb2.Endpoint]:
        return self.engine.endpoints()

    async def open_receiver(self, endpoints: Sequence[common_pb2.Endpoint], address: str) -> Receiver:
        opened = await self.engine.open_receiver(
            list(endpoints), address, lambda: self._load.running > 0, self.cluster.dial
        )
        _log.info("pool of a peer opened", address=address, transport=opened.reason)
        return opened.receiver

    def compile_grammar(
        self, spec: GrammarSpec, done: Callable[[CompiledGrammar | GrammarError], None]
    ) -> None:
        assert self.engine.grammars is not None, "refused by check_start"
        future = self.engine.grammars.submit(spec)
        if future.done():
            done(future.result())
        else:
            self.spawn(self._await_grammar(self.engine.grammars, future, done), "grammar")

    def want_images(self, request: EngineRequest, images: tuple[ImageSpan, ...]) -> None:
        assert self._images is not None, "refused by check_start"
        self.post(self._images.want, request, images)

    async def _await_grammar(
        self,
        grammars: GrammarCompiler,
        future: Future[CompiledGrammar | GrammarError],
        done: Callable[[CompiledGrammar | GrammarError], None],
    ) -> None:
        await asyncio.wait([asyncio.wrap_future(grammars.loaded)], timeout=LOAD_SECONDS)
        await asyncio.wait([asyncio.wrap_future(future)], timeout=COMPILE_SECONDS)
        if future.done():
            done(future.result())
        elif future.running():
            done(GrammarError(f"it takes longer than {COMPILE_SECONDS:g} s to compile: make it smaller"))
        else:
            done(GrammarBusy(f"others were being compiled for {COMPILE_SECONDS:g} s: ask again later"))

    # --- what others are told ---------------------------------------------------------------------------

    def info(self) -> node_pb2.NodeInfo:
        info = node_pb2.NodeInfo(incarnation=self.incarnation)
        if self.core_or_none is not None:
            info.model.CopyFrom(self.engine.model_info)
            info.layout.CopyFrom(self.engine.layout)
            info.endpoints.extend(self.endpoints())
            info.device = str(self.engine.device)
            info.attention = self.engine.attention
            info.ranks.extend(self.engine.ranks.describe(self.engine.device))
        return info

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
        self._load = snapshot(core.scheduler, core.requests)

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
            if self.engine.images is not None:
                add_encoding(load, self.engine.images.counters)
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

    async def page_map(self, max_cells: int) -> node_pb2.PageMap | None:
        """See rpc.node_watch. None: the step thread does not answer, or there is no pool yet."""
        if self.core_or_none is None:
            return None
        read: asyncio.Future[bytearray] = self.loop.create_future()

        def answer(uses: bytearray) -> None:
            if not read.done():  # it was waited for
                read.set_result(uses)

        self.steps.call(lambda core, now: self.post(answer, core.page_uses()))
        try:
            async with asyncio.timeout(MAP_SECONDS):
                uses = await read
        except TimeoutError:
            return None
        return page_map_message(page_map(uses, max_cells))

    def check_idle(self, seconds: float = 5.0) -> None:
        """Checks the page pool's accounting; raises AccountingError unless nothing is held.

        Waits for the step thread; TimeoutError when it does not answer.
        """
        done = threading.Event()
        failure: list[BaseException] = []

        def check(core: C, now: float) -> None:
            try:
                core.scheduler.cache.check(idle=True)
            except BaseException as error:
                failure.append(error)
            done.set()

        self.steps.call(check)
        if not done.wait(seconds):
            raise TimeoutError(f"the {self.role} step thread did not answer within {seconds:g} s")
        if failure:
            raise failure[0]
