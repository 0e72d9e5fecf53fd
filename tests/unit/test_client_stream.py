"""What a client is told of a call that its server ends while the client writes."""

import asyncio
import gc
import threading
import time
import weakref
from concurrent import futures

import grpc
import pytest

from baton.client import AsyncClient
from baton.rpc import client_stream
from baton.rpc.client_stream import WRITE_FAILED, ClientStream, Ending
from baton.rpc.errors import BatonError
from baton.v1 import inference_pb2, inference_pb2_grpc

REQUEST = inference_pb2.GenerateRequest()


class Server(inference_pb2_grpc.InferenceServicer):
    """Says so many messages, whatever it hears, and ends the call. Its threads need no event loop."""

    def __init__(self, says, code):
        self.says, self.code = says, code
        self.began, self.ended = threading.Event(), threading.Event()

    def Generate(self, requests, context):
        self.began.set()
        context.add_callback(self.ended.set)
        for number in range(self.says):
            yield inference_pb2.GenerateResponse(id=str(number))
        if self.code is not grpc.StatusCode.OK:
            context.abort(self.code, "the reason")


class Serving:
    def __init__(self, says=0, code=grpc.StatusCode.UNAUTHENTICATED, servicer=None):
        self.servicer = servicer or Server(says, code)

    async def __aenter__(self):
        self.server = grpc.server(futures.ThreadPoolExecutor(4))
        inference_pb2_grpc.add_InferenceServicer_to_server(self.servicer, self.server)
        self.address = f"127.0.0.1:{self.server.add_insecure_port('127.0.0.1:0')}"
        self.server.start()
        self.channel = grpc.aio.insecure_channel(self.address)
        return self

    async def __aexit__(self, *_):
        await self.channel.close()
        self.server.stop(0).wait()

    def open(self):
        return inference_pb2_grpc.InferenceStub(self.channel).Generate()

    def let_it_end(self):
        """The call's end is there, and this event loop has not seen it."""
        assert self.servicer.ended.wait(10)
        self.servicer.ended.clear()
        time.sleep(0.01)


async def called(serving):
    """A call that the server has begun to answer."""
    call = serving.open()
    stream = ClientStream(call)
    try:
        await call.wait_for_connection()
    except grpc.aio.AioRpcError:
        assert serving.servicer.says == 0  # the end is all there is
    return stream


async def heard(stream):
    """The messages' ids, and what the call ended with."""
    ids = []
    try:
        while (message := await stream.read()) is not grpc.aio.EOF:
            ids.append(message.id)
    except BatonError as error:
        return ids, (error.code, error.message)
    return ids, None


@pytest.mark.parametrize("writes", [0, 1, 2])
@pytest.mark.parametrize("says", [0, 1, 3])
@pytest.mark.parametrize("code", [grpc.StatusCode.UNAUTHENTICATED, grpc.StatusCode.OK])
async def test_a_write_that_meets_the_end_hides_nothing(code, says, writes):
    ending = None if code is grpc.StatusCode.OK else (code, "the reason")
    async with Serving(says, code) as serving:
        for _ in range(20):
            stream = await called(serving)
            serving.let_it_end()
            for _ in range(writes):
                await stream.write(REQUEST)
            await stream.done_writing()
            assert await heard(stream) == ([str(number) for number in range(says)], ending)
            assert await heard(stream) == ([], ending)


async def test_a_client_that_is_refused_while_it_writes_learns_why():
    async with Serving() as serving, AsyncClient(serving.address) as client:
        for _ in range(20):
            stream = client.stream("hello")
            while not serving.servicer.began.is_set():  # noqa: ASYNC110
                await asyncio.sleep(0)
            serving.servicer.began.clear()
            serving.let_it_end()
            with pytest.raises(BatonError) as refused:
                await stream.completion()
            assert (refused.value.code, refused.value.message) == (
                grpc.StatusCode.UNAUTHENTICATED,
                "the reason",
            )


async def test_a_session_whose_stream_has_ended_says_why_each_time():
    async with Serving() as serving, AsyncClient(serving.address) as client, client.session() as session:
        for _ in range(3):
            with pytest.raises(BatonError) as refused:
                await session.send("hello")
            assert refused.value.code is grpc.StatusCode.UNAUTHENTICATED


class Echo(inference_pb2_grpc.InferenceServicer):
    def Generate(self, requests, context):
        for _ in requests:
            yield inference_pb2.GenerateResponse(id="heard")


class Silent(inference_pb2_grpc.InferenceServicer):
    def __init__(self):
        self.left = threading.Event()

    def Generate(self, requests, context):
        context.add_callback(self.left.set)
        yield from (message for message in requests if message is None)


