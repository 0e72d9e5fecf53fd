"""A value that an enum of baton.v1 does not have is refused by every method that takes one."""

from __future__ import annotations

import grpc
import pytest
from gateway_rig import gateway
from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass
from scripted_decode import ScriptedDecode, saying

from baton.rpc.errors import BatonError, from_rpc_error, from_status
from baton.rpc.validate import enum_paths
from baton.v1 import (
    cache_pb2,
    decode_pb2,
    embed_pb2,
    inference_pb2,
    node_pb2,
    prefill_pb2,
    tokenizer_pb2,
    trace_pb2,
)
from baton.worker.embedder import check

FILES = (cache_pb2, decode_pb2, inference_pb2, node_pb2, prefill_pb2, tokenizer_pb2, trace_pb2)
UNKNOWN = 99
CHAT = tokenizer_pb2.ChatPrompt(
    messages=[{"role": "user", "content": "Hi"}], tools=[{"name": "f"}], tool_choice={"mode": UNKNOWN}
)
START = inference_pb2.GenerateStart(id="a", chat=CHAT)
REQUESTS: dict[str, tuple[Message, str]] = {
    "Inference.Generate": (inference_pb2.GenerateRequest(start=START), "chat.tool_choice.mode"),
    "Inference.Complete": (inference_pb2.CompleteRequest(start=START), "chat.tool_choice.mode"),
    "Inference.Stream": (inference_pb2.StreamRequest(start=START), "chat.tool_choice.mode"),
    "Inference.Embed": (inference_pb2.EmbedRequest(inputs=[{"text": "a"}], pooling=UNKNOWN), "pooling"),
    "Tokenizer.Encode": (
        tokenizer_pb2.EncodeRequest(inputs=[{"chat": CHAT}]),
        "inputs[0].chat.tool_choice.mode",
    ),
    "Prefill.Embed": (embed_pb2.EmbedPrompts(prompts=[{"token_ids": [1]}], pooling=UNKNOWN), "pooling"),
    "Decode.Embed": (embed_pb2.EmbedPrompts(prompts=[{"token_ids": [1]}], pooling=UNKNOWN), "pooling"),
}
"""A request with such a value for each method that takes an enum, and the field that is named."""


def test_no_method_is_left_out():
    methods = [
        method
        for file in FILES
        for service in file.DESCRIPTOR.services_by_name.values()
        for method in service.methods
    ]
    taking = {
        f"{method.containing_service.name}.{method.name}"
        for method in methods
        if enum_paths(method.input_type)
    }
    assert taking == REQUESTS.keys()


async def answer(channel: grpc.aio.Channel, method: str, request: Message) -> BatonError:
    """The error that answers it, in a status or in the answer."""
    service, _, name = method.partition(".")
    file = inference_pb2 if service == "Inference" else tokenizer_pb2
    descriptor = file.DESCRIPTOR.services_by_name[service].methods_by_name[name]
    call = channel.stream_stream(f"/baton.v1.{service}/{name}")
    try:
        async for data in call(iter([request.SerializeToString()]), timeout=30):
            message = GetMessageClass(descriptor.output_type).FromString(data)
            if name == "Encode":
                return from_status(message.results[0].error)
            if name == "Generate":
                return from_status(message.failed)
    except grpc.aio.AioRpcError as error:
        return from_rpc_error(error)
    raise AssertionError("it was taken")


async def test_it_is_refused_and_named():
    async with ScriptedDecode(saying([40])) as node, gateway(node) as rig:
        for method, (request, field) in REQUESTS.items():
            if method.startswith(("Prefill", "Decode")):
                continue
            channel = rig.tokens_channel if method.startswith("Tokenizer") else rig.channel
            error = await answer(channel, method, request)
            assert (error.code, error.field) == (grpc.StatusCode.INVALID_ARGUMENT, field), method
            assert str(UNKNOWN) in error.message
        assert not node.starts


def test_workers_refuse_it():
    info = node_pb2.ModelInfo(embedding_size=8, context_length=16, vocab_size=16)
    request, field = REQUESTS["Decode.Embed"]
    with pytest.raises(BatonError) as raised:
        check(request, info)
    assert raised.value.field == field
