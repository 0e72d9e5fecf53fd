"""A worker as a process: a node of one role at a time, over one engine.

A change of role is a restart without loading. The node of the old role hands back what it has, leaves the
engine, and a node of the other role, of another incarnation, takes it over with pool, prefix tree and page
generations. So peers see what they see of any restart, and nothing that was promised before holds.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import aclosing
from dataclasses import fields
from typing import Any

import grpc
import grpc.aio

from baton.authentication.cluster import ClusterAuthentication
from baton.config import DecodeConfig, PrefillConfig, WorkerConfig
from baton.rpc.errors import BatonError, abort, failed_precondition, invalid_field, unavailable
from baton.rpc.logs import get_logger
from baton.rpc.node import run_node
from baton.tracing.recorder import Recorder
from baton.transport.grpc import PageSourceServicer
from baton.v1 import (
    cache_pb2,
    cache_pb2_grpc,
    decode_pb2,
    decode_pb2_grpc,
    embed_pb2,
    node_pb2,
    prefill_pb2,
    prefill_pb2_grpc,
)
from baton.worker.core import WorkerCore, is_quiet
from baton.worker.decode.server import DecodeNode
from baton.worker.node import WorkerNode
from baton.worker.prefill.server import PrefillNode

QUIET_SECONDS = 10.0
"""How long a change of role waits, once all requests have ended, for steps and copies in flight."""
POLL_SECONDS = 0.005
CLOSE_MS = 50
"""What callers wait at least before they connect again."""

_log = get_logger()


def make_node(config: WorkerConfig, recorder: Recorder | None = None) -> WorkerNode[Any]:
    """Raises BatonError: see WorkerNode."""
    if isinstance(config, DecodeConfig):
        return DecodeNode(config, recorder)
    assert isinstance(config, PrefillConfig)
    return PrefillNode(config, recorder)


def config_of(engine: WorkerConfig, role: WorkerConfig) -> WorkerConfig:
    """The configuration of an engine that exists, with what `role` says of its role. Only the runner of a
    node that began as a decode node verifies drafts."""
    values = {field.name: getattr(role, field.name) for field in fields(role)}
    values |= {field.name: getattr(engine, field.name) for field in fields(WorkerConfig)}
    if isinstance(role, DecodeConfig) and not engine.most_drafts:
        values["draft"] = "off"
    return type(role)(**values)


class WorkerProcess:
    """The NodeProcess of a worker: `node` with the role that it has now."""

    def __init__(self, node: WorkerNode[Any], other: WorkerConfig | None = None) -> None:
        """`other`: of its other role; None: its defaults."""
        self.node = node
        self.recorder = node.recorder
        default = PrefillConfig() if node.role == "decode" else DecodeConfig()
        self._first = node
        """The node whose configuration is the engine's."""
        self._configs = {node.role: node.config, _other(node.role): other or default}
        self._page_source = PageSourceServicer()
        """Serves the engine's pool, whatever the role."""
        self._changing = asyncio.Lock()
        self._stopping = asyncio.Event()
        self._closed = ""
        """The role that it is to have, while no node takes calls; empty: one does."""

    # --- rpc.node.NodeProcess ---------------------------------------------------------------------------

    @property
    def role(self) -> str:
        return self.node.role

    def add_services(self, server: grpc.aio.Server) -> Sequence[str]:
        decode_pb2_grpc.add_DecodeServicer_to_server(_Decode(self), server)
        prefill_pb2_grpc.add_PrefillServicer_to_server(_Prefill(self), server)
        cache_pb2_grpc.add_CacheServicer_to_server(_Cache(self), server)
        prefill_pb2_grpc.add_PageSourceServicer_to_server(self._page_source, server)
        files = (decode_pb2, prefill_pb2, cache_pb2)
        return [each.full_name for file in files for each in file.DESCRIPTOR.services_by_name.values()]

    async def start(self, address: str) -> None:
        await self.node.start(address)
        self._page_source.pools = self.node.engine.pools

    async def drain(self, seconds: float) -> int:
        """Gives up a change of role that is under way, as far as it can be."""
        self._stopping.set()
        return await self.node.drain(seconds)

    async def stop(self) -> None:
        """A change of role that is under way ends first."""
        self._stopping.set()
        async with self._changing:
            await self.node.stop()

    def info(self) -> node_pb2.NodeInfo:
        return self.node.info()

    def load(self) -> node_pb2.Load:
        return self.node.load()

    async def page_map(self, max_cells: int) -> node_pb2.PageMap | None:
        return await self.node.page_map(max_cells)

    # --- calls ------------------------------------------------------------------------------------------

    async def serving(self, role: str, context: Any) -> WorkerNode[Any]:
        """The node, if it has this role (empty: any) and takes calls; else ends the call."""
        if self._closed or role not in ("", self.role):
            text = f"this node is a {self.role} node"
            if self._closed:
                text = f"this node becomes a {self._closed} node"
            await abort(context, unavailable(text, "OTHER_ROLE", CLOSE_MS))
        return self.node

    # --- roles ------------------------------------------------------------------------------------------

    async def set_role(self, role: str, seconds: float) -> node_pb2.SetRoleResponse:
        """See Node.SetRole. Raises BatonError."""
        if role not in ("prefill", "decode"):
            raise invalid_field("role", f"must be prefill or decode, not {role!r}")
        if self._changing.locked():
            text = "another change of role is under way; ask again when it has ended"
            raise failed_precondition(text, "ROLE_CHANGING")
        await self._changing.acquire()
        # A caller that leaves must not end a change half-way, nor let another one begin meanwhile.
        return await asyncio.shield(asyncio.ensure_future(self._set_role(role, seconds)))

    async def _set_role(self, role: str, seconds: float) -> node_pb2.SetRoleResponse:
        """Releases `_changing`."""
        try:
            if role == self.role:
                return node_pb2.SetRoleResponse(incarnation=self.node.incarnation)
            if self._stopping.is_set() or self.node.core_or_none is None:
                raise failed_precondition("the node drains, or has not started yet", "DRAINING")
            return await self._change(role, seconds)
        finally:
            self._changing.release()

    async def _change(self, role: str, seconds: float) -> node_pb2.SetRoleResponse:
        old = self.node
        _log.info("role changes", to=role, requests=old.requests, seconds=seconds)
        await old.drain(seconds)
        handed_back = await old.hand_back_all()
        began, self._closed = time.monotonic(), role
        try:
            old.close_streams(unavailable(f"this node becomes a {role} node", "OTHER_ROLE", CLOSE_MS))
            if not await self._quiet(old):
                old.draining = self._stopping.is_set()
                text = f"the node stays a {old.role} node: something did not end, such as a copy of pages"
                raise BatonError(grpc.StatusCode.ABORTED, "STILL_BUSY", text)
            self.node = await self._replace(old, role)
        finally:
            self._closed = ""
        pause = time.monotonic() - began
        _log.info("role changed", to=role, handed_back=handed_back, pause_ms=round(1000 * pause))
        return node_pb2.SetRoleResponse(
            incarnation=self.node.incarnation, handed_back=handed_back, pause_ms=round(1000 * pause)
        )

    async def _quiet(self, node: WorkerNode[Any]) -> bool:
        """Waits until nothing is under way in the node's core; False: that takes too long, or the process is
        to stop."""
        drafter, deadline = node.engine.drafter, time.monotonic() + QUIET_SECONDS

        def quiet(core: WorkerCore) -> bool:
            # Copies into the drafter's pool outlive their requests.
            copies = drafter is not None and drafter.cache is not None and drafter.cache.pending
            return is_quiet(core) and not copies

        while time.monotonic() < deadline and not self._stopping.is_set():
            if await node.ask(quiet, deadline - time.monotonic()):
                return True
            await asyncio.sleep(POLL_SECONDS)
        return False

    async def _replace(self, old: WorkerNode[Any], role: str) -> WorkerNode[Any]:
        """A failure ends the process: its state is not known."""
        try:
            if not await old.leave_engine():
                raise RuntimeError("the step thread does not end")
            assert old.core_or_none is not None
            old.engine.check_idle()
            new = make_node(config_of(self._first.config, self._configs[role]), self.recorder)
            new.take_over(old)
            return new
        except Exception as error:
            _log.critical("the role could not be changed; the process ends", exc_info=error)
            old.end_process()


