"""The gateway's process: its connections, timers and tasks, its problems and its end."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine
from typing import Any

import grpc.aio

from baton.authentication.cluster import ClusterAuthentication, ClusterCredentials
from baton.authentication.resume_ticket import TicketSeal
from baton.config import GatewayConfig
from baton.gateway.cell_metrics import CellCollector, cell_load
from baton.gateway.decode_client import DecodeClient
from baton.gateway.embedding_client import EmbeddingClient
from baton.gateway.pictures_server import PicturesServer
from baton.gateway.probe import Prober
from baton.gateway.request_log import EndedRequest, RequestLog
from baton.gateway.runtime import DecodeLink
from baton.gateway.shell import GatewayShell, RunningRequest
from baton.gateway.tokenizer_client import TokenizerClient
from baton.gateway.traces import Traces
from baton.gateway.worker_registry import CacheWatch
from baton.parsers.registry import check_names
from baton.rpc.address import new_incarnation
from baton.rpc.channel import Dial, open_channel
from baton.rpc.errors import BatonError, from_rpc_error, unavailable
from baton.rpc.link import Link
from baton.rpc.logs import get_logger
from baton.rpc.tasks import Tasks, keep_connected, wait_at_most
from baton.v1 import decode_pb2, decode_pb2_grpc, node_pb2, node_pb2_grpc

INFO_SECONDS = 10.0
"""Time for a worker to say who it is."""
TAKE_SECONDS = 5.0
"""Time for a decode node to hand out a log."""
ROLE_SECONDS = 20.0
"""What a change of role may take beyond the time that requests have: see worker.process."""


class Gateway(GatewayShell):
    """Runs requests and connections with asyncio and gRPC."""

    def __init__(
        self, config: GatewayConfig, dial: Dial = open_channel, cluster: ClusterCredentials | None = None
    ) -> None:
        """dial: opens connections to the tokenizer and workers. cluster: what workers show who fetch images,
        and what resume tickets are sealed with; None: nothing. Raises BatonError for values not known in
        `config`."""
        check_names(config)
        self.incarnation = new_incarnation()
        self.log = get_logger()
        self.dial = dial
        self._tasks = Tasks()
        super().__init__(config, TokenizerClient(config.resume_wait_seconds, dial))
        cluster = cluster or ClusterCredentials()
        self.seal = TicketSeal(cluster.secret) if cluster.secret else None
        authentication = ClusterAuthentication(cluster)
        self._pictures_server = PicturesServer(config, authentication, self.pictures)
        self.request_log = RequestLog()
        self.traces = Traces(self.incarnation, self.recorder, dial)
        self.embedder = EmbeddingClient(config, self.nodes, self.tokenizer, dial)
        CellCollector(lambda: cell_load(self.nodes, self.router, self.clock()), self.metrics.registry)
        self._prober = Prober(self.hops, self.next_number, config.probe_every, self._probed)
        self._rests = asyncio.Event()
        """Set when a request or call has ended and none is left."""

    # What executes requests and connections: GatewayRuntime.

    def clock(self) -> float:
        return time.monotonic()

    def after(self, seconds: float, function: Callable[[], object]) -> asyncio.TimerHandle:
        return asyncio.get_running_loop().call_later(seconds, function)

    def spawn(self, work: Coroutine[Any, Any, Any], name: str) -> asyncio.Task[Any]:
        return self._tasks.spawn(work, name)

    def make_link(
        self,
        address: str,
        hello: Callable[[], decode_pb2.GenerateCommand],
        on_message: Callable[[decode_pb2.StepEvents], None],
        on_up: Callable[[decode_pb2.StepEvents], None],
        on_down: Callable[[BatonError], None],
    ) -> DecodeLink:
        return Link[decode_pb2.GenerateCommand, decode_pb2.StepEvents](
            address,
            lambda channel: decode_pb2_grpc.DecodeStub(channel).Generate,
            hello=hello,
            on_message=on_message,
            on_up=on_up,
            on_down=on_down,
            join=_join,
            dial=self.dial,
        )

    async def node_info(self, address: str) -> node_pb2.NodeInfo:
        async with self.dial(address) as channel:
            ask = node_pb2_grpc.NodeStub(channel).GetInfo
            try:
                info: node_pb2.NodeInfo = await ask(node_pb2.GetInfoRequest(), timeout=INFO_SECONDS)
            except grpc.aio.AioRpcError as error:
                raise from_rpc_error(error) from error
        return info

    async def set_role(self, address: str, role: str, seconds: float) -> node_pb2.SetRoleResponse:
        request = node_pb2.SetRoleRequest(role=role, timeout_ms=round(1000 * seconds))
        async with self.dial(address) as channel:
            ask = node_pb2_grpc.NodeStub(channel).SetRole
            try:
                answer: node_pb2.SetRoleResponse = await ask(request, timeout=seconds + ROLE_SECONDS)
            except grpc.aio.AioRpcError as error:
                raise from_rpc_error(error) from error
        return answer

    async def take_log(self, name: tuple[int, int]) -> decode_pb2.DecodeLog | None:
        request = decode_pb2.TakeLogRequest(gateway=name[0], request=name[1])

        async def ask(address: str) -> decode_pb2.DecodeLog | None:
            async with self.dial(address) as channel:
                try:
                    log: decode_pb2.DecodeLog = await decode_pb2_grpc.DecodeStub(channel).TakeLog(
                        request, timeout=TAKE_SECONDS
                    )
                except grpc.aio.AioRpcError:
                    return None
            return log

        found = await asyncio.gather(*map(ask, list(self.nodes.decode)))
        logs = [log for log in found if log is not None]
        return max(logs, key=lambda log: sum(len(choice.token_ids) for choice in log.choices), default=None)

    async def pictures_address(self) -> str:
        nodes = self.nodes.decode
        peer = next((address for address, node in nodes.items() if node.usable), next(iter(nodes), ""))
        return await self._pictures_server.address(peer)

    def follow_load(self, address: str) -> asyncio.Task[Any]:
        watch = CacheWatch(address, self.router, self.dial, self.nodes.told_role)
        return self._tasks.spawn(keep_connected(watch.connect), f"cache of {address}")

    def ended(
        self, request: RunningRequest, outcome: str, ended: EndedRequest, error: BatonError | None
    ) -> None:
        super().ended(request, outcome, ended, error)
        self.request_log.add(outcome, ended, error)

    def rest(self) -> None:
        if not self.running:
            self._rests.set()

    # Life.

    def start(self) -> None:
        """Begins to connect; unreachable peers are retried."""
        self.nodes.start()
        if self.config.probe_every > 0:
            self._prober.start()
        if self.config.auto_roles:
            self.auto_roles.start()

    def _probed(self, outcome: str, seconds: float) -> None:
        self.metrics.probes.labels(outcome).inc()
        self.metrics.probe_seconds.set(seconds)

    async def wait_until_usable(self, seconds: float) -> bool:
        """Waits at most `seconds` for the tokenizer and one decode node; logs what it waits for."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + seconds
        next_word = loop.time() + 2.0
        while self.missing():
            now = loop.time()
            if now >= deadline:
                return False
            if now >= next_word:
                self.log.info("waiting", peers="; ".join(self.missing()))
                next_word = now + 5.0
            await asyncio.sleep(0.02)
        return True

    def missing(self) -> list[str]:
        """Why no request can be served now; empty: requests are served."""
        missing = self.nodes.missing()
        return [*missing, *self.nodes.searches] if missing else []

    def problems(self) -> list[node_pb2.Problem]:
        """Current problems. A lost decode node stops nothing while another one is left."""
        problems = []
        if not self.tokenizer.connected:
            text = f"no tokenizer is reachable ({', '.join(self.tokenizer.nodes) or 'none is known'})"
            problems.append(
                node_pb2.Problem(reason="TOKENIZER_UNAVAILABLE", message=text, stops_serving=True)
            )
        lost = self.nodes.unusable()
        if lost or not self.nodes.decode:
            none_left = len(lost) == len(self.nodes.decode)
            reason = "NO_DECODE_NODE" if none_left else "DECODE_LOST"
            text = f"decode nodes that cannot be used: {'; '.join(lost)}"
            problems.append(node_pb2.Problem(reason=reason, message=text, stops_serving=none_left))
        failures = self._prober.failures
        if failures:
            hops = [
                f"{decode}{f' from {prefill}' if prefill else ''}: {text}"
                for (decode, prefill), text in failures.items()
            ]
            text = f"probes failed at {'; '.join(hops)}"
            all_failed = failures.keys() >= {(node.address, prefill) for node, prefill in self.hops()}
            problems.append(node_pb2.Problem(reason="PROBE_FAILED", message=text, stops_serving=all_failed))
        return problems

    @property
    def healthy(self) -> bool:
        return not self._draining and not any(problem.stops_serving for problem in self.problems())

    async def drain(self, seconds: float) -> int:
        """Refuses new requests and waits at most `seconds` for running ones; returns the number of those
        left."""
        self._draining = True
        self.auto_roles.close()
        if self.running:
            self._rests.clear()
            await wait_at_most(seconds, self._rests)
        return self.running

    async def stop(self) -> None:
        """Fails running requests and disconnects from all peers. Idempotent."""
        self._draining = True
        self._prober.close()
        self.auto_roles.close()
        for request in list(self._running):
            request.fail(unavailable("the gateway is stopping", "STOPPING", 1000))
        await self.embedder.close()
        await self._pictures_server.stop()
        self.pictures.close()
        await self.nodes.close()
        await self._tasks.close()
        await self.traces.close()
        self.request_log.close()

    def refused(
        self,
        api: str,
        reason: str,
        field: str | None,
        client: str,
        key: str = "",
        *,
        message: str = "",
        **more: object,
    ) -> None:
        """A client's message or call became no request. client: its address. key: the API key's name.
        message: what it was told."""
        self.metrics.refused(api, reason)
        named = {"key": key} if key else {}
        self.request_log.refused(api, reason, field, message, client=client, **named, **more)

    def hops(self) -> list[tuple[DecodeClient, str]]:
        """Pairs that requests may use: a decode node and a prefill node's address ("" if there are none)."""
        return [(node, prefill) for node in self.usable_nodes() for prefill in self.nodes.prefill or ("",)]

    def info(self) -> node_pb2.NodeInfo:
        info = node_pb2.NodeInfo(role="gateway", incarnation=self.incarnation)
        model = self._model()
        if model is not None:
            info.model.CopyFrom(model)
        info.peers.extend(self.nodes.describe())
        change = self.auto_roles.last_change()
        if change is not None:
            info.role_change.CopyFrom(change)
        return info

    def load(self) -> node_pb2.Load:
        load = node_pb2.Load(
            problems=self.problems(),
            draining=self._draining,
            requests=self.running,
            running=sum(node.requests for node in self.nodes.decode.values()),
        )
        load.MergeFrom(self._totals)
        return load


def _join(commands: list[decode_pb2.GenerateCommand]) -> decode_pb2.GenerateCommand:
    return decode_pb2.GenerateCommand(several=decode_pb2.DecodeCommands(commands=commands))
