"""Runs one process: bind, load, say ready, serve, drain, stop."""

from __future__ import annotations

import asyncio
import gc
import os
import sys
from collections.abc import Coroutine, Sequence
from typing import Any, Protocol

import grpc.aio
import uvloop
from prometheus_client import CollectorRegistry

import baton
from baton.authentication.cluster import ClusterAuthentication, ClusterCredentials, read_metrics_token
from baton.authentication.interceptor import AuthenticationInterceptor
from baton.config import NodeConfig
from baton.rpc import logs, reflection
from baton.rpc.address import is_loopback, join_address
from baton.rpc.bind import bind_grpc, bind_http, host_and_port
from baton.rpc.channel import MAX_MESSAGE_BYTES, server_options
from baton.rpc.errors import BatonError, OnRefused
from baton.rpc.health import HealthMonitor, HealthServicer, serves
from baton.rpc.http_server import HttpServer, metrics_app
from baton.rpc.interceptors import MalformedMessages, ReadinessInterceptor
from baton.rpc.metrics import LoadCollector
from baton.rpc.node_servicer import NodeServicer
from baton.rpc.node_watch import HasPool, NodeWatches
from baton.rpc.tasks import signals, unless
from baton.rpc.trace_messages import recent
from baton.tracing.recorder import Recorder
from baton.tracing.spans import SpanError, Spans
from baton.v1 import node_pb2, node_pb2_grpc, trace_pb2

EXIT_BROKEN = 70
STOP_SECONDS = 10.0
"""Longest time of a node's stop()."""

GC_THRESHOLDS = (3_000, 5, 5)
"""Arguments of `gc.set_threshold`. CPython 3.12 collects the youngest generation after 700 new objects. A
step's messages to about sixty streams are as many, so collections fell into the middle of them. A
higher number would keep objects in accidental cycles, such as a prompt, for longer. A full collection
comes about as often as by default."""

_log = logs.get_logger()


class NodeProcess(Protocol):
    """The interface of a process to run_node."""

    @property
    def role(self) -> str: ...

    @property
    def recorder(self) -> Recorder: ...

    def add_services(self, server: grpc.aio.Server) -> Sequence[str]:
        """Registers its services; returns their full names, for health and reflection."""
        ...

    async def start(self, address: str) -> None:
        """Loads and connects; called once the port is bound. Raises BatonError when that cannot be done.

        Until it has returned, calls to the services are refused with UNAVAILABLE (NOT_READY).
        """
        ...

    async def drain(self, seconds: float) -> int:
        """Refuses new requests and waits for running ones; returns how many are left after `seconds`."""
        ...

    async def stop(self) -> None:
        """Ends running requests, each with its terminal event, and frees everything; also called after a
        failed start."""
        ...

    def info(self) -> node_pb2.NodeInfo:
        """run_node fills in role, version, pid, address and http_address (if it serves HTTP)."""
        ...

    def load(self) -> node_pb2.Load:
        """Health is NOT_SERVING while one of its problems stops serving."""
        ...


async def run_node(
    node: NodeProcess,
    config: NodeConfig,
    *,
    authentication: ClusterAuthentication | None = None,
    serve_metrics_http: bool = True,
    registry: CollectorRegistry | None = None,
    ready: asyncio.Event | None = None,
    stop: asyncio.Event | None = None,
    on_refused: OnRefused | None = None,
) -> int:
    """Serves until SIGTERM, SIGINT or `stop`; then drains and stops. Returns the process's exit code.

    0: stopped as asked. 2: could not start; one line on stderr says why. 1: an error nobody foresaw.
    70: broken, such as a worker whose GPU is lost; it has handed back what it had.
    With `stop` given, signals are left alone. `registry` holds the node's own metrics; the load is added.
    A second signal during the drain stops at once. `authentication`: who may call; without one, whom the
    configuration's cluster secret and certificates let in. `on_refused`: for a log of refused calls.
    """
    if not logs.is_configured():
        try:
            logs.configure(node.role, config.log_level, config.log_format)
        except ValueError as error:
            print(f"baton {node.role}: {error}", file=sys.stderr, flush=True)
            return 2
    try:
        shell = ProcessShell(
            node,
            config,
            authentication or ClusterAuthentication(ClusterCredentials.load(config)),
            serve_metrics_http,
            registry or CollectorRegistry(auto_describe=False),
            on_refused,
        )
    except BatonError as error:
        print(f"baton {node.role}: {error.message}", file=sys.stderr, flush=True)
        return 2
    try:
        if config.otel_endpoint:
            node.recorder.spans = Spans(node.role, config.otel_endpoint, config.otel_sample)
    except SpanError as error:
        print(f"baton {node.role}: {error}", file=sys.stderr, flush=True)
        return 2
    stopping = stop or asyncio.Event()
    stop_now = asyncio.Event()
    with signals(stopping, stop_now, install=stop is None):
        try:
            await shell.bind()
            if not await shell.start(stopping):
                return 0
            shell.announce()
            if ready is not None:
                ready.set()
            await shell.wait(stopping)
            if shell.broken:
                _log.critical("the process cannot go on, and ends", why=shell.broken)
                return EXIT_BROKEN
            remaining = await shell.drain(config.drain_seconds, stop_now)
            _log.info("stopping", remaining=remaining)
            return 0
        except BatonError as error:
            print(f"baton {node.role}: {error.message}", file=sys.stderr, flush=True)
            return 2
        except Exception as error:
            _log.exception("failed")
            print(f"baton {node.role}: {type(error).__name__}: {error}", file=sys.stderr, flush=True)
            return 1
        finally:
            await shell.close(stop_now)
            if node.recorder.spans is not None:
                await asyncio.to_thread(node.recorder.spans.close)


