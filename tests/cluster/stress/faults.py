"""Hits processes at random moments: SIGKILL, SIGTERM, and SIGSTOP for longer than a lease."""

from __future__ import annotations

import asyncio
import signal
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from random import Random

from process import Process

from stress.cluster import GRACE_SECONDS, Cluster

WEIGHTS = {"stall": 7, "kill": 2, "drain": 1}
STALL_SECONDS = (1.3 * GRACE_SECONDS, 2.5 * GRACE_SECONDS)
PAUSE_SECONDS = 0.5
"""At most, before a process that has ended is started again."""
POLL_SECONDS = 0.05


@dataclass
class Fault:
    number: int
    action: str
    """"kill": SIGKILL, then started again; "drain": SIGTERM, waited for, then started again; "stall":
    SIGSTOP, then SIGCONT."""
    process: str
    at: float
    """Seconds since the injector began."""
    seconds: float = 0.0
    """Until the process served again."""
    wrong: str = ""
    """What went wrong with the process itself."""


class Injector:
    """One fault after the other; several are under way at a time. Of each kind one process at least is always
    up, if perhaps stalled.

    may: whether an action may hit a process; default: every process but the gateway.
    weights: how often each action is chosen.
    """

    def __init__(
        self,
        cluster: Cluster,
        rng: Random,
        *,
        may: Callable[[str, Process], bool] = lambda action, process: True,
        weights: Mapping[str, int] = WEIGHTS,
        happened: Callable[[Fault], None] = lambda fault: None,
    ) -> None:
        self.faults: list[Fault] = []
        self._cluster = cluster
        self._rng = rng
        self._may = may
        self._weights = weights
        self._happened = happened
        self._hit: set[Process] = set()
        self._down: set[Process] = set()
        self._started = 0.0

    async def run(self, stop: asyncio.Event, count: int, gap: tuple[float, float]) -> None:
        """Injects `count` faults, or as many as there are until `stop`, with pauses of `gap` (least, most)
        seconds between their beginnings. Returns when all are over."""
        self._started = time.monotonic()
        async with asyncio.TaskGroup() as group:
            for number in range(1, count + 1):
                await asyncio.sleep(self._rng.uniform(*gap))
                action = self._rng.choices(list(self._weights), list(self._weights.values()))[0]
                victim = await self._victim(action, stop)
                if victim is None:
                    return
                self._hit.add(victim)
                if action != "stall":
                    self._down.add(victim)
                fault = Fault(number, action, victim.name, time.monotonic() - self._started)
                self.faults.append(fault)
                self._happened(fault)
                group.create_task(self._inject(fault, victim))

    async def _victim(self, action: str, stop: asyncio.Event) -> Process | None:
        while not stop.is_set():
            if candidates := [process for process in self._cluster.processes if self._can(action, process)]:
                return self._rng.choice(candidates)
            await asyncio.sleep(POLL_SECONDS)
        return None

    def _can(self, action: str, process: Process) -> bool:
        if process.role == "gateway" or process in self._hit or not self._may(action, process):
            return False
        siblings = self._cluster.siblings(process)
        return action == "stall" or (bool(siblings) and not self._down.intersection(siblings))

    async def _inject(self, fault: Fault, victim: Process) -> None:
        started = time.monotonic()
        try:
            if fault.action == "stall":
                await self._stall(victim)
            else:
                await self._restart(victim, fault)
        except AssertionError as error:
            fault.wrong = str(error)
        finally:
            fault.seconds = time.monotonic() - started
            self._hit.discard(victim)
            self._down.discard(victim)

    async def _stall(self, victim: Process) -> None:
        victim.signal(signal.SIGSTOP)
        try:
            await asyncio.sleep(self._rng.uniform(*STALL_SECONDS))
        finally:
            victim.signal(signal.SIGCONT)

    async def _restart(self, victim: Process, fault: Fault) -> None:
        if fault.action == "kill":
            await asyncio.to_thread(victim.kill)
        elif code := await asyncio.to_thread(victim.stop):
            fault.wrong = f"exit code {code} after SIGTERM: {victim.tail()}"
        await asyncio.sleep(self._rng.uniform(0, PAUSE_SECONDS))
        victim.start()
        await asyncio.to_thread(victim.wait_ready)
        self._cluster.note_incarnations()
        await self._cluster.in_touch(victim)
