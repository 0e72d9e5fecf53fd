"""What a gateway does when its peers fail: lost, silent, restarted, or sending garbage."""

import asyncio
import json
import shutil

import grpc
import pytest
from gateway_rig import Stream, gateway, text_of, tokenizer, until
from scripted_decode import LENGTH, ScriptedDecode, endless, saying, silent

from baton.demo import model_path
from baton.gateway.tokenizer_client import TokenizerClient
from baton.rpc.errors import BatonError, exhausted, from_status
from baton.v1 import decode_pb2
from ports import free_port


def failure(event):
    assert event.WhichOneof("kind") == "failed", event
    return from_status(event.failed)


async def test_a_decode_node_that_stays_lost_fails_what_it_ran():
    async with ScriptedDecode(endless) as node, gateway(node, resume_wait_seconds=0.3) as rig:
        stream = Stream(rig)
        await stream.start(text="x", sampling={"max_tokens": 250})
        await stream.next()
        await stream.next()
        port = int(node.address.rpartition(":")[2])
        await node.die()
        error = failure((await stream.until_end())[-1])
        assert (error.code, error.reason) == (grpc.StatusCode.UNAVAILABLE, "DECODE_LOST")
        assert node.address in error.message
        await rig.idle()
        await stream.start("b", text="x")
        assert failure((await stream.until_end("b"))[-1]).code is grpc.StatusCode.UNAVAILABLE
        # It comes back at the same address: the gateway finds it by itself.
        node.script = saying(await rig.encode("back again"))
        await node.serve(port)
        assert await rig.node.gateway.wait_until_usable(30)
        await stream.start("c", text="x")
        assert text_of(await stream.until_end("c")) == "back again"


async def test_undelivered_request_of_a_lost_node_is_tried_at_another():
    async with ScriptedDecode(silent) as a, ScriptedDecode(silent) as b, gateway(a, b) as rig:
        stream = Stream(rig)
        await stream.start(text="x", sampling={"seed": 3})
        await stream.next()
        first, second = (a, b) if a.starts else (b, a)
        second.script = saying(await rig.encode("from the other"))
        await first.die()
        events = await stream.until_end()
        assert text_of(events) == "from the other"
        assert [event.WhichOneof("kind") for event in events].count("accepted") == 0  # it was accepted before
        assert (first.starts[0].attempt, second.starts[0].attempt) == (0, 1)
        assert second.starts[0].sampling.seed == 3


@pytest.mark.parametrize("error", [exhausted("full")])
async def test_refusal_is_tried_at_another_node_once(error):
    async def refuse(running):
        await running.failed(error)

    async with ScriptedDecode(refuse) as a, ScriptedDecode(refuse) as b, gateway(a, b) as rig:
        stream = Stream(rig)
        await stream.start("1", text="x")
        assert failure((await stream.until_end("1"))[-1]).code is error.code
        assert len(a.starts) == len(b.starts) == 1
        b.script = saying(await rig.encode("taken"))
        await stream.start("2", text="x")
        assert text_of(await stream.until_end("2")) == "taken"


async def test_silent_decode_node_meets_the_deadline():
    async with ScriptedDecode(silent) as node, gateway(node) as rig:
        stream = Stream(rig)
        await stream.start(text="x", timeout_ms=150)
        error = failure((await stream.until_end())[-1])
        assert error.code is grpc.StatusCode.DEADLINE_EXCEEDED
        await rig.idle()


async def too_many(running):
    await running.tokens([40] * (running.start.sampling.max_tokens + 1))


async def unknown_choice(running):
    await running.tokens([40], choice=3)


async def tokens_after_the_last(running):
    await running.tokens([40], finish=LENGTH)
    await running.tokens([41])


async def finished_without_end(running):
    await running.tokens([40])
    await running.finished()


async def no_logprobs(running):
    await running.tokens([40])


async def no_such_token(running):
    await running.tokens([4_000_000_000])


@pytest.mark.parametrize(
    "script",
    [too_many, unknown_choice, tokens_after_the_last, finished_without_end, no_logprobs, no_such_token],
)
async def test_garbage_fails_the_request_and_no_other(script):
    async with ScriptedDecode(silent) as node, gateway(node) as rig:
        stream = Stream(rig)
        await stream.start("other", text="x")
        await stream.next()
        node.script = script
        sampling = {"max_tokens": 4}
        if script is no_logprobs:
            sampling["logprobs"] = 1
        await stream.start("a", text="x", sampling=sampling)
        error = failure((await stream.until_end("a"))[-1])
        assert (error.code, error.reason) in [
            (grpc.StatusCode.INTERNAL, "BAD_PEER"),
            (grpc.StatusCode.INTERNAL, "BAD_TOKENS"),
        ]
        node.script = saying(await rig.encode("fine"))
        await stream.start("b", text="x")
        assert text_of([e for e in await stream.until_end("b") if e.id == "b"]) == "fine"
        await stream.cancel("other")
        await stream.until_end("other")
        await rig.idle()


