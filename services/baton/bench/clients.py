"""Client processes: started, set off at the same moment, their records merged."""

from __future__ import annotations

import asyncio
import contextlib
import json
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from baton.bench.workload import Workload
from baton.client import AsyncClient
from baton.latency import Record

LEAD_SECONDS = 0.1
"""From the order to start to the start: enough for it to reach all clients."""
LINE_BYTES = 2**26
"""The longest line that a client may print: a record of very many tokens."""

Progress = Callable[[int, int, int], None]
"""Called with requests ended, failed among them, under way."""


class BenchError(Exception):
    """A process of the measurement did not do its work; one line."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """What is asked, and by how many."""

    server: str
    vocabulary: int
    context: int
    clients: int = 1
    """Processes; at most as many as a closed loop's concurrency."""
    warm_up: int = 4
    """Requests ahead of the measured ones, all at once."""
    timeout: float = 120.0
    """Seconds that a request may take."""


@dataclass(frozen=True, slots=True)
class Run:
    records: list[Record]
    """In the order of their sending."""
    busy: float
    """Part of a core that the busiest client used: near 1 it was the limit, and not the server."""


async def make_target(server: str, clients: int, warmup: int, timeout: float) -> Target:
    """Asks the deployment what it serves. Raises BatonError."""
    async with AsyncClient(server) as client:
        model = (await client.models())[0]
    return Target(
        server=server,
        vocabulary=model.vocab_size,
        context=model.context_length,
        clients=clients,
        warm_up=warmup,
        timeout=timeout,
    )


class _Client:
    """One process."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self.process = process
        self.progress = (0, 0, 0)
        self.records: list[Record] = []
        self.busy = 0.0

    @classmethod
    async def start(cls, target: Target, work: Workload, index: int) -> _Client:
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            "baton.bench.client",
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            limit=LINE_BYTES,
        )
        client = cls(process)
        await client.send(
            {
                "server": target.server,
                "workload": work.to_dict(),
                "vocabulary": target.vocabulary,
                "context": target.context,
                "warm_up": target.warm_up,
                "timeout": target.timeout,
                "index": index,
                "clients": target.clients,
            }
        )
        return client

    async def send(self, message: dict[str, Any]) -> None:
        assert self.process.stdin is not None
        with contextlib.suppress(ConnectionError):  # that it has ended, `receive` finds out, with the reason
            self.process.stdin.write(json.dumps(message).encode() + b"\n")
            await self.process.stdin.drain()

    async def receive(self) -> dict[str, Any]:
        """Raises BenchError when it has ended."""
        assert self.process.stdout is not None and self.process.stderr is not None
        line = await self.process.stdout.readline()
        if not line:
            said = (await self.process.stderr.read()).decode(errors="replace").strip().splitlines()
            code = await self.process.wait()
            raise BenchError(f"a client process ended with code {code}: {said[-1] if said else 'no reason'}")
        found: dict[str, Any] = json.loads(line)
        return found

    async def ready(self) -> None:
        """Raises BenchError for a warm-up that failed."""
        failures = (await self.receive())["ready"]
        if failures:
            raise BenchError(f"a request to warm up failed: {failures[0]}")

    async def collect(self, changed: Callable[[], None]) -> None:
        """Reads to the end."""
        while True:
            said = await self.receive()
            if "progress" in said:
                ended, failed, running = said["progress"]
                self.progress = (ended, failed, running)
                changed()
            elif "record" in said:
                self.records.append(Record.from_dict(said["record"]))
            elif "busy" in said:
                self.busy = said["busy"]
                return

    async def stop(self) -> None:
        if self.process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                self.process.kill()
        await self.process.wait()


async def run_clients(target: Target, work: Workload, progress: Progress) -> Run:
    """Asks all of it. Raises BenchError; a request that fails is a record, and no error."""
    clients: list[_Client] = []

    def changed() -> None:
        ended, failed, running = (sum(part) for part in zip(*(c.progress for c in clients), strict=True))
        progress(ended, failed, running)

    try:
        for index in range(target.clients):
            clients.append(await _Client.start(target, work, index))
        await asyncio.gather(*(client.ready() for client in clients))
        start = time.monotonic() + LEAD_SECONDS
        await asyncio.gather(*(client.send({"start": start}) for client in clients))
        await asyncio.gather(*(client.collect(changed) for client in clients))
    finally:
        await asyncio.gather(*(client.stop() for client in clients))
    records = sorted((record for client in clients for record in client.records), key=lambda r: r.sent)
    return Run(records, max(client.busy for client in clients))
