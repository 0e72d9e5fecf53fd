"""The streams of a worker's callers: what counts as told before a process ends, and how a stream ends."""

from __future__ import annotations

import asyncio

import grpc
import pytest

from baton.rpc.errors import invalid
from baton.rpc.outbox import Outbox
from baton.rpc.tasks import Tasks
from baton.v1 import prefill_pb2
from baton.worker.caller_stream import CallerStream, CallerStreams


class Service:
    def __init__(self):
        self.stream = CallerStream(1, Outbox(None))

    def open(self, hello):
        return self.stream

    def welcome(self):
        return ["welcome"]

    def drop(self, stream):
        self.dropped = stream


async def hello():
    yield prefill_pb2.PrefillRequest(hello=prefill_pb2.PrefillHello(incarnation=7))
    await asyncio.sleep(60)


async def test_a_message_is_unsent_until_grpc_has_written_it():
    service, tasks = Service(), Tasks()
    streams = CallerStreams(service, tasks)
    answers = streams.serve(hello(), None, "Run")
    assert await anext(answers) == "welcome" and not streams.unsent
    service.stream.put("first")
    assert streams.unsent
    assert await anext(answers) == "first"
    assert streams.unsent, "gRPC has taken it and may not have written it"
    waits = asyncio.ensure_future(anext(answers))
    await asyncio.sleep(0)
    assert not streams.unsent, "gRPC asks for the next message when it has written one"
    waits.cancel()
    await asyncio.wait([waits])
    await answers.aclose()
    assert service.dropped is service.stream and not streams.open


class NothingTaken:
    """The context of a call whose client takes nothing any more, not even the status."""

    async def abort(self, *_):
        self.aborted = True
        await asyncio.sleep(60)


async def test_a_stream_is_dropped_though_its_status_is_never_taken():
    service, tasks, context = Service(), Tasks(), NothingTaken()
    streams = CallerStreams(service, tasks)
    answers = streams.serve(hello(), context, "Run")
    assert await anext(answers) == "welcome"
    service.stream.close(invalid("start", "wrong"))
    waits = asyncio.ensure_future(anext(answers))
    await asyncio.sleep(0)
    assert context.aborted and not waits.done()
    assert service.dropped is service.stream and not streams.open
    waits.cancel()
    await asyncio.wait([waits])


class Ended:
    async def abort(self, code, *_):
        self.code = code
        raise grpc.aio.AbortError


async def test_a_stream_ends_when_a_command_fails_unforeseen():
    async def cancel():
        yield await anext(hello())
        yield prefill_pb2.PrefillRequest(cancel=prefill_pb2.PrefillCancel())
        await asyncio.sleep(60)

    service, context = Service(), Ended()
    answers = CallerStreams(service, Tasks()).serve(cancel(), context, "Run")  # the service has no `obey`
    assert await anext(answers) == "welcome"
    async with asyncio.timeout(5):
        with pytest.raises(grpc.aio.AbortError):
            await anext(answers)
    assert context.code is grpc.StatusCode.INTERNAL and service.dropped is service.stream