async def test_tokens_of_an_unknown_request_are_answered_with_a_cancel():
    async def script(running):
        delta = decode_pb2.TokenDelta(request=999, token_ids=[1])
        await running.send(decode_pb2.StepEvents(tokens=[delta]))
        await running.tokens([40], finish=LENGTH)
        await running.finished()

    async with ScriptedDecode(script) as node, gateway(node) as rig:
        stream = Stream(rig)
        await stream.start(text="x")
        assert (await stream.until_end())[-1].HasField("finished")
        await until(lambda: node.cancels)
        await asyncio.sleep(0.05)  # a second one would follow at once
        assert node.cancels == [999]


async def test_prompts_of_text_fail_without_a_tokenizer():
    port = free_port()
    async with ScriptedDecode(saying([40, 41])) as node:
        async with tokenizer(port) as address:
            rig_context = gateway(node, tokenizer_address=address, resume_wait_seconds=0.5)
            rig = await rig_context.__aenter__()
            stream = Stream(rig)
            await stream.start(text="x")
            assert (await stream.until_end())[-1].HasField("finished")
        try:
            await stream.start("b", text="x")
            error = failure((await stream.until_end("b"))[-1])
            assert (error.code, error.reason) == (grpc.StatusCode.UNAVAILABLE, "TOKENIZER_UNAVAILABLE")
            await stream.start("t", tokens={"token_ids": [1]})
            assert (await stream.until_end("t"))[-1].HasField("finished")
            await rig.idle()
            async with tokenizer(port):
                assert await rig.node.gateway.wait_until_usable(30)
                await stream.start("c", text="x")
                assert (await stream.until_end("c"))[-1].HasField("finished")
        finally:
            await rig_context.__aexit__(None, None, None)


async def test_tokens_without_any_tokenizer_ever():
    """Their answer would have no text."""
    nowhere = f"127.0.0.1:{free_port()}"
    tokenizers = TokenizerClient(0.3)
    tokenizers.add(nowhere)
    with pytest.raises(BatonError) as error:
        await tokenizers.ready(10.0)
    assert error.value.reason == "TOKENIZER_UNAVAILABLE"
    await tokenizers.close()


async def test_a_tokenizer_with_another_vocabulary_is_not_used(tmp_path):
    shutil.copytree(model_path(), tmp_path, dirs_exist_ok=True)
    content = json.loads((tmp_path / "tokenizer.json").read_text())
    content["added_tokens"][1]["special"] = False
    (tmp_path / "tokenizer.json").write_text(json.dumps(content))
    async with tokenizer() as first, tokenizer(model=str(tmp_path)) as other:
        tokenizers = TokenizerClient(1.0)
        tokenizers.add(first)
        await until(lambda: tokenizers.connected)
        vocabulary = await tokenizers.ready(1.0)
        tokenizers.add(other)
        await until(lambda: "another vocabulary" in tokenizers.nodes[other].trouble.message)
        assert tokenizers.vocabulary is vocabulary and not tokenizers.nodes[other].connected
        tokenizers.remove(first)  # then the other one's is taken
        await until(lambda: tokenizers.nodes[other].connected)
        assert (await tokenizers.ready(1.0)).hash != vocabulary.hash
        await tokenizers.close()


async def test_a_node_with_another_model_is_not_used():
    other = ScriptedDecode(silent, fingerprint="other")
    async with ScriptedDecode(silent) as node, gateway(node) as rig, other:
        gateway_ = rig.node.gateway
        gateway_._accept(await node.GetInfo(None, None))
        with pytest.raises(Exception, match="another model"):
            gateway_._accept(await other.GetInfo(None, None))


async def test_drain_finishes_what_runs_and_takes_nothing_new():
    async with ScriptedDecode(silent) as node, gateway(node) as rig:
        node.script = saying(*([id] for id in await rig.encode("one two three")), pause=0.3)
        stream = Stream(rig)
        await stream.start(text="x")
        await stream.next()
        draining = asyncio.create_task(rig.node.drain(30))
        await asyncio.sleep(0)
        await stream.start("b", text="x")
        assert failure((await stream.until_end("b"))[-1]).reason == "DRAINING"
        assert text_of([event for event in await stream.until_end() if event.id == "a"])
        assert await draining == 0


async def test_stop_fails_what_still_runs():
    async with ScriptedDecode(silent) as node, gateway(node) as rig:
        stream = Stream(rig)
        await stream.start(text="x")
        await stream.next()
        await rig.node.stop()
        assert failure(await stream.next()).code is grpc.StatusCode.UNAVAILABLE