async def test_a_cancelled_call_is_no_cancelled_task():
    async with Serving(servicer=Echo()) as serving:
        stream = ClientStream(serving.open())
        reading = asyncio.ensure_future(stream.read())
        assert await stream.write(REQUEST)
        assert (await reading).id == "heard"
        reading = asyncio.ensure_future(stream.read())
        await asyncio.sleep(0.01)
        stream.cancel()
        for each in (reading, stream.read()):
            with pytest.raises(BatonError) as ended:
                await each
            assert ended.value.code is grpc.StatusCode.CANCELLED
        assert not await stream.write(REQUEST) and stream.done()


async def test_a_cancelled_task_cancels_the_call():
    async with Serving(servicer=Echo()) as serving:
        stream = ClientStream(serving.open())
        reading = asyncio.ensure_future(stream.read())
        await asyncio.sleep(0.01)
        reading.cancel()
        with pytest.raises(asyncio.CancelledError):
            await reading
        assert stream.done()


async def test_a_stream_that_is_not_read_to_its_end_is_no_garbage():
    async with Serving(says=3, code=grpc.StatusCode.OK) as serving:
        stream = await called(serving)
        assert (await stream.read()).id == "0"
        messages = weakref.ref(stream._messages)
        gc.disable()
        try:
            del stream
            assert messages() is None or messages().ag_frame is None
        finally:
            gc.enable()


async def leave_a_turn(session):
    turn = asyncio.ensure_future(session.send("hello"))
    await asyncio.sleep(0.1)
    turn.cancel()
    with pytest.raises(asyncio.CancelledError):
        await turn


async def test_a_read_that_its_turn_has_left_ends_without_a_word():
    reports = []
    asyncio.get_running_loop().set_exception_handler(lambda loop, report: reports.append(report))
    async with Serving(servicer=Silent()) as serving, AsyncClient(serving.address) as client:
        session = client.session()
        await leave_a_turn(session)
        await session.close()
        del session
    gc.collect()
    assert [report for report in reports if "never retrieved" in report["message"]] == []


BIG = inference_pb2.GenerateRequest(start=inference_pb2.GenerateStart(text="x" * 2_000_000))


class Deaf(inference_pb2_grpc.InferenceServicer):
    """Reads nothing, so that writes wait for flow control."""

    def __init__(self):
        self.left = threading.Event()

    def Generate(self, requests, context):
        context.add_callback(self.left.set)
        yield inference_pb2.GenerateResponse(id="hello")
        self.left.wait(30)


async def blocked(stream):
    """A write that waits."""
    for _ in range(20):
        writing = asyncio.ensure_future(stream.write(BIG))
        done, _ = await asyncio.wait({writing}, timeout=1.0)
        if not done:
            return writing
    raise AssertionError("no write waits")


async def test_a_call_that_is_cancelled_while_a_write_waits_ends_like_any_other():
    async with Serving(servicer=Deaf()) as serving:
        stream = ClientStream(serving.open())
        writing = await blocked(stream)
        assert (await stream.read()).id == "hello"
        reading = asyncio.ensure_future(stream.read())
        await asyncio.sleep(0.01)
        stream.cancel()
        async with asyncio.timeout(30):
            assert not await writing
            for each in (reading, stream.read()):
                with pytest.raises(BatonError) as ended:
                    await each
                assert ended.value.code is grpc.StatusCode.CANCELLED


async def test_a_session_that_is_closed_while_a_turn_is_written_says_so():
    async with Serving(servicer=Deaf()) as serving, AsyncClient(serving.address) as client:
        session = client.session()
        turn = asyncio.ensure_future(session.send("x" * 50_000_000))
        await asyncio.sleep(0.5)
        await session.close()
        with pytest.raises(BatonError) as ended:
            await asyncio.wait_for(turn, 30)
        assert ended.value.code is grpc.StatusCode.CANCELLED


async def test_two_tasks_may_write():
    async with Serving(servicer=Echo()) as serving:
        stream = ClientStream(serving.open())
        assert await asyncio.gather(*(stream.write(BIG) for _ in range(4))) == [True] * 4
        await stream.done_writing()
        with pytest.raises(asyncio.InvalidStateError):
            await stream.write(REQUEST)
        assert await heard(stream) == (["heard"] * 4, None)


@pytest.fixture
async def mute():
    """The address of a server that takes connections and says nothing."""
    writers = []
    server = await asyncio.start_server(lambda reader, writer: writers.append(writer), "127.0.0.1", 0)
    yield f"127.0.0.1:{server.sockets[0].getsockname()[1]}"
    server.close()
    for writer in writers:
        writer.close()


async def test_a_write_that_waits_for_a_connection_ends_with_its_call(mute):
    async with AsyncClient(mute) as client, asyncio.timeout(10):
        session = client.session()
        turn = asyncio.ensure_future(session.send("hello"))
        await asyncio.sleep(0.1)
        await session.close()
        with pytest.raises(BatonError) as ended:
            await turn
        assert ended.value.code is grpc.StatusCode.CANCELLED
        answer = asyncio.ensure_future(client.generate("hello"))
        await asyncio.sleep(0.1)
        await client.close()
        with pytest.raises(BatonError):
            await answer


