"""A client process of `baton bench`. It sends requests and records their times, and does nothing else that
could limit the measurement. One request is one gRPC call, as of an ordinary client."""

from __future__ import annotations

import asyncio
import gc
import os
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from multiprocessing.connection import Connection
from typing import Any

import grpc.aio
import uvloop

from baton.authentication.client_credentials import ClientCredentials
from baton.bench.workload import Job, Workload
from baton.rpc.channel import open_channel
from baton.rpc.client_stream import ClientStream
from baton.rpc.errors import BatonError, from_status
from baton.slo import RequestTimes
from baton.v1 import inference_pb2, inference_pb2_grpc

LoadCall = ClientStream[inference_pb2.GenerateRequest, inference_pb2.GenerateResponse]

PROGRESS_SECONDS = 0.25
TIMEOUT_MARGIN_SECONDS = 5.0
"""The client gives up this long after the request's own timeout, which the gateway reports."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """The deployment to measure, and the clients."""

    server: str
    vocabulary: int
    context: int
    clients: int = 1
    """Processes; at most as many as a closed loop's concurrency."""
    warm_up: int = 4
    """Requests before the measured ones, all at once."""
    timeout: float = 120.0
    """Seconds that a request may take."""


class LoadClient:
    """Sends jobs over one connection and makes a record of each."""

    def __init__(self, stub: Any, work: Workload, timeout: float, start: float) -> None:
        """start: start of the run, on the monotonic clock."""
        self._stub = stub
        self._workload = work
        self._timeout = timeout
        self.start = start
        self.records: list[RequestTimes] = []
        self.failed = self.running = 0

    def now(self) -> float:
        return time.monotonic() - self.start

    def message(self, job: Job) -> inference_pb2.GenerateRequest:
        start = inference_pb2.GenerateStart(
            id="0", timeout_ms=int(self._timeout * 1000), namespace=self._workload.namespace
        )
        start.tokens.token_ids.extend(job.prompt)
        start.sampling.temperature = self._workload.temperature
        start.sampling.max_tokens = job.output_tokens
        start.sampling.ignore_eos = True
        start.sampling.seed = job.seed
        return inference_pb2.GenerateRequest(start=start)

    async def _until(self, at: float) -> None:
        # A timer may fire up to a millisecond early.
        left = at - self.now()
        while left > 0:
            await asyncio.sleep(left)
            left = at - self.now()

    async def open_loop(self, jobs: Sequence[Job]) -> None:
        """Begins each thread at its time."""
        threads = [list(thread) for _, thread in groupby(jobs, key=lambda job: job.thread)]
        messages = [self.message(thread[0]) for thread in threads]
        async with asyncio.TaskGroup() as group:
            for thread, message in zip(threads, messages, strict=True):
                await self._until(thread[0].at)
                group.create_task(self._run_conversation(thread[0].at, message, thread[1:]))

    async def closed_loop(self, jobs: Sequence[Job], concurrency: int) -> None:
        """Runs `concurrency` threads at a time; 0: all at once."""
        threads = [list(thread) for _, thread in groupby(jobs, key=lambda job: job.thread)]
        left = iter([(thread[0].pause, self.message(thread[0]), thread[1:]) for thread in threads])
        await self._until(0.0)
        async with asyncio.TaskGroup() as group:
            for _ in range(min(concurrency or len(threads), len(threads))):
                group.create_task(self._run_conversations(left))

    async def _run_conversations(
        self, threads: Iterator[tuple[float, inference_pb2.GenerateRequest, list[Job]]]
    ) -> None:
        for pause, message, rest in threads:
            await self._until(self.now() + pause)
            await self._run_conversation(None, message, rest)

    async def _run_conversation(
        self, at: float | None, message: inference_pb2.GenerateRequest, rest: Sequence[Job]
    ) -> None:
        """Runs a thread to its end, or until a turn fails."""
        record, answer = await self._request(at, message)
        history = list(message.start.tokens.token_ids) if rest else []
        for job in rest:
            if record.error:
                return
            history += [*answer, *job.prompt]
            due = record.end + job.pause
            message = self.message(replace(job, prompt=history))
            await self._until(due)
            record, answer = await self._request(due, message)

    async def _request(
        self, at: float | None, message: inference_pb2.GenerateRequest
    ) -> tuple[RequestTimes, list[int]]:
        """Sends a request; returns its record and the tokens of the answer."""
        sent, answer = self.now(), list[int]()
        record = RequestTimes(sent if at is None else at, sent)
        self.running += 1
        try:
            call = LoadCall(self._stub.Generate(timeout=self._timeout + TIMEOUT_MARGIN_SECONDS))
            await call.write(message)
            await call.done_writing()
            while not record.end:
                event = await call.read()
                self._record_event(record, event)
                if event is not grpc.aio.EOF:
                    answer += event.delta.token_ids
            call.let_end()
        except BatonError as failure:
            record.error, record.message = failure.reason, failure.message
        record.end = self.now()
        self.running -= 1
        self.failed += bool(record.error)
        self.records.append(record)
        return record, answer

    def _record_event(self, record: RequestTimes, event: Any) -> None:
        if event is grpc.aio.EOF:
            record.error, record.message = "STREAM_ENDED", "the stream ended before the terminal event"
            record.end = self.now()
            return
        kind = event.WhichOneof("kind")
        if kind == "delta":
            if count := len(event.delta.token_ids):
                record.arrivals.append((self.now(), count))
        elif kind == "finished":
            record.end = self.now()
            usage, stats = event.finished.usage, event.finished.stats
            record.prompt_tokens, record.cached_tokens = usage.prompt_tokens, usage.cached_tokens
            record.output_tokens = usage.output_tokens
            record.pulled_pages, record.transport = stats.pulled_pages, stats.transport
            record.retractions = stats.retractions
        elif kind in ("failed", "rejected"):
            record.end = self.now()
            failure = from_status(event.failed if kind == "failed" else event.rejected.status)
            record.error, record.message = failure.reason, failure.message


