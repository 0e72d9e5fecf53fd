"""A client process: `python -m baton.bench.client`, started by `clients.run_clients`.

Its stdin brings one JSON line with its orders, and later one with the moment to start (CLOCK_MONOTONIC, which
all processes of a machine share). Its stdout carries JSON lines: `ready` once connected and warmed up,
`progress` now and then, at the end one `record` a request and `busy`, the part of a core that it used.
Nothing but asking and noting times happens in it, so that it does not limit what it measures; one request is
one gRPC call, as of an ordinary client.
"""

from __future__ import annotations

import asyncio
import gc
import json
import os
import sys
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from itertools import groupby
from typing import Any

import grpc.aio
import uvloop

from baton.bench.workload import Job, Workload
from baton.client.access import Access
from baton.latency import Record
from baton.rpc.channel import open_channel
from baton.rpc.client_stream import ClientStream
from baton.rpc.errors import BatonError, from_status
from baton.v1 import inference_pb2, inference_pb2_grpc

Call = ClientStream[inference_pb2.GenerateRequest, inference_pb2.GenerateResponse]

PROGRESS_SECONDS = 0.25
TIMEOUT_MARGIN_SECONDS = 5.0
"""Time for the gateway to report a timeout; then the client itself gives up."""


class LoadClient:
    """Sends jobs over one connection; one record each."""

    def __init__(self, stub: Any, work: Workload, timeout: float, start: float) -> None:
        """start: of the run, on the monotonic clock."""
        self._stub = stub
        self._workload = work
        self._timeout = timeout
        self.start = start
        self.records: list[Record] = []
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
        # A timer may go off up to a millisecond early: its clock is that coarse.
        left = at - self.now()
        while left > 0:
            await asyncio.sleep(left)
            left = at - self.now()

    async def open_loop(self, jobs: Sequence[Job]) -> None:
        """Begins each thread at its time, whatever became of the others."""
        threads = [list(thread) for _, thread in groupby(jobs, key=lambda job: job.thread)]
        messages = [self.message(thread[0]) for thread in threads]
        async with asyncio.TaskGroup() as group:
            for thread, message in zip(threads, messages, strict=True):
                await self._until(thread[0].at)
                group.create_task(self._run_conversation(thread[0].at, message, thread[1:]))

    async def closed_loop(self, jobs: Sequence[Job], concurrency: int) -> None:
        """Begins a thread when another has ended; 0: all at once."""
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
        """A thread, until it ends or a turn of it fails."""
        record, answer = await self._request(at, message)
        said = list(message.start.tokens.token_ids) if rest else []
        for job in rest:
            if record.error:
                return
            said += [*answer, *job.prompt]
            due = record.end + job.pause
            message = self.message(replace(job, prompt=said))
            await self._until(due)
            record, answer = await self._request(due, message)

    async def _request(
        self, at: float | None, message: inference_pb2.GenerateRequest
    ) -> tuple[Record, list[int]]:
        """What became of it, and the tokens of its answer."""
        sent, answer = self.now(), list[int]()
        record = Record(sent if at is None else at, sent)
        self.running += 1
        try:
            call = Call(self._stub.Generate(timeout=self._timeout + TIMEOUT_MARGIN_SECONDS))
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

    def _record_event(self, record: Record, event: Any) -> None:
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


def send(**values: Any) -> None:
    sys.stdout.write(json.dumps(values) + "\n")
    sys.stdout.flush()


async def receive() -> dict[str, Any]:
    """The next line of stdin. Raises EOFError when the parent is gone."""
    line = await asyncio.to_thread(sys.stdin.readline)
    if not line:
        raise EOFError
    found: dict[str, Any] = json.loads(line)
    return found


@asynccontextmanager
async def reporting(client: LoadClient) -> AsyncIterator[None]:
    """Reports progress while the block runs; a parent that is gone ends this process."""

    async def tell() -> None:
        while True:
            await asyncio.sleep(PROGRESS_SECONDS)
            try:
                send(progress=[len(client.records), client.failed, client.running])
            except OSError:
                os._exit(1)  # rather than go on asking for nobody

    task = asyncio.create_task(tell())
    try:
        yield
    finally:
        task.cancel()


async def main() -> None:
    orders = await receive()
    work = Workload.from_dict(orders["workload"])
    index, clients = orders["index"], orders["clients"]
    made = work.jobs(orders["vocabulary"], orders["context"])
    jobs = [job for job in made if job.thread % clients == index]
    concurrency = len(range(index, work.concurrency, clients))  # its share; not 0 unless the whole is
    access = Access.of(None, None)
    async with open_channel(
        orders["server"], credentials=access.credentials, metadata=access.metadata
    ) as channel:
        stub = inference_pb2_grpc.InferenceStub(channel)
        warm = LoadClient(stub, work, orders["timeout"], time.monotonic())
        ahead = work.warm_up(orders["warm_up"], orders["vocabulary"], orders["context"])
        await warm.closed_loop(ahead[index::clients], 0)
        gc.collect()
        gc.disable()  # a collection would delay whatever arrives meanwhile; a run is short
        send(ready=[record.message for record in warm.records if record.error])
        client = LoadClient(stub, work, orders["timeout"], (await receive())["start"])
        busy, began = time.process_time(), time.monotonic()
        async with reporting(client):
            if work.rate is not None:
                await client.open_loop(jobs)
            else:
                await client.closed_loop(jobs, concurrency)
        busy = (time.process_time() - busy) / (time.monotonic() - began)
        for record in client.records:
            send(record=record.to_dict())
        send(busy=busy)


if __name__ == "__main__":
    try:
        uvloop.run(main())
    except (EOFError, BrokenPipeError, KeyboardInterrupt):
        sys.stderr.close()
        sys.exit(1)
