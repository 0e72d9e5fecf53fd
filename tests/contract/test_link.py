"""The link against real servers that come, go, hang and misbehave."""

import asyncio

import grpc
import pytest

from baton.rpc import link
from baton.rpc.channel import server_options
from baton.rpc.errors import abort, failed_precondition, invalid, unavailable
from baton.rpc.link import Link
from baton.v1 import tokenizer_pb2, tokenizer_pb2_grpc
from ports import free_port

Request, Response = tokenizer_pb2.DetokenizeRequest, tokenizer_pb2.DetokenizeResponse


def request(*ids):
    return Request(items=[tokenizer_pb2.DetokenizeItem(id=i) for i in ids])


def join(requests):
    for later in requests[1:]:
        requests[0].MergeFrom(later)
    return requests[0]


class Echo(tokenizer_pb2_grpc.TokenizerServicer):
    """Answers each message with its ids."""

    def __init__(self):
        self.messages = 0
        self.hang = False
        self.reading = asyncio.Event()
        self.reading.set()

    async def Detokenize(self, requests, context):
        async for message in requests:
            self.messages += 1
            if self.hang:
                await asyncio.sleep(60)
            ids = [item.id for item in message.items]
            if 13 in ids:
                await abort(context, failed_precondition("no thirteen", "THIRTEEN"))
            if 14 in ids:
                await abort(context, invalid("漢" * 5000, "漢" * 5000))
            if 99 in ids:
                return
            yield Response(outputs=[tokenizer_pb2.DetokenizeOutput(id=i) for i in ids])
            await self.reading.wait()


class Peer:
    def __init__(self):
        self.echo = Echo()
        self.server = None
        self.port = free_port()

    async def start(self):
        self.server = grpc.aio.server(options=server_options())
        tokenizer_pb2_grpc.add_TokenizerServicer_to_server(self.echo, self.server)
        self.port = self.server.add_insecure_port(f"127.0.0.1:{self.port}")
        await self.server.start()

    async def stop(self):
        await self.server.stop(0)


class Seen:
    """Callbacks that record, and waiting for what they record."""

    def __init__(self, address, **options):
        self.up, self.messages, self.down = [], [], []
        self.link = Link(
            address,
            lambda channel: tokenizer_pb2_grpc.TokenizerStub(channel).Detokenize,
            lambda: request(1000),
            self.on_message,
            self.up.append,
            self.down.append,
            join,
            **options,
        )

    def on_message(self, message):
        self.messages += [output.id for output in message.outputs]
        if 666 in self.messages[-1:]:
            raise RuntimeError("callback")

    async def until(self, condition):
        async with asyncio.timeout(30):
            while not condition():  # noqa: ASYNC110
                await asyncio.sleep(0.005)


@pytest.fixture
async def peer():
    it = Peer()
    await it.start()
    yield it
    await it.stop()


@pytest.fixture
async def seen(peer):
    it = Seen(f"127.0.0.1:{peer.port}")
    it.link.start()
    await it.until(lambda: it.up)
    yield it
    await it.link.close()
    assert not it.link.connected
    assert len(asyncio.all_tasks()) < 12


async def test_first_message_is_the_welcome_and_later_ones_are_not(seen):
    assert [output.id for output in seen.up[0].outputs] == [1000]
    assert seen.link.connected
    for number in range(2000, 2100):
        assert seen.link.send(request(number))
    await seen.until(lambda: len(seen.messages) == 100)
    assert seen.messages == list(range(2000, 2100))
    assert seen.down == []


async def test_unsent_requests_are_joined(peer, seen):
    for number in range(2000, 3000):
        assert seen.link.send(request(number))
    await seen.until(lambda: len(seen.messages) == 1000)
    assert seen.messages == list(range(2000, 3000))
    assert peer.echo.messages < 20  # the hello, and few others: all were put in one go


