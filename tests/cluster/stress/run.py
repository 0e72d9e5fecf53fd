"""Load and faults together, and what was wrong."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from random import Random
from typing import Any

import grpc

from stress.clients import Outcome
from stress.cluster import REQUEST_SECONDS, Cluster
from stress.faults import Fault, Injector
from stress.load import Load, Tally
from stress.rank_faults import RankInjector
from stress.role_faults import RoleInjector
from stress.tasks import Task

IDLE_SECONDS = 20.0
"""After the last stream, until no process may hold anything. Longer than a lease."""
TIERS = ("demoted_pages", "promotions", "disk_reads", "disk_read_pages", "borrowed_pages")
"""Of Load."""


@dataclass
class Report:
    seed: int
    seconds: float
    tally: Tally
    faults: list[Fault]
    left: str
    """What processes still held, or "": nothing."""
    role_pause_ms: int
    """For which a worker served neither role at most, in a change of roles."""
    tiers: dict[str, int]
    """What the workers that were there at the end have had of lower tiers and of each other."""

    @property
    def problems(self) -> list[str]:
        """Everything that a correct system would not have done; empty: all is well."""
        found = [f"{count} streams failed with {reason}" for reason, count in self.tally.errors.items()]
        found += [
            f"fault {fault.number}, {fault.action} {fault.process}: {fault.wrong}"
            for fault in self.faults
            if fault.wrong
        ]
        found += self.tally.broken
        return found + ([self.left] if self.left else [])

    def summary(self) -> dict[str, Any]:
        """For a JSON file."""
        tally = self.tally
        return {
            "seed": self.seed,
            "seconds": round(self.seconds, 1),
            "streams": tally.ended,
            "exact": tally.exact,
            "errors": dict(tally.errors),
            "broken": tally.broken_count,
            "tokens": tally.tokens,
            "resumed": tally.resumed,
            "handoff_retries": tally.retries,
            "slowest_seconds": round(tally.slowest, 1),
            "longest_pause_seconds": round(tally.pause, 2),
            "faults": dict(Counter(f"{f.action} {f.process.rpartition('-')[0]}" for f in self.faults)),
            "role_pause_ms": self.role_pause_ms,
            "tiers": self.tiers,
            "problems": self.problems,
        }

    def details(self) -> list[dict[str, Any]]:
        return [asdict(fault) for fault in self.faults]


async def run(
    cluster: Cluster,
    tasks: Sequence[Task],
    *,
    seed: int,
    faults: int,
    seconds: float | None = None,
    streams: int = 64,
    gap: tuple[float, float] = (0.1, 1.2),
    injector: Callable[..., Injector | RankInjector | RoleInjector] = Injector,
    happened: Callable[[Fault], None] = lambda fault: None,
    ended: Callable[[Outcome], None] = lambda outcome: None,
) -> Report:
    """Keeps `streams` running until `faults` have been injected and are over, or as many as there are within
    `seconds`; then waits for the last stream, and for every process to hold nothing."""
    rng = Random(seed)
    started = time.monotonic()
    address, http = cluster.gateway.address, cluster.gateway.http
    load = Load(address, http, tasks, Random(rng.random()), deadline=REQUEST_SECONDS, ended=ended)
    faulty = injector(cluster, Random(rng.random()), happened=happened)
    stop = asyncio.Event()
    if seconds is not None:
        asyncio.get_running_loop().call_later(seconds, stop.set)
    try:
        async with asyncio.TaskGroup() as group:
            group.create_task(load.closed_loop(streams, stop))
            await faulty.run(stop, faults, gap)
            stop.set()
    finally:
        await load.close()
    left = ""
    try:
        await asyncio.to_thread(cluster.assert_idle, IDLE_SECONDS)
    except (AssertionError, grpc.RpcError, ValueError) as error:  # a process that does not serve again
        left = f"{type(error).__name__}: {error}"
    loads = [] if left else [process.load() for role in ("prefill", "decode") for process in cluster.of(role)]
    pause = faulty.longest_ms if isinstance(faulty, RoleInjector) else 0
    tiers = {name: sum(getattr(load, name) for load in loads) for name in TIERS}
    return Report(seed, time.monotonic() - started, load.tally, faulty.faults, left, pause, tiers)
