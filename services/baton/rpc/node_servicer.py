"""Serves baton.v1.Node: who a process is, its load, drain and role."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import aclosing
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from baton.rpc.errors import failed_precondition
from baton.v1 import node_pb2, node_pb2_grpc, trace_pb2

if TYPE_CHECKING:
    from baton.rpc.node import NodeProcess, ProcessShell


@runtime_checkable
class HasRoles(Protocol):
    """A process whose role can be changed while it serves."""

    async def set_role(self, role: str, seconds: float) -> node_pb2.SetRoleResponse:
        """See Node.SetRole; seconds: its timeout. Raises BatonError."""
        ...


class NodeServicer(node_pb2_grpc.NodeServicer):
    def __init__(self, shell: ProcessShell, node: NodeProcess) -> None:
        self._shell = shell
        self._node = node

    async def Watch(
        self, request: node_pb2.WatchNodeRequest, context: Any
    ) -> AsyncIterator[node_pb2.NodeState]:
        async with aclosing(self._shell.watches.serve(request)) as states:
            async for state in states:
                yield state

    async def GetInfo(self, request: node_pb2.GetInfoRequest, context: Any) -> node_pb2.NodeInfo:
        return self._shell.info()

    async def GetLoad(self, request: node_pb2.GetLoadRequest, context: Any) -> node_pb2.Load:
        return self._shell.load()

    async def Recent(self, request: trace_pb2.RecentRequest, context: Any) -> trace_pb2.RecentEvents:
        return self._shell.recent(request)

    async def Drain(self, request: node_pb2.DrainRequest, context: Any) -> node_pb2.DrainResponse:
        milliseconds = request.timeout_ms if request.HasField("timeout_ms") else 30000
        remaining = await self._shell.drain(milliseconds / 1000)
        return node_pb2.DrainResponse(drained=remaining == 0, remaining=remaining)

    async def SetRole(self, request: node_pb2.SetRoleRequest, context: Any) -> node_pb2.SetRoleResponse:
        if not isinstance(self._node, HasRoles):
            text = f"a {self._node.role} process has no other role: name a prefill or decode node"
            raise failed_precondition(text, "NO_ROLES")
        milliseconds = request.timeout_ms if request.HasField("timeout_ms") else 5000
        return await self._node.set_role(request.role, milliseconds / 1000)
