"""Client processes: started together, their records merged."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass

from baton.bench import load_client
from baton.bench.load_client import Target
from baton.bench.processes import BenchError, BenchProcess
from baton.bench.workload import Workload
from baton.client import AsyncClient
from baton.slo import RequestTimes

LEAD_SECONDS = 0.1
"""From sending the start time to the start itself; the message takes less to reach all clients."""

LoadProgress = Callable[[int, int, int], None]
"""Called with requests ended, failed among them, running."""


@dataclass(frozen=True, slots=True)
class LoadRun:
    records: list[RequestTimes]
    """In the order of their sending."""
    busy: float
    """Part of a core that the busiest client used; near 1 it limited the result, and not the server."""


async def make_target(server: str, clients: int, warmup: int, timeout: float) -> Target:
    """Asks the deployment for its model. Raises BatonError."""
    async with AsyncClient(server) as found:
        model = (await found.models())[0]
    return Target(
        server=server,
        vocabulary=model.vocab_size,
        context=model.context_length,
        clients=clients,
        warm_up=warmup,
        timeout=timeout,
    )


async def run_clients(target: Target, work: Workload, progress: LoadProgress) -> LoadRun:
    """Sends all requests of the workload. A request that fails is a record. Raises BenchError."""
    clients: list[BenchProcess] = []
    counts = [(0, 0, 0)] * target.clients
    records: list[RequestTimes] = []
    busy: list[float] = []

    async def collect(index: int) -> None:
        while True:
            match await clients[index].receive():
                case (int() as ended, int() as failed, int() as running):
                    counts[index] = (ended, failed, running)
                    progress(*map(sum, zip(*counts, strict=True)))
                case found, used:
                    records.extend(found)
                    busy.append(used)
                    return

    try:
        clients += [BenchProcess(load_client.main, target, work, index) for index in range(target.clients)]
        for failures in await asyncio.gather(*(each.receive() for each in clients)):
            if failures:
                raise BenchError(f"a warm-up request failed: {failures[0]}")
        start = time.monotonic() + LEAD_SECONDS
        for each in clients:
            each.send(start)
        await asyncio.gather(*map(collect, range(target.clients)))
    finally:
        await asyncio.gather(*(each.stop() for each in clients))
    return LoadRun(sorted(records, key=lambda record: record.sent), max(busy))
