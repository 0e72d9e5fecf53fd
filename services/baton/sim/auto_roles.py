"""What a simulated gateway with --auto-roles sees of its workers, and how it changes their roles."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from baton.gateway.cache_view import FRESH_SECONDS
from baton.gateway.role_balance import OTHER, RoleBounds
from baton.rpc.errors import failed_precondition, unavailable
from baton.sim.tasks import sleep
from baton.sim.worker import Worker
from baton.sim.world import Violation
from baton.v1 import cache_pb2, node_pb2
from baton.worker.load import add_step_cost, snapshot

if TYPE_CHECKING:
    from baton.sim.gateway import SimGateway

LOOK_SECONDS = 0.1
"""Between two decisions, and two reports of a node."""
WAIT_SECONDS = 6.0
"""A change takes no longer than this beyond the time that requests have."""


class SimAutoRoles:
    """Checks that a gateway leaves as many nodes of each role as it should, by what it has been told."""

    def __init__(self, gateway: SimGateway, bounds: RoleBounds) -> None:
        self.change_role: Callable[[Worker[Any], float], bool] = lambda worker, seconds: False
        """Begins a change; False: the worker keeps its role."""
        self._gateway = gateway
        self._bounds = bounds
        self._told: dict[str, tuple[str, float]] = {}
        """The role that a node has told, and when."""

    async def follow(self, address: str) -> None:
        """Reports of a node that can be reached, for ever. They hold no page of its prefix tree."""
        gateway = self._gateway
        while True:
            await sleep(gateway.world, gateway.loop, LOOK_SECONDS)
            host = gateway.network.host(address)
            if not isinstance(host, Worker) or gateway.network.is_cut(gateway.name, address):
                continue
            self._told[address] = host.role, gateway.world.now
            update = cache_pb2.CacheUpdate(
                incarnation=host.incarnation,
                role=host.role,
                snapshot=True,
                page_size=host.config.page_size,
                load=_load(host),
            )
            gateway.router.update(address, update)
            gateway.nodes.told_role(address, host.role)

    async def set_role(self, address: str, role: str, seconds: float) -> node_pb2.SetRoleResponse:
        """Raises BatonError."""
        gateway = self._gateway
        self._check(address, OTHER[role])
        await sleep(gateway.world, gateway.loop, gateway.network.latency(gateway.name, address))
        host = gateway.network.host(address)
        if not isinstance(host, Worker) or gateway.network.is_cut(gateway.name, address):
            raise unavailable(f"{address} does not answer")
        if host.role != role and not self.change_role(host, seconds):
            raise failed_precondition(f"{address} keeps its role", "ROLE_CHANGING")
        until = gateway.world.now + seconds + WAIT_SECONDS
        while gateway.world.now < until:
            await sleep(gateway.world, gateway.loop, LOOK_SECONDS)
            host = gateway.network.host(address)
            if isinstance(host, Worker) and host.role == role:
                return node_pb2.SetRoleResponse(incarnation=host.incarnation)
        raise unavailable(f"{address} has not changed its role")

    def _check(self, address: str, role: str) -> None:
        """Raises Violation if too few nodes of the role would be left."""
        now = self._gateway.world.now
        told = [a for a, (had, at) in self._told.items() if had == role and now - at <= FRESH_SECONDS]
        left = [each for each in told if each != address]
        if len(left) < self._bounds.least(role):
            who = self._gateway.who
            raise Violation(f"roles: {who} changes {address}, and {len(left)} {role} nodes are left")


def _load(worker: Worker[Any]) -> node_pb2.Load:
    load = snapshot(worker.scheduler, worker.requests)
    add_step_cost(load, worker.core.step_stats)
    load.draining = worker.draining
    if worker.role == "decode":
        load.wait_ms = int(1000 * worker.core.overload.wait)
    return load
