"""What is wrong is refused through gRPC with a typed error that names the field; the stream serves on."""

from __future__ import annotations

import math

import grpc
import httpx
import pytest
from deployment import Deployment
from google.rpc import code_pb2
from streams import Inference, inference

from baton.rpc.errors import from_status
from baton.v1 import common_pb2, inference_pb2, inference_pb2_grpc, tokenizer_pb2

Sampling = common_pb2.SamplingParams
HELLO = {"text": "hello"}
INVALID = "INVALID_ARGUMENT"


def tokens(*ids: int) -> dict:
    return {"tokens": inference_pb2.TokenPrompt(token_ids=ids)}


def chat(*messages: tuple[str, str]) -> dict:
    said = [tokenizer_pb2.ChatMessage(role=role, content=content) for role, content in messages]
    return {"chat": tokenizer_pb2.ChatPrompt(messages=said)}


def sampling(**fields) -> dict:
    return {**HELLO, "sampling": Sampling(**fields)}


WRONG = {
    "no prompt": ({}, "prompt"),
    "empty chat": (chat(), "chat.messages"),
    "no token ids": (tokens(), "tokens.token_ids"),
    "text longer than the context": ({"text": "hello " * 3000}, "text"),
    "chat longer than the context": (chat(("user", "hello " * 3000)), "chat"),
    "tokens longer than the context": (tokens(*[5] * 2048), "tokens.token_ids"),
    "text of 8 million bytes": ({"text": "hello " * 1_300_000}, "text"),
    "text without a border": ({"text": "a" * 8_000_000}, "text"),
    "unknown role": (chat(("user", "hi"), ("wizard", "hi")), "chat.messages[1].role"),
    "token outside the vocabulary": (tokens(5, 4096), "tokens.token_ids[1]"),
    "largest token id": (tokens(2**32 - 1), "tokens.token_ids[0]"),
    "temperature -1": (sampling(temperature=-1), "sampling.temperature"),
    "temperature NaN": (sampling(temperature=math.nan), "sampling.temperature"),
    "temperature infinite": (sampling(temperature=math.inf), "sampling.temperature"),
    "top_p 0": (sampling(top_p=0), "sampling.top_p"),
    "top_p 2": (sampling(top_p=2), "sampling.top_p"),
    "top_p NaN": (sampling(top_p=math.nan), "sampling.top_p"),
    "top_k negative": (sampling(top_k=-1), "sampling.top_k"),
    "min_p infinite": (sampling(min_p=-math.inf), "sampling.min_p"),
    "repetition_penalty 0": (sampling(repetition_penalty=0), "sampling.repetition_penalty"),
    "presence_penalty NaN": (sampling(presence_penalty=math.nan), "sampling.presence_penalty"),
    "frequency_penalty 3": (sampling(frequency_penalty=3), "sampling.frequency_penalty"),
    "max_tokens 0": (sampling(max_tokens=0), "sampling.max_tokens"),
    "max_tokens negative": (sampling(max_tokens=-1), "sampling.max_tokens"),
    "max_tokens 10**12": (sampling(max_tokens=10**12), "sampling.max_tokens"),
    "max_tokens 2**63-1": (sampling(max_tokens=2**63 - 1), "sampling.max_tokens"),
    "max_tokens beyond the context": (sampling(max_tokens=2048), "sampling.max_tokens"),
    "min_tokens above max_tokens": (sampling(max_tokens=2, min_tokens=3), "sampling.min_tokens"),
    "min_tokens beyond the context": (sampling(min_tokens=2048), "sampling.min_tokens"),
    "logprobs 21": (sampling(logprobs=21), "sampling.logprobs"),
    "prompt_logprobs -1": (sampling(prompt_logprobs=-1), "sampling.prompt_logprobs"),
    "too many stop strings": (sampling(stop=["a"] * 17), "sampling.stop"),
    "empty stop string": (sampling(stop=["a", ""]), "sampling.stop[1]"),
    "long stop string": (sampling(stop=["a" * 1_000_000]), "sampling.stop[0]"),
    "too many stop tokens": (sampling(stop_token_ids=range(65)), "sampling.stop_token_ids"),
    "stop token outside": (sampling(stop_token_ids=[4096]), "sampling.stop_token_ids[0]"),
    "bias outside the vocabulary": (sampling(logit_bias={4096: 1}), "sampling.logit_bias[4096]"),
    "bias NaN": (sampling(logit_bias={5: math.nan}), "sampling.logit_bias[5]"),
    "too many biases": (sampling(logit_bias=dict.fromkeys(range(1025), 1)), "sampling.logit_bias"),
    "n 0": ({**HELLO, "n": 0}, "n"),
    "n 1000": ({**HELLO, "n": 1000}, "n"),
    "n in a session": ({**HELLO, "n": 2, "session": "s"}, "n"),
    "timeout 0": ({**HELLO, "timeout_ms": 0}, "timeout_ms"),
    "timeout 2**64-1": ({**HELLO, "timeout_ms": 2**64 - 1}, "timeout_ms"),
    "priority 101": ({**HELLO, "priority": 101}, "priority"),
    "namespace of 1 MB": ({**HELLO, "namespace": "a" * 1_000_000}, "namespace"),
    "session of 1 MB": ({**HELLO, "session": "a" * 1_000_000}, "session"),
}