def run_process(work: Coroutine[Any, Any, int]) -> int:
    """Runs a process's `serve(...)` on uvloop. Returns its exit code; a BatonError is one line and 2."""
    try:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.get_loop().set_exception_handler(_unhandled)
            return runner.run(work)
    except BatonError as error:
        print(f"baton: {error.message}", file=sys.stderr, flush=True)
        return 2
    except KeyboardInterrupt:
        return 130


def freeze_garbage_collector() -> None:
    """Called once what stays has been loaded: the collector need not look at it again.

    The collection after the freeze makes CPython forget how much that was. It puts off a full collection
    until a quarter as many objects as the last one left have newly survived, and does not count those that a
    finalizer brought back to life for a while, as it does with asynchronous generators that were not read to
    their end. With 200,000 objects loaded, calls that end early would pile up for thousands of calls.
    """
    gc.collect()
    gc.freeze()
    gc.collect()
    gc.set_threshold(*GC_THRESHOLDS)


class ProcessShell:
    """The servers around a node."""

    def __init__(
        self,
        node: NodeProcess,
        config: NodeConfig,
        authentication: ClusterAuthentication,
        serve_metrics_http: bool,
        registry: CollectorRegistry,
        on_refused: OnRefused | None,
    ) -> None:
        self._node = node
        self._config = config
        self._authentication = authentication
        self._serve_http = serve_metrics_http and config.http_port is not None
        self._registry = registry
        self._metrics_token = read_metrics_token(config)
        self._gate = ReadinessInterceptor(on_refused)
        self._health = HealthServicer()
        self._draining = False
        self._started = False
        self.watches = NodeWatches(self.info, self.load, node.page_map if isinstance(node, HasPool) else None)
        self.broken = ""
        """Why the process cannot continue; empty: it can."""
        self._ended = asyncio.Event()
        self._health_monitor = HealthMonitor(self._health, self.load, self._end)
        self._http: HttpServer | None = None
        self._http_address = ""
        self.address = ""
        limit = int(getattr(config, "max_message_bytes", MAX_MESSAGE_BYTES))
        options = dict(server_options(limit)) | dict(authentication.options())
        self._server = grpc.aio.server(
            options=list(options.items()),
            interceptors=[
                AuthenticationInterceptor(authentication, on_refused),
                self._gate,
                MalformedMessages(on_refused),
            ],
        )

    async def bind(self) -> None:
        """Binds both ports and serves health (NOT_SERVING), reflection and Node."""
        services = list(self._node.add_services(self._server))
        self._gate.guard(services)
        node_pb2_grpc.add_NodeServicer_to_server(NodeServicer(self, self._node), self._server)
        services.append(node_pb2.DESCRIPTOR.services_by_name["Node"].full_name)
        self._health.add_to(self._server, services)
        reflection.add_to(self._server, [*services, HealthServicer.SERVICE])
        bound = bind_grpc(
            self._server, self._config.host, self._config.port, self._authentication, self._config.insecure
        )
        shared = str(getattr(self._config, "shared", ""))
        if shared:
            where = host_and_port(shared, "--shared")
            bind_grpc(self._server, *where, self._authentication, self._config.insecure, shared=True)
        reachable = not is_loopback(self._config.host)
        if missing := self._authentication.missing(reachable):
            who = "anybody" if reachable else "any user of this machine"
            _log.warning("callers are not authenticated", who=who, missing=missing)
        self.address = self._config.advertise or bound
        await self._server.start()
        self._registry.register(LoadCollector(lambda: self._node.role, self.load, self._node.info))
        if self._serve_http:
            self._start_http()

    def _start_http(self) -> None:
        """Beyond this machine readers of metrics must know the cluster's secret; everywhere they must show a
        certificate, if the cluster has any."""
        host, cluster = self._config.host, self._authentication.cluster
        assert self._config.http_port is not None
        app = metrics_app(
            self._registry,
            self._http_health,
            "" if is_loopback(host) else cluster.secret,
            self._metrics_token,
            lambda: self._node.info().model.name,
            self._config.allowed_hosts if is_loopback(host) else ("*",),
        )
        tls = cluster.tls.ssl_context(server=True) if cluster.tls is not None else None
        listening = bind_http(host, self._config.http_port)
        self._http = HttpServer(app, [listening], tls, keep_alive=False)
        self._http_address = join_address(host, self._http.port)
        self._http.start()

    async def start(self, stopping: asyncio.Event) -> bool:
        """Starts the node; returns False if stopped before it had started."""
        self._started = True
        return await unless(self._node.start(self.address), stopping)

    async def wait(self, stopping: asyncio.Event) -> None:
        """Waits until the process is stopped or cannot continue."""
        await unless(self._ended.wait(), stopping)

    def _end(self, why: str) -> None:
        self.broken = why
        self._ended.set()

    def announce(self) -> None:
        """The node is ready: opens the services, reports SERVING, prints the ready line."""
        freeze_garbage_collector()
        self._gate.open()
        self._health_monitor.start()
        info = self.info()
        http = info.http_address or "none"
        _log.info("ready", address=info.address, http=http, pid=info.pid)
        print(
            f"ready role={info.role} address={info.address} http={http} pid={info.pid}",
            flush=True,
        )

    async def drain(self, seconds: float, stop_now: asyncio.Event | None = None) -> int:
        """Reports NOT_SERVING and waits for running requests, until `stop_now`. Returns what remains."""
        if not self._draining:
            self._draining = True
            _log.info("draining", seconds=seconds)
            self._health.set_all(serving=False)
        remaining = asyncio.ensure_future(self._node.drain(seconds))
        # The node itself keeps the time; the margin guards against one that does not.
        if not await unless(remaining, stop_now or asyncio.Event(), seconds + 5.0):
            return max(1, self.load().requests)
        return remaining.result()

    async def close(self, stop_now: asyncio.Event) -> None:
        """Stops the node, if its start was attempted, and the servers."""
        self._health_monitor.stop()
        self.watches.close()
        try:
            if self._started:
                async with asyncio.timeout(STOP_SECONDS):
                    await self._node.stop()
        except TimeoutError:
            _log.error("stop takes too long; leaving", seconds=STOP_SECONDS)
        except Exception:
            _log.exception("stop failed")
        await self._server.stop(grace=0.0 if stop_now.is_set() else 0.5)
        if self._http is not None:
            await self._http.stop()

    def info(self) -> node_pb2.NodeInfo:
        info = self._node.info()
        info.role = self._node.role
        info.version = baton.__version__
        info.pid = os.getpid()
        info.address = self.address
        info.http_address = self._http_address or info.http_address
        return info

    def recent(self, request: trace_pb2.RecentRequest) -> trace_pb2.RecentEvents:
        """Raises BatonError."""
        found = recent(self._node.recorder, request)
        found.role, found.incarnation = self._node.role, self._node.info().incarnation
        return found

    def load(self) -> node_pb2.Load:
        load = self._node.load()
        load.draining = load.draining or self._draining
        return load

    def _http_health(self) -> tuple[bool, list[str]]:
        try:
            load = self.load()
        except Exception as error:
            return False, [f"the load is not known: {type(error).__name__}"]
        return self._health.serving and serves(load), [problem.message for problem in load.problems]


def _unhandled(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
    _log.error(
        "unhandled exception", where=context.get("message", ""), exc_info=context.get("exception") or False
    )
