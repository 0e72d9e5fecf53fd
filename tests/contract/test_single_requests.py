"""Inference.Complete and Inference.Stream: one request a call, whose failure is the call's."""

import grpc
import pytest
from gateway_rig import gateway, until
from scripted_decode import LENGTH, STOP, ScriptedDecode, endless, saying, silent
from test_inference import TEXT, chat, say

from baton.rpc.errors import exhausted, from_rpc_error, unauthenticated
from baton.v1 import common_pb2, inference_pb2

ALICE = "alice-0123456789abcdef"


def complete(rig, metadata=(), timeout=60, **fields):
    start = inference_pb2.GenerateStart(**fields)
    return rig.stub.Complete(inference_pb2.CompleteRequest(start=start), timeout=timeout, metadata=metadata)


def stream(rig, metadata=(), timeout=60, **fields):
    start = inference_pb2.GenerateStart(**fields)
    return rig.stub.Stream(inference_pb2.StreamRequest(start=start), timeout=timeout, metadata=metadata)


async def error_of(call):
    with pytest.raises(grpc.aio.AioRpcError) as failed:
        if hasattr(call, "read"):
            while await call.read() is not grpc.aio.EOF:
                pass
            assert await call.code() is not grpc.StatusCode.OK, "the call has not failed"
            raise grpc.aio.AioRpcError(
                await call.code(),
                await call.initial_metadata(),
                await call.trailing_metadata(),
                await call.details(),
            )
        await call
    return from_rpc_error(failed.value)


async def test_whole_answers():
    async with ScriptedDecode(silent) as node, gateway(node) as rig:
        ids = await say(rig, node, cached=2)
        answer = await complete(rig, text="The prompt", n=2, sampling={"seed": 7, "max_tokens": 50})
        assert [choice.text for choice in answer.choices] == [TEXT, TEXT]
        assert [list(choice.token_ids) for choice in answer.choices] == [ids, ids]
        assert [choice.finish_reason for choice in answer.choices] == [LENGTH, LENGTH]
        assert answer.accepted.seed == 7
        assert answer.accepted.prompt_tokens == answer.finished.usage.prompt_tokens > 0
        assert answer.finished.usage.output_tokens == 2 * len(ids)
        assert answer.finished.decode_address == node.address
        plain = await complete(rig, chat=chat("Hello"), include_token_ids=False)
        assert plain.choices[0].text == TEXT and not plain.choices[0].token_ids
        await rig.idle()


async def test_stop_strings_and_logprobs():
    async with ScriptedDecode(silent) as node, gateway(node) as rig:
        await say(rig, node, text="one two three")
        stopped = (await complete(rig, text="x", sampling={"stop": ["two"]})).choices[0]
        assert (stopped.text, stopped.stop_matched, stopped.finish_reason) == ("one ", "two", STOP)

        async def script(running):
            position = common_pb2.PositionLogprobs(chosen={"token_id": 40, "logprob": -0.5})
            await running.prompt(logprobs=[common_pb2.PositionLogprobs(), position])
            await running.tokens([40], logprobs=[position])
            await running.tokens([41], logprobs=[position], finish=LENGTH)
            await running.finished()

        node.script = script
        sampling = {"logprobs": 0, "prompt_logprobs": 0, "max_tokens": 2}
        answer = await complete(rig, tokens={"token_ids": [3, 40]}, sampling=sampling)
        assert [round(each.chosen.logprob, 3) for each in answer.choices[0].logprobs] == [-0.5, -0.5]
        assert len(answer.prompt_logprobs) == 2 and not answer.prompt_logprobs[0].HasField("chosen")


async def test_streams():
    async with ScriptedDecode(silent) as node, gateway(node) as rig:
        ids = await say(rig, node)
        events = [event async for event in stream(rig, text="The prompt", sampling={"max_tokens": 50})]
        kinds = [event.WhichOneof("kind") for event in events]
        assert kinds[0] == "accepted" and kinds[-1] == "finished" and set(kinds[1:-1]) == {"delta"}
        assert "".join(event.delta.text for event in events) == TEXT
        assert [id for event in events for id in event.delta.token_ids] == ids
        await rig.idle()


@pytest.mark.parametrize("ask", [complete, stream])
async def test_failures_are_statuses_with_details(ask):
    async with ScriptedDecode(silent) as node, gateway(node) as rig:
        for fields, code, reason, field in (
            (
                {"text": "x", "sampling": {"temperature": -1}},
                "INVALID_ARGUMENT",
                None,
                "sampling.temperature",
            ),
            ({}, "INVALID_ARGUMENT", "INVALID_FIELD", "prompt"),
            ({"text": "x", "model": "other"}, "NOT_FOUND", "MODEL_NOT_FOUND", "model"),
            ({"text": "x", "session": "s"}, "INVALID_ARGUMENT", "INVALID_FIELD", "start.session"),
            ({"text": "x", "id": "i" * 129}, "INVALID_ARGUMENT", "INVALID_FIELD", "start.id"),
            ({"text": "x", "timeout_ms": 80}, "DEADLINE_EXCEEDED", "DEADLINE_EXCEEDED", None),
        ):
            error = await error_of(ask(rig, **fields))
            assert (error.code.name, error.field) == (code, field), error
            assert reason in (None, error.reason)
        await rig.idle()

        async def failing(running):
            await running.prompt()
            await running.tokens([40])
            await running.failed(exhausted("no pages", "NO_PAGES", 1500))

        node.script = failing
        error = await error_of(ask(rig, text="x", resume=False))
        assert (error.code, error.reason) == (grpc.StatusCode.RESOURCE_EXHAUSTED, "NO_PAGES")
        assert error.retry_after_ms == 1500
        await rig.idle()


@pytest.mark.parametrize("ask", [complete, stream])
@pytest.mark.parametrize("how", ["cancel", "deadline"])
async def test_who_leaves_frees_everything(ask, how):
    async with ScriptedDecode(endless) as node, gateway(node) as rig:
        call = ask(rig, text="x", timeout=1.5 if how == "deadline" else 20)
        await until(lambda: node.running)
        if how == "cancel":
            call.cancel()
        else:
            assert (await error_of(call)).code is grpc.StatusCode.DEADLINE_EXCEEDED
        await until(lambda: not node.running)
        assert len(node.cancels) == 1
        await rig.idle()


async def test_keys_and_their_limits(tmp_path):
    keys = tmp_path / "keys"
    keys.write_text(f"{ALICE} name=alice streams=1\n")
    keys.chmod(0o600)
    alice = (("authorization", f"Bearer {ALICE}"),)
    async with ScriptedDecode(silent) as node, gateway(node, api_keys=str(keys)) as rig:
        for ask in (complete, stream):
            error = await error_of(ask(rig, text="x"))
            assert (error.code, error.reason) == (unauthenticated("").code, "MISSING_API_KEY")
        first = stream(rig, text="x", metadata=alice)
        await first.read()
        for ask in (complete, stream):
            assert (await error_of(ask(rig, text="x", metadata=alice))).code.name == "RESOURCE_EXHAUSTED"
        first.cancel()
        await rig.idle()
        node.script = saying([40, 41])
        assert (await complete(rig, text="x", metadata=alice)).finished.usage.output_tokens == 2