@pytest.fixture(scope="module")
def stream(demo: Deployment):
    """One stream for all of these."""
    with inference(demo.gateway.address) as stream:
        yield stream


@pytest.mark.parametrize("case", WRONG)
def test_refused_and_the_stream_serves_on(stream: Inference, case: str):
    fields, field = WRONG[case]
    stream.start("wrong", **fields)
    event = stream.terminal()
    assert (event.WhichOneof("kind"), event.id) == ("failed", "wrong")
    reasons = ("INVALID_FIELD", "CONTEXT_LENGTH_EXCEEDED")
    check(event.failed, INVALID, field, *reasons)
    stream.serves()


def test_unknown_model(stream: Inference):
    stream.start("wrong", model="gpt-5", **HELLO)
    check(stream.terminal().failed, "NOT_FOUND", "model", "MODEL_NOT_FOUND")
    stream.serves()


@pytest.mark.parametrize("id", ["", "a" * 129, "a" * 200])
def test_wrong_id(stream: Inference, id: str):
    stream.start(id, **HELLO)
    check(stream.terminal().rejected.status, INVALID, "start.id")
    stream.serves()


def test_second_start_with_an_id_in_use(stream: Inference):
    stream.start("twice", text="hello", sampling=Sampling(max_tokens=50, ignore_eos=True))
    stream.start("twice", text="other")
    event = stream.terminal()
    check(event.rejected.status, "ALREADY_EXISTS", "start.id", "ID_IN_USE")
    event = stream.terminal("twice")
    assert event.finished.usage.output_tokens == 50
    stream.serves("twice")


def test_cancel_of_an_unknown_id(stream: Inference):
    for id in ("nobody", "", "a" * 100_000):
        stream.cancel(id)
        check(stream.terminal().rejected.status, "NOT_FOUND", None, "UNKNOWN_ID")
    stream.serves()


MALFORMED = {
    "nothing": (b"", "kind", "EMPTY_MESSAGE"),
    "no message": (b"\xff\xff\xff\xff", "message", "MALFORMED_MESSAGE"),
    "cut": (b"\x0a\x7f\x0a\x01x", "message", "MALFORMED_MESSAGE"),
    "wrong wire type": (b"\x08\x01", "kind", "EMPTY_MESSAGE"),
    "id": (b"\x0a\x03\x0a\x01\xff", "start.id", "INVALID_UTF8"),
    "text": (b"\x0a\x07\x0a\x01x\x1a\x02\xff\xfe", "start.text", "INVALID_UTF8"),
    "surrogate": (b"\x0a\x08\x0a\x01x\x1a\x03\xed\xa0\x80", "start.text", "INVALID_UTF8"),
    "role": (
        b"\x0a\x0f\x0a\x01x\x22\x0a\x0a\x03\x12\x01a\x0a\x03\x0a\x01\xff",
        "start.chat.messages[1].role",
        "INVALID_UTF8",
    ),
    "stop": (b"\x0a\x08\x0a\x01x\x32\x03\x62\x01\xff", "start.sampling.stop[0]", "INVALID_UTF8"),
    "cancel": (b"\x12\x03\x0a\x01\xff", "cancel.id", "INVALID_UTF8"),
}


@pytest.mark.parametrize("case", MALFORMED)
def test_malformed_message(stream: Inference, case: str):
    data, field, reason = MALFORMED[case]
    stream.send(data)
    check(stream.terminal().rejected.status, INVALID, field, reason)
    stream.serves()


