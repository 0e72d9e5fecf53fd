"""Clients that do not read: what is kept for them is bounded, and after a while they are let go."""

from __future__ import annotations

import asyncio
import gc
import json
import socket
from collections.abc import Iterator

import grpc
import pytest
from gateway_rig import Stream, gateway, ids_of, until
from scripted_decode import LENGTH, Running, ScriptedDecode, silent

from baton.gateway.backpressure import SlowReader
from baton.gateway.grpc_inference import _ClientStream
from baton.rpc.errors import from_rpc_error, from_status
from baton.v1 import common_pb2, inference_pb2, inference_pb2_grpc

LIMIT = 400
CHUNK = 20
TOKENS = 60_000
ENTRY = common_pb2.TokenLogprob(token_id=50, logprob=-1.5)
POSITION = common_pb2.PositionLogprobs(chosen=ENTRY, top=[ENTRY] * 20)
LARGE = {"max_tokens": TOKENS, "logprobs": 20}


def fast(node: ScriptedDecode, count: int):
    """As many tokens as a model makes that never tires; it stops while the request is paused."""

    async def script(running: Running) -> None:
        await running.prompt()
        for first in range(0, count, CHUNK):
            while node.pauses and node.pauses[-1] == (running.start.request, True):  # noqa: ASYNC110
                await asyncio.sleep(0.005)
            ids = [40 + token % 50 for token in range(first, min(first + CHUNK, count))]
            last = first + CHUNK >= count
            # Alternatives make a token large: what the kernel and gRPC hold is soon full.
            logprobs = [POSITION] * len(ids) if running.start.sampling.HasField("logprobs") else ()
            await running.tokens(ids, finish=LENGTH if last else 0, logprobs=logprobs)
            await asyncio.sleep(0.001)
        await running.finished()

    return script


@pytest.fixture
async def node():
    async with ScriptedDecode(silent, context=100_000) as node:
        node.script = fast(node, TOKENS)
        yield node


def unread(rig) -> list[int]:
    return [request.log.unread for request in rig.node.gateway._running]


def said(node) -> list[bool]:
    return [paused for _, paused in node.pauses]


async def test_a_paused_request_goes_on_where_it_was(node):
    async with gateway(node, max_unread_tokens=LIMIT) as rig:
        stream = Stream(rig)
        await stream.start(text="x", sampling=LARGE)
        got = []
        for times in (1, 2):
            await until(lambda times=times: said(node).count(True) == times, 60)
            await asyncio.sleep(0.3)
            assert max(unread(rig)) < LIMIT + 100 * CHUNK, "what was under way, and no more"
            while said(node).count(False) < times:
                got += ids_of([await stream.next()])
        assert said(node)[:4] == [True, False, True, False]
        await stream.cancel()
        got += ids_of(await stream.until_end())
        assert got == [40 + token % 50 for token in range(len(got))] and len(got) > 3 * LIMIT
        await rig.idle()


async def test_a_client_that_never_reads_is_let_go(node, monkeypatch):
    monkeypatch.setattr("baton.gateway.grpc_inference.WRITE_SECONDS", 60.0)  # the call itself is not ended
    async with gateway(node, max_unread_tokens=LIMIT, slow_reader_seconds=0.3) as rig:
        deaf, other = Stream(rig), Stream(rig)
        await deaf.start(text="x", sampling=LARGE)
        await until(lambda: node.cancels, 60)
        await rig.idle()
        node.pauses.clear()
        node.script = fast(node, 100)
        await other.start(text="x", sampling={"max_tokens": 100})
        assert len(ids_of(await other.until_end())) == 100
        # One that reads in the end gets what was kept, then why there is no more.
        error = from_status((await deaf.until_end())[-1].failed)
        assert error.reason == "SLOW_READER" and error.code.name == "RESOURCE_EXHAUSTED"


async def test_a_call_of_one_request_that_is_never_read_is_let_go(node):
    async with gateway(node, max_unread_tokens=LIMIT, slow_reader_seconds=0.3) as rig:
        start = inference_pb2.GenerateStart(text="x", sampling=LARGE)
        deaf = rig.stub.Stream(inference_pb2.StreamRequest(start=start))
        await until(lambda: node.cancels, 60)
        await rig.idle()
        with pytest.raises(grpc.aio.AioRpcError) as failed:
            async for _ in deaf:
                pass
        assert from_rpc_error(failed.value).reason == "SLOW_READER"


@pytest.fixture
def no_collector() -> Iterator[None]:
    gc.collect()
    gc.disable()
    yield
    gc.enable()


def streams() -> list[object]:
    return [each for each in gc.get_objects() if type(each) is _ClientStream]


async def test_a_stream_that_takes_nothing_at_all_is_ended(node, no_collector):
    """Its connection takes nothing either, so that not even the status of its end leaves."""
    narrow = [("grpc.http2.bdp_probe", 0), ("grpc.http2.lookahead_bytes", 1024)]
    async with (
        # The call itself is ended 2 s later than that: not before the model has filled it, if slowly.
        gateway(node, max_unread_tokens=LIMIT, slow_reader_seconds=4.0) as rig,
        grpc.aio.insecure_channel(rig.node.address, options=narrow) as channel,
    ):
        deaf = inference_pb2_grpc.InferenceStub(channel).Generate()
        start = inference_pb2.GenerateStart(id="a", text="x", sampling=LARGE)
        await deaf.write(inference_pb2.GenerateRequest(start=start))
        await until(lambda: node.cancels, 60)
        anonymous = rig.node.authentication._anonymous
        assert anonymous._streams == 1
        await until(lambda: not anonymous._streams, 9)
        # Nothing of it waits with the status, or for the garbage collector.
        await until(lambda: not streams())


async def test_http_keeps_no_more_either(node):
    # The kernel gives the connection up 2 s later than that: not before the model has filled it, if slowly.
    async with gateway(node, max_unread_tokens=LIMIT, slow_reader_seconds=4.0) as rig:
        host, _, port = rig.node.info().http_address.rpartition(":")
        body = json.dumps(
            {"model": "scripted", "prompt": "x", "max_tokens": TOKENS, "stream": True, "logprobs": 5}
        ).encode()
        with socket.socket() as deaf:
            deaf.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            deaf.connect((host, int(port)))
            head = "POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n"
            deaf.sendall(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
            await until(lambda: node.pauses, 60)
            assert max(unread(rig)) < LIMIT + 20 * CHUNK
            connections = rig.node._http._server.server_state.connections
            assert connections
            await until(lambda: node.cancels, 60)
            await rig.idle()
            # The kernel gives the connection up, and with it what was kept for it.
            await until(lambda: not connections, 60)


async def test_who_reads_in_time_is_left_alone():
    paused, failed = [], []
    reader = SlowReader(10, 0.05, asyncio.get_running_loop().call_later, paused.append, failed.append)
    for count in (10, 11, 8, 30, 6):
        reader.look(count)
    assert paused == [True]
    reader.look(5)
    assert paused == [True, False]
    await asyncio.sleep(0.1)
    assert not failed
    reader.look(11)
    reader.look(12)
    await asyncio.sleep(0.1)
    assert paused == [True, False, True] and [error.reason for error in failed] == ["SLOW_READER"]
