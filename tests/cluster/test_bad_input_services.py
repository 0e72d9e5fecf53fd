"""What is wrong is refused by the Tokenizer and Node services, asked directly; silence holds up nobody."""

from __future__ import annotations

import queue
from collections.abc import Iterator

import grpc
import pytest
from deployment import Deployment
from streams import Stream
from worker_streams import INVALID, Decode, Prefill, ended, numbers

from baton.rpc.errors import BatonError, from_rpc_error, from_status
from baton.v1 import node_pb2, node_pb2_grpc, tokenizer_pb2
from baton.v1 import tokenizer_pb2_grpc as tokenizer_grpc


@pytest.fixture
def tokenizer(demo: Deployment) -> Iterator[grpc.Channel]:
    with grpc.insecure_channel(demo.tokenizer.address) as channel:
        yield channel


def test_encode(tokenizer):
    stub = tokenizer_grpc.TokenizerStub(tokenizer)
    said = [tokenizer_pb2.ChatMessage(role=role, content="hi") for role in ("user", "wizard")]
    inputs = [
        tokenizer_pb2.EncodeInput(),
        tokenizer_pb2.EncodeInput(chat=tokenizer_pb2.ChatPrompt()),
        tokenizer_pb2.EncodeInput(chat=tokenizer_pb2.ChatPrompt(messages=said)),
        tokenizer_pb2.EncodeInput(text="good"),
    ]
    results = stub.Encode(tokenizer_pb2.EncodeRequest(inputs=inputs), timeout=10).results
    fields = [from_status(result.error).field for result in results[:3]]
    assert fields == ["inputs[0]", "inputs[1].chat.messages", "inputs[2].chat.messages[1].role"]
    assert results[3].token_ids and not results[3].HasField("error")
    assert not stub.Encode(tokenizer_pb2.EncodeRequest(), timeout=10).results
    with pytest.raises(grpc.RpcError) as raised:
        tokenizer.unary_unary("/baton.v1.Tokenizer/Encode")(b"\x0a\x03\x0a\x01\xff", timeout=10)
    error = from_rpc_error(raised.value)
    assert (error.code, error.field) == (INVALID, "inputs[0].text")


def test_decode_of_tokens_that_are_none(tokenizer):
    stub = tokenizer_grpc.TokenizerStub(tokenizer)
    sequences = [tokenizer_pb2.TokenSequence(token_ids=ids) for ids in ([5], [5, 2**32 - 1])]
    with pytest.raises(grpc.RpcError) as raised:
        stub.Decode(tokenizer_pb2.DecodeRequest(sequences=sequences), timeout=10)
    error = from_rpc_error(raised.value)
    assert (error.code, error.field) == (INVALID, "sequences[1].token_ids[1]")
    assert stub.Decode(tokenizer_pb2.DecodeRequest(sequences=sequences[:1]), timeout=10).texts


def test_detokenize(tokenizer, demo: Deployment):
    stream = Stream(tokenizer, "Tokenizer/Detokenize", tokenizer_pb2.DetokenizeResponse)

    def ask(*items: dict) -> list[tokenizer_pb2.DetokenizeOutput]:
        stream.send(tokenizer_pb2.DetokenizeRequest(items=[tokenizer_pb2.DetokenizeItem(**i) for i in items]))
        return list(stream.next().outputs)

    good, wrong, late = ask({"id": 1, "token_ids": [300]}, {"id": 2, "token_ids": [4096]}, {"id": 2})
    assert good.text and not good.finished
    assert wrong.finished and from_status(wrong.error).field == "items[1].token_ids[0]"
    assert from_status(late.error).reason == "STREAM_CLOSED"
    (twice,) = ask({"id": 1, "context": [300]})
    assert from_status(twice.error).field == "items[0].context"
    for first in range(0, 65536, 8192):
        assert not any(o.HasField("error") for o in ask(*({"id": 10 + first + i} for i in range(8192))))
    assert ask({"id": 10 + 65536})[0].HasField("error")
    assert demo.tokenizer.load().requests == 65536
    stream.send(b"\xff")
    ended(stream, INVALID, "MALFORMED_MESSAGE", "message")
    demo.assert_idle()


def test_node_services(demo: Deployment):
    for process in demo.processes:
        with grpc.insecure_channel(process.address) as channel:
            for method in ("GetInfo", "GetLoad", "Drain"):
                with pytest.raises(grpc.RpcError) as raised:
                    channel.unary_unary(f"/baton.v1.Node/{method}")(b"\xff", timeout=5)
                assert raised.value.code() is INVALID
        assert not process.load().draining


def test_drain_for_an_absurd_time(tmp_path, deployments: list[Deployment]):
    with Deployment.split(tmp_path, "demo", prefill=0) as deployment:
        deployments.append(deployment)
        for process in deployment.processes:
            with grpc.insecure_channel(process.address) as channel:
                stub = node_pb2_grpc.NodeStub(channel)
                for milliseconds in (0, 2**64 - 1):
                    answer = stub.Drain(node_pb2.DrainRequest(timeout_ms=milliseconds), timeout=10)
                    assert answer.drained and not answer.remaining
        with pytest.raises(BatonError) as refused:
            deployment.client().generate("hello")
        assert refused.value.reason == "DRAINING"


@pytest.fixture
def decode(demo: Deployment) -> Iterator[grpc.Channel]:
    with grpc.insecure_channel(demo.decode.address) as channel:
        yield channel


@pytest.fixture
def prefill(demo: Deployment) -> Iterator[grpc.Channel]:
    with grpc.insecure_channel(demo.prefill.address) as channel:
        yield channel


def test_streams_that_say_nothing(decode, prefill, tokenizer, demo: Deployment):
    """They hold nothing, and hold up nobody."""
    calls = [
        *(Decode(decode, hello=False) for _ in range(20)),
        *(Prefill(prefill, None) for _ in range(20)),
        *(Stream(tokenizer, "Tokenizer/Detokenize", tokenizer_pb2.DetokenizeResponse) for _ in range(20)),
    ]
    stream = Decode(decode)
    stream.start(1, prefill=[demo.prefill.address], namespace=f"silence {next(numbers)}")
    assert stream.ends(1) == {1: 4}
    for call in calls:
        assert call.silent(0.001)
        call.leave()
    with pytest.raises(queue.Empty):
        stream.next(0.1)