def test_malformed_message_leaves_running_requests_alone(stream: Inference):
    stream.start("runs", text="hello", sampling=Sampling(max_tokens=100, ignore_eos=True))
    stream.send(b"\xff")
    assert stream.terminal().WhichOneof("kind") == "rejected"
    assert stream.terminal("runs").finished.usage.output_tokens == 100


def test_message_of_100_million_bytes(demo: Deployment):
    """gRPC itself ends the call; the connection serves the next."""
    with grpc.insecure_channel(demo.gateway.address) as channel:
        stream = Inference(channel)
        stream.serves()
        stream.start(text="a" * 100_000_000)
        error = stream.terminal()
        assert error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED and "larger than max" in error.details()
        other = Inference(channel)
        other.serves()
        other.leave()


def test_half_closed_streams(demo: Deployment):
    with grpc.insecure_channel(demo.gateway.address) as channel:
        before = Inference(channel)
        before.half_close()
        assert before.next() is None
        after = Inference(channel)
        after.start(text="hello", sampling=Sampling(max_tokens=20, ignore_eos=True))
        after.half_close()
        assert after.terminal().finished.usage.output_tokens == 20
        assert after.next() is None
        refused = Inference(channel)
        refused.start()
        refused.half_close()
        check(refused.terminal().failed, INVALID, "prompt")
        assert refused.next() is None


def test_clients_that_leave_while_they_are_sent_to(demo: Deployment):
    """They read nothing, so that the gateway waits in a write. The `demo` fixture looks for tracebacks."""
    narrow = [("grpc.http2.bdp_probe", 0), ("grpc.http2.lookahead_bytes", 1024)]
    calls = []
    for _ in range(3):
        channel = grpc.insecure_channel(
            demo.gateway.address, [*narrow, ("grpc.use_local_subchannel_pool", 1)]
        )
        sampling = Sampling(max_tokens=400, ignore_eos=True, logprobs=20)
        start = inference_pb2.GenerateStart(id="deaf", text="hello", sampling=sampling)
        stub = inference_pb2_grpc.InferenceStub(channel)
        calls.append((channel, stub.Generate(iter([inference_pb2.GenerateRequest(start=start)]), timeout=90)))
    demo.assert_idle(30.0)  # before a client that does not read is let go
    for channel, call in calls:
        call.cancel()
        channel.close()
    with inference(demo.gateway.address) as stream:
        stream.serves()
    assert "Traceback" not in demo.gateway.log.read_text()


def test_prompt_longer_than_a_pool(tmp_path, deployments: list[Deployment]):
    """Than the decode node's: refused at the door. Than the prefill node's only: computed elsewhere."""
    with Deployment.split(
        tmp_path, "demo", prefill_flags=["--kv-tokens", "160"], decode_flags=["--kv-tokens", "512"]
    ) as small:
        deployments.append(small)
        http = httpx.Client(base_url=f"http://{small.gateway.http}", timeout=60)
        with inference(small.gateway.address) as stream, http:
            for count in (512, 2000):
                stream.start(**tokens(*[5] * count))
                check(stream.terminal().failed, INVALID, "tokens.token_ids", "CONTEXT_LENGTH_EXCEEDED")
                answer = http.post("/v1/completions", json={"model": "demo", "prompt": [5] * count})
                assert (answer.status_code, answer.json()["error"]["param"]) == (400, "prompt")
                stream.serves()
            for count in (300, 504):
                stream.start(**tokens(*[5] * count), sampling=Sampling(max_tokens=8, ignore_eos=True))
                event = stream.terminal()
                assert event.finished.usage.output_tokens == 8, event


def test_unary_methods_refuse_malformed_messages(demo: Deployment):
    with grpc.insecure_channel(demo.gateway.address) as channel:
        with pytest.raises(grpc.RpcError) as raised:
            channel.unary_unary("/baton.v1.Inference/ListModels")(b"\xff", timeout=5)
        assert raised.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        with pytest.raises(grpc.RpcError) as raised:
            channel.unary_unary("/baton.v1.Inference/Nothing")(b"", timeout=5)
        assert raised.value.code() is grpc.StatusCode.UNIMPLEMENTED


def check(status, code: str, field: str | None, *reasons: str) -> None:
    error = from_status(status)
    assert (code_pb2.Code.Name(status.code), error.field) == (code, field), error
    assert error.reason in (reasons or ("INVALID_FIELD",)), error
    assert "\n" not in error.message and len(error.message) < 400
