"""A request that has ended goes with the last reference to it: it holds its prompt and its stream."""

from __future__ import annotations

import gc

import grpc
import pytest
from gateway_rig import Stream, gateway, text_of, until
from scripted_decode import ScriptedDecode, endless, saying

from baton.gateway.grpc_inference import _ClientStream
from baton.gateway.request import GatewayRequest
from baton.rpc.errors import BatonError
from baton.tokenizer import service
from baton.v1 import tokenizer_pb2


def alive() -> list[object]:
    return [each for each in gc.get_objects() if type(each) in (GatewayRequest, _ClientStream)]


def failing(code: grpc.StatusCode, reason: str):
    async def script(running):
        await running.failed(BatonError(code, reason, "as the script says"))

    return script


SCRIPTS = {
    "failed": failing(grpc.StatusCode.INTERNAL, "BAD_LOGITS"),
    "full": failing(grpc.StatusCode.RESOURCE_EXHAUSTED, "QUEUE_FULL"),
    "late": failing(grpc.StatusCode.DEADLINE_EXCEEDED, "DEADLINE_EXCEEDED"),
}


ENCODING = ("not encoded", "tokenizer full", "tokenizer gone")


@pytest.mark.parametrize(
    "ends", ["finished", "cancelled", "cancelled at once", "refused", "expired", *ENCODING, *SCRIPTS]
)
async def test_an_ended_request_is_not_left_to_the_garbage_collector(ends, monkeypatch):
    if ends == "tokenizer full":
        monkeypatch.setattr(service, "MAX_WORK", 0)
    async with ScriptedDecode(SCRIPTS.get(ends, endless)) as node, gateway(node) as rig:
        if ends == "finished":
            node.script = saying(await rig.encode("all of it"))
        elif ends == "tokenizer gone":
            monkeypatch.setattr(rig.node.gateway.tokenizer, "_wait_seconds", 0.0)
            for tokenizer in rig.node.gateway.tokenizer.nodes.values():
                await tokenizer.close()
        gc.collect()
        gc.disable()
        try:
            for number in range(5):
                name, stream = str(number), Stream(rig)
                if ends == "refused":
                    await stream.start(name, text="x", sampling={"temperature": -1.0})
                elif ends == "not encoded":
                    robot = tokenizer_pb2.ChatMessage(role="robot", content="x")
                    await stream.start(name, chat=tokenizer_pb2.ChatPrompt(messages=[robot]))
                elif ends == "expired":
                    await stream.start(name, text="x", timeout_ms=50)
                else:
                    await stream.start(name, text="x")
                if ends == "cancelled":
                    await stream.next()
                if ends.startswith("cancelled"):
                    await stream.cancel(name)
                last = await stream.until_end(name)
                if ends == "finished":
                    assert text_of(last) == "all of it"
                else:
                    assert last[-1].WhichOneof("kind") == "failed"
                await stream.call.done_writing()
                assert await stream.call.read() is grpc.aio.EOF
            await rig.idle()
            await until(lambda: not alive())
        finally:
            gc.enable()