async def test_a_stream_that_nobody_holds_is_cancelled():
    async with Serving(servicer=Deaf()) as serving:
        stream = ClientStream(serving.open())
        await stream.write(REQUEST)
        assert (await stream.read()).id == "hello"
        gc.disable()
        try:
            del stream
            assert await asyncio.to_thread(serving.servicer.left.wait, 20)
        finally:
            gc.enable()


async def test_a_session_that_nobody_holds_is_cancelled():
    async with Serving(servicer=Silent()) as serving, AsyncClient(serving.address) as client:
        session = client.session()
        await leave_a_turn(session)
        del session
        assert await asyncio.to_thread(serving.servicer.left.wait, 20)


class Slow(inference_pb2_grpc.InferenceServicer):
    """Ends the call a little after the terminal event."""

    active = None

    def Generate(self, requests, context):
        yield inference_pb2.GenerateResponse(id="0", finished=inference_pb2.Finished())
        time.sleep(0.1)
        self.active = context.is_active()


async def test_a_call_that_has_its_answer_ends_by_itself():
    async with Serving(servicer=Slow()) as serving, AsyncClient(serving.address) as client:
        await client.generate("hello")
        async with asyncio.timeout(30):
            while serving.servicer.active is None:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        assert serving.servicer.active


class Refusing(inference_pb2_grpc.InferenceServicer):
    """Everything, by its number."""

    def __init__(self):
        self.heard = []

    def Generate(self, requests, context):
        for number, request in enumerate(requests):
            self.heard.append((request.start.id or request.cancel.id, request.WhichOneof("kind")))
            refusal = inference_pb2.Rejected(message=number)
            refusal.status.code = 3
            yield inference_pb2.GenerateResponse(rejected=refusal)


async def test_a_turn_that_is_over_before_there_is_a_connection_leaves_the_session_whole():
    async with Serving(servicer=Refusing()) as serving:
        host, port = serving.address.split(":")

        async def forward(reader, writer):
            while data := await reader.read(65536):
                writer.write(data)
            writer.close()

        async def late(reader, writer):
            await asyncio.sleep(2.0)
            there = await asyncio.open_connection(host, port)
            await asyncio.gather(forward(reader, there[1]), forward(there[0], writer))

        proxy = await asyncio.start_server(late, "127.0.0.1", 0)
        address = "{}:{}".format(*proxy.sockets[0].getsockname())
        async with AsyncClient(address) as client, client.session() as session, asyncio.timeout(30):
            began = time.monotonic()
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(0.1):
                    await session.send("hello")
            assert time.monotonic() - began < 1.5
            with pytest.raises(BatonError) as refused:
                await session.send("again")
            assert refused.value.code is grpc.StatusCode.INVALID_ARGUMENT
        assert serving.servicer.heard == [("turn-0", "start"), ("turn-0", "cancel"), ("turn-1", "start")]
        proxy.close()


class Cancelling:
    """A call whose writes end as their task is cancelled."""

    def __init__(self, call):
        self.call = call

    def __getattr__(self, name):
        return getattr(self.call, name)

    def __aiter__(self):
        return aiter(self.call)

    async def write(self, message):
        await self.call.write(message)
        self.writer.cancel()


async def test_a_write_that_is_cancelled_has_not_left_or_the_call_is_cancelled():
    async with Serving(servicer=Echo()) as serving:
        call = Cancelling(serving.open())
        stream = ClientStream(call)
        call.writer = asyncio.ensure_future(stream.write(REQUEST))
        with pytest.raises(asyncio.CancelledError):
            await call.writer
        with pytest.raises(BatonError) as ended:
            await stream.read()
        assert ended.value.code is grpc.StatusCode.CANCELLED


class Told:
    """A call with this status."""

    def __init__(self, code, details):
        self.status = code, details

    def done(self):
        return True

    async def code(self):
        return self.status[0]

    async def details(self):
        return self.status[1]

    async def trailing_metadata(self):
        return grpc.aio.Metadata()


@pytest.mark.parametrize("tells", [True, False])
async def test_the_servers_status_may_come_last(tells):
    """From 1.84 on grpc.aio does not tell of it."""
    call, ending = Told(*WRITE_FAILED), Ending()
    ending.keep(call)
    error = asyncio.ensure_future(ending.error(call))
    await asyncio.sleep(0.01)
    now = Told(grpc.StatusCode.NOT_FOUND, "gone")
    if tells:
        ending.keep(now)
    else:
        call.status = now.status
    assert ((await error).code(), (await error).details()) == (grpc.StatusCode.NOT_FOUND, "gone")


async def test_what_there_is_must_do(monkeypatch):
    monkeypatch.setattr(client_stream, "STATUS_SECONDS", 0.05)
    call, never = Told(*WRITE_FAILED), Ending()
    never.keep(call)
    assert (await never.error(call)).code() is grpc.StatusCode.INTERNAL
    call.done = lambda: False
    assert (await Ending().error(call)).code() is grpc.StatusCode.UNKNOWN