def main(connection: Connection, target: Target, work: Workload, index: int) -> None:
    """Client number `index` of target.clients.

    Sends the messages of requests to warm up that failed; receives the start (CLOCK_MONOTONIC, which all
    processes of a machine share); sends (ended, failed, running) now and then, at last the records and the
    part of a core that it used.
    """
    uvloop.run(_run(connection, target, work, index))


async def _run(connection: Connection, target: Target, work: Workload, index: int) -> None:
    made = work.jobs(target.vocabulary, target.context)
    jobs = [job for job in made if job.thread % target.clients == index]
    concurrency = len(range(index, work.concurrency, target.clients))  # its share; 0: all at once
    access = ClientCredentials.of(None, None)
    async with open_channel(
        target.server, credentials=access.credentials, metadata=access.metadata
    ) as channel:
        stub = inference_pb2_grpc.InferenceStub(channel)
        warm = LoadClient(stub, work, target.timeout, time.monotonic())
        ahead = work.warm_up(target.warm_up, target.vocabulary, target.context)
        await warm.closed_loop(ahead[index :: target.clients], 0)
        gc.collect()
        gc.disable()  # a collection would delay what arrives meanwhile; a run is short
        connection.send([record.message for record in warm.records if record.error])
        client = LoadClient(stub, work, target.timeout, await asyncio.to_thread(connection.recv))
        busy, began = time.process_time(), time.monotonic()
        reporting = asyncio.create_task(_report(connection, client))
        if work.rate is not None:
            await client.open_loop(jobs)
        else:
            await client.closed_loop(jobs, concurrency)
        reporting.cancel()
        connection.send((client.records, (time.process_time() - busy) / (time.monotonic() - began)))


async def _report(connection: Connection, client: LoadClient) -> None:
    while True:
        await asyncio.sleep(PROGRESS_SECONDS)
        try:
            connection.send((len(client.records), client.failed, client.running))
        except OSError:
            os._exit(1)  # the parent is gone
