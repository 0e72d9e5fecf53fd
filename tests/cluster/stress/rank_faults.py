"""Kills one rank of a worker, at a moment of its work: rank 0 or a follower."""

from __future__ import annotations

import asyncio
import fcntl
import signal
import time
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

import grpc
import psutil
from process import SHM, Process

from baton.v1 import node_pb2
from stress.cluster import Cluster
from stress.faults import PAUSE_SECONDS, Fault

MOMENTS: dict[str, dict[str, Callable[[node_pb2.Load], bool]]] = {
    "prefill": {
        "idle": lambda load: not load.requests,
        "prefill": lambda load: load.prefilling > 0,
        "pull": lambda load: load.leases > 0,
    },
    "decode": {
        "idle": lambda load: not load.requests,
        "decode": lambda load: load.running > 0,
        "pull": lambda load: load.pulls + load.handing_off > 0,
    },
}
"""By role: what a worker's load says at that moment."""
LOADING = 0.25
"""Share of the starts that are killed before they are ready."""
LOADING_SECONDS = 8.0
"""Such kills come within half of this after the start of a worker, or of its followers, which is awaited as
long."""
WAIT_SECONDS = 5.0
"""For a moment to come; then another one is as good."""
POLL_SECONDS = 0.01
END_SECONDS = 25.0
"""Within which all ranks of a worker have ended after one of them."""
LEFT_SECONDS = 3.0
"""For files in shared memory to be removed after that."""
EXIT_LOST = 70


class RankInjector:
    """As Injector: one kill after the other, among prefill and decode nodes at the same time. The other node
    of the kind is always up."""

    def __init__(
        self, cluster: Cluster, rng: Random, *, happened: Callable[[Fault], None] = lambda fault: None
    ) -> None:
        self.faults: list[Fault] = []
        self._cluster = cluster
        self._rng = rng
        self._happened = happened
        self._started = 0.0
        self._count = 0

    async def run(self, stop: asyncio.Event, count: int, gap: tuple[float, float]) -> None:
        self._started, self._count = time.monotonic(), count
        async with asyncio.TaskGroup() as group:
            for role in MOMENTS:
                group.create_task(self._hit(role, stop, gap))

    async def _hit(self, role: str, stop: asyncio.Event, gap: tuple[float, float]) -> None:
        while len(self.faults) < self._count and not stop.is_set():
            await asyncio.sleep(self._rng.uniform(*gap))
            moment = self._rng.choice(list(MOMENTS[role]))
            victim, moment = await self._await(role, moment)
            await self._kill(victim, moment)
            while self._rng.random() < LOADING and len(self.faults) < self._count:
                await self._kill_loading(victim)
            await asyncio.sleep(self._rng.uniform(0, PAUSE_SECONDS))
            victim.start()
            await asyncio.to_thread(victim.wait_ready)
            self._cluster.note_incarnations()
            await self._cluster.in_touch(victim)

    async def _kill_loading(self, victim: Process) -> None:
        victim.start()
        if self._rng.random() < 0.5:  # when the followers are there, too
            await until_gone(lambda: [] if followers_of(victim) else [victim], LOADING_SECONDS)
        await asyncio.sleep(self._rng.uniform(0, LOADING_SECONDS / 2))
        await self._kill(victim, "loading")

    async def _await(self, role: str, moment: str) -> tuple[Process, str]:
        workers = self._cluster.of(role)
        deadline = time.monotonic() + WAIT_SECONDS
        while time.monotonic() < deadline:
            victim = self._rng.choice(workers)
            if MOMENTS[role][moment](await asyncio.to_thread(load_of, victim)):
                return victim, moment
            await asyncio.sleep(POLL_SECONDS)
        return self._rng.choice(workers), "any moment"

    async def _kill(self, victim: Process, moment: str) -> None:
        ranks, files = ranks_of(victim)
        number = self._rng.randrange(len(ranks))
        who = "a follower" if number else "rank 0"
        at = time.monotonic() - self._started
        fault = Fault(len(self.faults) + 1, f"kill {who}, {moment}", victim.name, at)
        self.faults.append(fault)
        self._happened(fault)
        if number:
            ranks[number].send_signal(signal.SIGKILL)
        else:
            victim.signal(signal.SIGKILL)
        began = time.monotonic()
        left = await until_gone(lambda: [each for each in ranks if runs(each)], END_SECONDS)
        fault.seconds = time.monotonic() - began
        for each in left:
            each.kill()
            fault.wrong += f"process {each.pid} has not ended; "
        code = await asyncio.to_thread(victim.wait)
        if number and moment != "loading" and code != EXIT_LOST:
            fault.wrong += f"exit code {code}: {victim.tail()}; "
        for path in await until_gone(lambda: [each for each in files if orphaned(each)], LEFT_SECONDS):
            fault.wrong += f"{path} is left; "


def load_of(process: Process) -> node_pb2.Load:
    try:
        return process.load()
    except grpc.RpcError:
        return node_pb2.Load(requests=-1)


def ranks_of(worker: Process) -> tuple[list[psutil.Process], list[Path]]:
    """Its processes, rank 0 first, and the files in shared memory that it has open, peers' among them."""
    first = psutil.Process(worker.pid)
    try:
        files = [Path(file.path) for file in first.open_files() if file.path.startswith(f"{SHM}/baton-")]
        return [first, *followers_of(worker)], files
    except psutil.NoSuchProcess:
        return [first], []


def followers_of(worker: Process) -> list[psutil.Process]:
    try:
        return psutil.Process(worker.pid).children()
    except psutil.NoSuchProcess:
        return []


def runs(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def orphaned(path: Path) -> bool:
    """Whether a pool is left that no process owns: its owner locks it."""
    try:
        with path.open("rb") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except (FileNotFoundError, BlockingIOError):
        return False
    return path.exists()


async def until_gone(left: Callable[[], list[Any]], seconds: float) -> list[Any]:
    """What is left after that time at most."""
    deadline = time.monotonic() + seconds
    while (found := left()) and time.monotonic() < deadline:  # noqa: ASYNC110  # the kernel tells nobody
        await asyncio.sleep(POLL_SECONDS)
    return found
