"""Changes roles of workers while streams run, and kills some of them in the middle of it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from random import Random

import grpc
from process import Process

from baton.rpc.errors import from_rpc_error
from baton.v1 import node_pb2
from stress.cluster import Cluster
from stress.faults import Fault

OTHER = {"prefill": "decode", "decode": "prefill"}
SECONDS = (0.0, 0.05, 0.3, 2.0)
"""How long what runs may go on."""
KILL_SECONDS = 0.4
"""A kill comes within this time of the call."""
CHANGE_SECONDS = 60.0


class RoleInjector:
    """As Injector: one change after the other; of each role one node at least is always left. `kills`: share
    of the changes in whose middle the node gets SIGKILL; its process begins in its first role again."""

    def __init__(
        self,
        cluster: Cluster,
        rng: Random,
        *,
        kills: float = 0.0,
        happened: Callable[[Fault], None] = lambda fault: None,
    ) -> None:
        self.faults: list[Fault] = []
        self.roles = {worker: role for role in OTHER for worker in cluster.of(role)}
        self.handed_back = 0
        self.longest_ms = 0
        """For which a node served neither role."""
        self._cluster = cluster
        self._rng = rng
        self._kills = kills
        self._happened = happened

    async def run(self, stop: asyncio.Event, count: int, gap: tuple[float, float]) -> None:
        started = time.monotonic()
        while len(self.faults) < count and not stop.is_set():
            await asyncio.sleep(self._rng.uniform(*gap))
            held = list(self.roles.values())
            victim = self._rng.choice([each for each, role in self.roles.items() if held.count(role) > 1])
            role, began = OTHER[self.roles[victim]], time.monotonic()
            kill = self._rng.random() < self._kills
            fault = Fault(len(self.faults) + 1, f"kill to {role}" if kill else f"to {role}", victim.name, 0.0)
            fault.at = began - started
            self.faults.append(fault)
            self._happened(fault)
            try:
                await (self._kill if kill else self._change)(victim, role)
            except Exception as error:
                fault.wrong = f"{type(error).__name__}: {error}"
            fault.seconds = time.monotonic() - began

    async def _change(self, victim: Process, role: str) -> None:
        answer = await asyncio.to_thread(set_role, victim, role, self._rng.choice(SECONDS))
        self.roles[victim] = role
        self.handed_back += answer.handed_back
        self.longest_ms = max(self.longest_ms, answer.pause_ms)
        victim.incarnation = answer.incarnation
        self._cluster.note_incarnations()

    async def _kill(self, victim: Process, role: str) -> None:
        changing = asyncio.create_task(asyncio.to_thread(set_role, victim, role, self._rng.choice(SECONDS)))
        await asyncio.sleep(self._rng.uniform(0, KILL_SECONDS))
        await asyncio.to_thread(victim.kill)
        await asyncio.wait([changing])
        changing.exception()
        victim.start()
        await asyncio.to_thread(victim.wait_ready)
        self.roles[victim] = victim.role
        self._cluster.note_incarnations()


def set_role(worker: Process, role: str, seconds: float) -> node_pb2.SetRoleResponse:
    """Raises BatonError."""
    request = node_pb2.SetRoleRequest(role=role, timeout_ms=round(1000 * seconds))
    try:
        return worker._stub().SetRole(request, timeout=CHANGE_SECONDS, metadata=worker.metadata)
    except grpc.RpcError as error:
        raise from_rpc_error(error) from error