async def test_it_comes_back_after_a_restart_of_the_peer(peer, seen):
    await peer.stop()
    await seen.until(lambda: seen.down)
    assert not seen.link.send(request(1))
    assert seen.link.last_error is seen.down[-1]
    await peer.start()
    await seen.until(lambda: len(seen.up) == 2)
    assert seen.link.send(request(2))
    await seen.until(lambda: seen.messages == [2])
    await peer.stop()
    await peer.start()


async def test_a_peer_that_does_not_read_is_given_up_and_met_again(peer, seen, monkeypatch):
    monkeypatch.setattr(link, "MAX_QUEUED_BYTES", 4 * 2**20)
    seen.link.reset(unavailable("a new queue", "TEST"))
    await seen.until(lambda: len(seen.up) == 2)
    peer.echo.reading.clear()
    big = Request(items=[tokenizer_pb2.DetokenizeItem(id=2000, token_ids=range(2**18))])
    assert seen.link.send(big)
    await seen.until(lambda: not seen.link.send(big))
    peer.echo.reading.set()
    await seen.until(lambda: len(seen.up) == 3)
    assert seen.down[-1].reason == "PEER_STALLED"
    seen.messages.clear()
    assert seen.link.send(request(2))
    await seen.until(lambda: 2 in seen.messages)


async def test_a_peer_that_is_not_there_and_comes_later():
    peer = Peer()
    await peer.start()
    await peer.stop()
    seen = Seen(f"127.0.0.1:{peer.port}")
    seen.link.start()
    await seen.until(lambda: len(seen.down) >= 2)
    assert {error.code for error in seen.down} == {grpc.StatusCode.UNAVAILABLE}
    await peer.start()
    await seen.until(lambda: seen.up)
    await seen.link.close()
    downs = len(seen.down)
    await peer.stop()
    await asyncio.sleep(0.1)
    assert len(seen.down) == downs  # nothing is called after close()


async def test_a_peer_that_never_answers_the_hello(peer):
    peer.echo.hang = True
    seen = Seen(f"127.0.0.1:{peer.port}", connect_seconds=0.2)
    seen.link.start()
    await seen.until(lambda: seen.down)
    assert seen.down[0].reason == "CONNECT_TIMEOUT"
    assert not seen.up
    await seen.link.close()


async def test_the_peers_typed_error_reaches_on_down(seen):
    seen.link.send(request(13))
    await seen.until(lambda: seen.down)
    assert (seen.down[0].code, seen.down[0].reason) == (grpc.StatusCode.FAILED_PRECONDITION, "THIRTEEN")
    await seen.until(lambda: len(seen.up) == 2)


async def test_an_error_with_long_texts_fits_the_trailing_metadata(seen):
    seen.link.send(request(14))
    await seen.until(lambda: seen.down)
    assert (seen.down[0].code, seen.down[0].reason) == (grpc.StatusCode.INVALID_ARGUMENT, "INVALID_FIELD")
    assert seen.down[0].field.startswith("漢漢")


async def test_a_stream_that_the_peer_ends_in_peace_is_down_too(seen):
    seen.link.send(request(99))
    await seen.until(lambda: seen.down)
    assert seen.down[0].reason == "STREAM_CLOSED"
    await seen.until(lambda: len(seen.up) == 2)


async def test_a_callback_that_raises_takes_the_link_down(seen):
    seen.link.send(request(666))
    await seen.until(lambda: seen.down)
    assert seen.down[0].code is grpc.StatusCode.INTERNAL
    await seen.until(lambda: len(seen.up) == 2)
    assert len(seen.down) == 1


async def test_close_at_any_time(peer):
    for delay in (0.0, 0.001, 0.01, 0.05):
        seen = Seen(f"127.0.0.1:{peer.port}")
        seen.link.start()
        await asyncio.sleep(delay)
        await asyncio.wait_for(seen.link.close(), 5)
        await seen.link.close()
        assert not seen.link.send(request(1))
        assert not seen.down