def _other(role: str) -> str:
    return "prefill" if role == "decode" else "decode"


class _Decode(decode_pb2_grpc.DecodeServicer):
    def __init__(self, process: WorkerProcess) -> None:
        self._process = process

    async def Generate(self, request_iterator: Any, context: Any) -> AsyncIterator[decode_pb2.StepEvents]:
        node = await self._process.serving("decode", context)
        async with aclosing(node.streams.serve(request_iterator, context, "Decode.Generate")) as messages:
            async for message in messages:
                yield message

    async def TakeLog(self, request: decode_pb2.TakeLogRequest, context: Any) -> decode_pb2.DecodeLog:
        node: Any = await self._process.serving("decode", context)
        log: decode_pb2.DecodeLog = node.take_log(request)
        return log

    async def Embed(self, request: embed_pb2.EmbedPrompts, context: Any) -> embed_pb2.PromptEmbeddings:
        return await (await self._process.serving("decode", context)).embed(request, context)


class _Prefill(prefill_pb2_grpc.PrefillServicer):
    def __init__(self, process: WorkerProcess) -> None:
        self._process = process

    async def Run(self, request_iterator: Any, context: Any) -> AsyncIterator[prefill_pb2.PrefillResponse]:
        node = await self._process.serving("prefill", context)
        async with aclosing(node.streams.serve(request_iterator, context, "Prefill.Run")) as messages:
            async for message in messages:
                yield message

    async def Embed(self, request: embed_pb2.EmbedPrompts, context: Any) -> embed_pb2.PromptEmbeddings:
        return await (await self._process.serving("prefill", context)).embed(request, context)


class _Cache(cache_pb2_grpc.CacheServicer):
    def __init__(self, process: WorkerProcess) -> None:
        self._process = process

    async def Watch(
        self, request: cache_pb2.WatchRequest, context: Any
    ) -> AsyncIterator[cache_pb2.CacheUpdate]:
        node = await self._process.serving("", context)
        async with aclosing(node.cache_service.Watch(request, context)) as updates:
            async for update in updates:
                yield update

    async def Lend(self, request_iterator: Any, context: Any) -> AsyncIterator[prefill_pb2.PrefillResponse]:
        node = await self._process.serving("", context)
        async with aclosing(node.borrowers.serve(request_iterator, context, "Cache.Lend")) as messages:
            async for message in messages:
                yield message


async def serve(
    config: WorkerConfig,
    other: WorkerConfig | None = None,
    *,
    ready: asyncio.Event | None = None,
    stop: asyncio.Event | None = None,
) -> int:
    """Runs the process until it is stopped. `other`: of its other role; None: its defaults. Returns its exit
    code."""
    node = make_node(config)
    authentication = ClusterAuthentication(node.cluster)
    return await run_node(
        WorkerProcess(node, other), config, authentication=authentication, ready=ready, stop=stop
    )
