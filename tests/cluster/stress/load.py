"""Many streams at once."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Sequence
from random import Random

import grpc.aio

from baton.rpc.channel import open_channel
from baton.v1 import inference_pb2, inference_pb2_grpc
from stress.clients import Judge, Outcome, ask, by_grpc, by_http
from stress.tasks import Task

CONNECTIONS = 4
KEPT = 50
"""Descriptions of broken streams at most."""


class Tally:
    """What became of all streams; of bounded size, for runs of any length."""

    def __init__(self) -> None:
        self.exact = self.tokens = self.resumed = self.retries = 0
        self.errors: Counter[str] = Counter()
        self.broken: list[str] = []
        self.broken_count = 0
        self.slowest = self.pause = 0.0
        """Of a stream, and between two of its events, at most."""

    def add(self, outcome: Outcome, what: str) -> None:
        self.exact += outcome.exact
        self.tokens += outcome.tokens
        self.resumed += outcome.resumed
        self.retries += outcome.retries
        self.slowest = max(self.slowest, outcome.seconds)
        self.pause = max(self.pause, outcome.pause)
        if outcome.error:
            self.errors[outcome.error] += 1
        if outcome.broken:
            self.broken_count += 1
            self.broken[KEPT:] = []
            self.broken.append(f"{what}: {outcome.broken}")

    @property
    def ended(self) -> int:
        return self.exact + sum(self.errors.values()) + self.broken_count


class Load:
    """Asks tasks until it is told to stop; then those under way may end. Half of the gRPC requests find their
    prompt in no cache, each eighth goes over HTTP.

    deadline: seconds that each request may take.
    """

    def __init__(
        self,
        address: str,
        http_address: str,
        tasks: Sequence[Task],
        rng: Random,
        *,
        deadline: float = 60.0,
        ended: Callable[[Outcome], None] = lambda outcome: None,
    ) -> None:
        self.tally = Tally()
        self.running = 0
        self._tasks = tasks
        self._rng = rng
        self._deadline = deadline
        self._ended = ended
        self._http = http_address
        self._channels = [open_channel(address) for _ in range(CONNECTIONS)]
        self._number = 0
        self._model = ""

    async def closed_loop(self, width: int, stop: asyncio.Event) -> None:
        """`width` streams at a time, each followed by another."""

        async def follow() -> None:
            while not stop.is_set():
                await self.one()

        async with asyncio.TaskGroup() as group:
            for _ in range(width):
                group.create_task(follow())

    async def open_loop(self, rate: float, most: int, stop: asyncio.Event) -> int:
        """A Poisson process of `rate` requests a second, of which at most `most` are under way. Returns how
        many were left out because of that."""
        left_out = 0
        due = time.monotonic()
        async with asyncio.TaskGroup() as group:
            while not stop.is_set():
                due += self._rng.expovariate(rate)
                await asyncio.sleep(max(0.0, due - time.monotonic()))
                if self.running < most:
                    group.create_task(self.one())
                else:
                    left_out += 1
        return left_out

    async def one(self) -> Outcome:
        self._number += 1
        number, task = self._number, self._rng.choice(self._tasks)
        judge = Judge(task)
        if number % 8 == 0 and self._http:
            how, events = "HTTP", by_http(self._http, judge, self._deadline, await self._served())
        else:
            channel = self._channels[number % len(self._channels)]
            namespace = f"cold {number}" if number % 2 else ""
            how, events = "gRPC", by_grpc(channel, judge, self._deadline, namespace)
        self.running += 1
        try:
            outcome = await ask(judge, events, self._deadline)
        finally:
            self.running -= 1
            await events.aclose()
        self.tally.add(outcome, f"{how} request {number}, prompt of {len(task.prompt)} tokens")
        self._ended(outcome)
        return outcome

    async def _served(self) -> str:
        if not self._model:
            stub = inference_pb2_grpc.InferenceStub(self._channels[0])
            answer = await stub.ListModels(inference_pb2.ListModelsRequest(), timeout=10)
            self._model = answer.models[0].name
        return self._model

    async def close(self) -> None:
        channels: list[grpc.aio.Channel] = self._channels
        await asyncio.gather(*(channel.close() for channel in channels))
