"""Inference.Generate as proto/baton/v1/inference.proto says, against a real tokenizer."""

import asyncio

import grpc
import pytest
from gateway_rig import Stream, gateway, ids_of, kinds_of, text_of, until
from scripted_decode import LENGTH, STOP, ScriptedDecode, endless, saying, silent

from baton.rpc.errors import from_status
from baton.v1 import common_pb2, inference_pb2, tokenizer_pb2

TEXT = "Hello wörld, here is a list of words."


def chat(*contents: str) -> tokenizer_pb2.ChatPrompt:
    return tokenizer_pb2.ChatPrompt(
        messages=[tokenizer_pb2.ChatMessage(role="user", content=content) for content in contents]
    )


def failure(event):
    assert event.WhichOneof("kind") == "failed", event
    return from_status(event.failed)


async def say(rig, node, text=TEXT, **how):
    ids = await rig.encode(text)
    node.script = saying(*([id] for id in ids), **how)
    return ids


async def test_text_in_tokens_out():
    async with ScriptedDecode(silent) as node, gateway(node) as rig:
        ids = await say(rig, node, cached=1)
        stream = Stream(rig)
        await stream.start(text="The prompt", sampling={"seed": 7, "max_tokens": 50})
        events = await stream.until_end()
        assert kinds_of(events) == ["accepted", "delta", "finished"]
        assert text_of(events) == TEXT
        assert ids_of(events) == ids
        accepted, finished = events[0].accepted, events[-1].finished
        assert accepted.seed == 7 and accepted.prompt_tokens == len(node.starts[0].token_ids)
        assert finished.usage.output_tokens == len(ids) and finished.usage.cached_tokens == 1
        assert finished.decode_address == node.address
        assert 0 < finished.ttft_us <= finished.total_us
        await rig.idle()


async def test_defaults_seed_and_max_tokens():
    async with ScriptedDecode(silent) as node, gateway(node, prefill=("p:1", "p:2")) as rig:
        await say(rig, node)
        stream = Stream(rig)
        seeds = set()
        for id in "ab":
            await stream.start(id, tokens={"token_ids": [1, 2, 3]})
            seeds.add((await stream.until_end(id))[0].accepted.seed)
        sent = node.starts[0]
        assert len(seeds) == 2 and sent.sampling.seed in seeds
        assert sent.sampling.max_tokens == 256 - 3  # what the context still holds
        assert sorted(sent.prefill) == ["p:1", "p:2"] and sent.prefill != node.starts[1].prefill
        assert 0 < sent.timeout_ms <= 600_000


async def test_stop_string_across_tokens_ends_the_request_and_cancels():
    async with ScriptedDecode(silent) as node, gateway(node) as rig:
        ids = await rig.encode("one two three four")
        before = len(await rig.encode("one two"))
        node.script = saying(*([id] for id in ids), pause=0.02)
        stream = Stream(rig)
        await stream.start(text="x", sampling={"stop": ["o th", "never"]})
        events = await stream.until_end()
        assert text_of(events) == "one tw"
        last = next(event.delta for event in reversed(events) if event.HasField("delta"))
        assert (last.finish_reason, last.stop_matched) == (STOP, "o th")
        used = events[-1].finished.usage.output_tokens
        assert before < used < len(ids) and ids_of(events) == ids[:used]
        assert not node.starts[0].sampling.stop  # decode nodes know no text
        await rig.idle()
        await until(lambda: node.cancels)
        await asyncio.sleep(0.05)  # a second one would follow at once
        assert node.cancels == [node.starts[0].request]


async def test_several_tokens_in_one_message_stop_at_the_right_one():
    async with ScriptedDecode(silent) as node, gateway(node) as rig:
        ids = await rig.encode("one two three four")
        node.script = saying(ids)
        stream = Stream(rig)
        await stream.start(text="x", sampling={"stop": ["o th"]})
        events = await stream.until_end()
        assert text_of(events) == "one tw"
        assert len(ids_of(events)) == events[-1].finished.usage.output_tokens < len(ids)


async def test_the_token_that_ended_the_output_has_no_text():
    async with ScriptedDecode(silent) as node, gateway(node) as rig:
        ids = await say(rig, node, "one two", finish=STOP)
        stream = Stream(rig)
        await stream.start(text="x", sampling={"stop_token_ids": [ids[-1]]})
        events = await stream.until_end()
        assert ids_of(events) == ids
        assert "one two".startswith(text_of(events)) and text_of(events) != "one two"


async def test_n_choices_one_stopped_early_by_text():
    async with ScriptedDecode(silent) as node, gateway(node) as rig:
        short, long = await rig.encode("a STOP b"), await rig.encode("a b c d e f g h i j k l m n o p")

        async def script(running):
            await running.prompt()
            for position in range(max(len(short), len(long))):
                for choice, ids in enumerate((short, long)):
                    if position < len(ids):
                        finish = LENGTH if position == len(ids) - 1 else 0
                        await running.tokens([ids[position]], choice=choice, finish=finish)
            await running.finished()

        node.script = script
        stream = Stream(rig)
        await stream.start(text="x", n=2, sampling={"stop": ["STOP"]})
        events = await stream.until_end()
        assert text_of(events, 0) == "a " and text_of(events, 1) == "a b c d e f g h i j k l m n o p"
        assert events[-1].finished.usage.output_tokens < len(short) + len(long)


async def test_logprobs_carry_the_tokens_own_bytes():
    def at(*ids):
        entries = [common_pb2.TokenLogprob(token_id=id, logprob=-0.5) for id in ids]
        return common_pb2.PositionLogprobs(chosen=entries[0], top=entries)

    async with ScriptedDecode(silent) as node, gateway(node) as rig:
        ids = await rig.encode("ö b")

        async def script(running):
            first = common_pb2.PositionLogprobs()
            await running.prompt(logprobs=[first, at(ids[0])])
            await running.tokens(ids, logprobs=[at(id) for id in ids], finish=LENGTH)
            await running.finished()

        node.script = script
        stream = Stream(rig)
        await stream.start(tokens={"token_ids": [5, ids[0]]}, sampling={"logprobs": 1, "prompt_logprobs": 1})
        deltas = [event.delta for event in await stream.until_end() if event.HasField("delta")]
        chosen = [position.chosen for delta in deltas for position in delta.logprobs]
        assert b"".join(entry.token_bytes for entry in chosen) == "ö b".encode()
        prompt = deltas[0].prompt_logprobs
        assert len(prompt) == 2 and not prompt[0].HasField("chosen")
        assert prompt[1].chosen.token_bytes == chosen[0].token_bytes


@pytest.mark.parametrize("how", ["cancel", "leave", "deadline"])
async def test_who_stops_waiting_frees_everything(how):
    async with ScriptedDecode(endless) as node, gateway(node) as rig:
        stream = Stream(rig)
        timeout = {"timeout_ms": 1000} if how == "deadline" else {}
        await stream.start(text="x", sampling={"max_tokens": 250}, **timeout)
        assert (await stream.next()).WhichOneof("kind") == "accepted"
        assert (await stream.next()).WhichOneof("kind") == "delta"
        if how == "leave":
            stream.call.cancel()
        else:
            if how == "cancel":
                await stream.cancel()
            code = failure((await stream.until_end())[-1]).code
            expected = grpc.StatusCode.CANCELLED if how == "cancel" else grpc.StatusCode.DEADLINE_EXCEEDED
            assert code is expected
            # ... and nothing comes after the terminal event but the next request's.
            await say(rig, node)
            await stream.start("b", text="x")
            assert {event.id for event in await stream.until_end("b")} == {"b"}
        await rig.idle()
        await until(lambda: not node.running)
        assert node.cancels == [node.starts[0].request]


async def test_cancel_before_the_first_token():
    async with ScriptedDecode(silent) as node, gateway(node) as rig:
        stream = Stream(rig)
        await stream.start(text="x")
        assert (await stream.next()).WhichOneof("kind") == "accepted"
        await stream.cancel()
        assert failure(await stream.next()).code is grpc.StatusCode.CANCELLED
        await rig.idle()


async def test_half_closed_stream_is_answered_to_its_end():
    async with ScriptedDecode(silent) as node, gateway(node) as rig:
        await say(rig, node, pause=0.01)
        stream = Stream(rig)
        await stream.start("a", text="x")
        await stream.start("b", text="y")
        await stream.call.done_writing()
        ended = set()
        while (event := await stream.next()) is not grpc.aio.EOF:
            if event.WhichOneof("kind") == "finished":
                ended.add(event.id)
        assert ended == {"a", "b"}
        assert await stream.call.code() is grpc.StatusCode.OK


async def test_unattributable_messages_are_rejected_and_end_nothing():
    async with ScriptedDecode(silent) as node, gateway(node) as rig:
        stream = Stream(rig)
        await stream.start("a", text="x")
        assert (await stream.next()).WhichOneof("kind") == "accepted"
        await stream.start("a", text="again")
        await stream.cancel("nobody")
        await stream.call.write(inference_pb2.GenerateRequest())
        await stream.start("", text="x")
        await stream.start("i" * 129, text="x")
        rejected = [(await stream.next()).rejected for _ in range(5)]
        assert [each.message for each in rejected] == [1, 2, 3, 4, 5]
        errors = [from_status(each.status) for each in rejected]
        assert [error.reason for error in errors[:3]] == ["ID_IN_USE", "UNKNOWN_ID", "EMPTY_MESSAGE"]
        assert [error.field for error in errors[3:]] == ["start.id", "start.id"]
        await stream.cancel("a")
        assert failure(await stream.next()).code is grpc.StatusCode.CANCELLED
        await say(rig, node)
        await stream.start("a", text="the id is free again")
        assert (await stream.until_end("a"))[-1].HasField("finished")


NAN = float("nan")
TOOLS = {"messages": [{"role": "user", "content": "x"}], "tools": [{"name": "f"}]}
CONTINUED = {"messages": [{"role": "assistant", "content": "x"}], "continue_final_message": True}
BAD = [
    ({}, "prompt"),
    ({"tokens": {}}, "tokens.token_ids"),
    ({"tokens": {"token_ids": [1, 8192]}}, "tokens.token_ids[1]"),
    ({"tokens": {"token_ids": [1] * 256}}, "tokens.token_ids"),
    ({"text": "word " * 300}, "text"),
    ({"chat": chat()}, "chat.messages"),
    (
        {"chat": {"messages": [{"role": "wizard", "content": "x"}]}},
        "chat.messages[0].role",
    ),
    ({"text": "x", "model": "other"}, "model"),
    ({"text": "x", "n": 0}, "n"),
    ({"text": "x", "n": 17}, "n"),
    ({"text": "x", "priority": 101}, "priority"),
    ({"text": "x", "timeout_ms": 0}, "timeout_ms"),
    ({"text": "x", "timeout_ms": 10**9}, "timeout_ms"),
    ({"text": "x", "session": "s", "n": 2}, "n"),
    ({"chat": CONTINUED, "session": "s"}, "chat.continue_final_message"),
    ({"chat": {**TOOLS, "tool_choice": {"mode": 3}}, "raw_output": True}, "raw_output"),
    ({"chat": {**TOOLS, "parallel_tool_calls": False}, "raw_output": True}, "raw_output"),
    ({"chat": {**TOOLS, "tools": [{"name": "f", "strict": True}]}, "raw_output": True}, "raw_output"),
    ({"text": "x", "sampling": {"temperature": -1}}, "sampling.temperature"),
    ({"text": "x", "sampling": {"temperature": NAN}}, "sampling.temperature"),
    ({"text": "x", "sampling": {"top_p": 0}}, "sampling.top_p"),
    ({"text": "x", "sampling": {"top_p": 2}}, "sampling.top_p"),
    ({"text": "x", "sampling": {"max_tokens": 0}}, "sampling.max_tokens"),
    ({"text": "x", "sampling": {"max_tokens": -5}}, "sampling.max_tokens"),
    ({"text": "x", "sampling": {"max_tokens": 2**40}}, "sampling.max_tokens"),
    ({"text": "x", "sampling": {"max_tokens": 256}}, "sampling.max_tokens"),
    ({"text": "x", "sampling": {"min_tokens": 9, "max_tokens": 8}}, "sampling.min_tokens"),
    ({"text": "x", "sampling": {"stop": [""]}}, "sampling.stop[0]"),
    ({"text": "x", "sampling": {"logit_bias": {9000: 1}}}, "sampling.logit_bias[9000]"),
    ({"text": "x", "sampling": {"logprobs": 21}}, "sampling.logprobs"),
]


async def test_bad_input_names_the_field_and_the_stream_goes_on():
    async with ScriptedDecode(silent) as node, gateway(node) as rig:
        stream = Stream(rig)
        for fields, field in BAD:
            await stream.start(**fields)
            events = await stream.until_end()
            error = failure(events[0])
            assert error.field == field, (fields, error)
            assert error.code in (grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.NOT_FOUND)
        assert node.starts == []  # refused before any work
        await say(rig, node)
        await stream.start(text="x")
        assert (await stream.until_end())[-1].HasField("finished")
        await rig.idle()


async def test_an_absurd_message_fails_its_call_and_not_the_connection():
    async with ScriptedDecode(silent) as node, gateway(node, max_message_bytes=2**20) as rig:
        await say(rig, node)
        other = Stream(rig)
        await other.start(text="x")
        await other.until_end()
        stream = Stream(rig)
        with pytest.raises(grpc.aio.AioRpcError) as error:
            await stream.start(text="x" * (8 * 2**20))
            await stream.next()
            raise await _ending(stream.call)
        assert error.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        await other.start(text="the connection lives")
        assert (await other.until_end())[-1].HasField("finished")


async def _ending(call):
    metadata = grpc.aio.Metadata()
    return grpc.aio.AioRpcError(await call.code(), metadata, metadata, await call.details())


async def test_too_many_requests():
    async with ScriptedDecode(silent) as node, gateway(node, max_requests=2) as rig:
        stream = Stream(rig)
        for id in "abc":
            await stream.start(id, text="x")
        error = failure((await stream.until_end("c"))[-1])
        assert (error.code, error.reason) == (grpc.StatusCode.RESOURCE_EXHAUSTED, "TOO_MANY_REQUESTS")
        assert error.retry_after_ms


async def test_a_client_that_does_not_read_holds_up_nobody():
    entry = common_pb2.PositionLogprobs(
        top=[common_pb2.TokenLogprob(token_id=id, logprob=-1) for id in range(40, 60)],
        chosen=common_pb2.TokenLogprob(token_id=40, logprob=-1),
    )

    async def much(running):
        await running.prompt()
        for _ in range(4):
            await running.tokens([40] * 50, logprobs=[entry] * 50)
        await running.tokens([40] * 50, logprobs=[entry] * 50, finish=LENGTH)
        await running.finished()

    async with ScriptedDecode(much) as node, gateway(node) as rig:
        slow = Stream(rig)
        for number in range(40):  # about 4 MB of answers: far more than flow control lets through unread
            await slow.start(str(number), text="x", sampling={"max_tokens": 250, "logprobs": 20})
        await until(lambda: len(node.starts) == 40 and not node.running)
        await say(rig, node)
        quick = Stream(rig)
        await quick.start(text="x")
        assert text_of(await quick.until_end()) == TEXT
        await rig.idle()  # its requests have ended, and hold nothing but their logs
        # It gets everything once it reads: in fewer, larger messages.
        events = []
        while sum(event.WhichOneof("kind") == "finished" for event in events) < 40:
            events.append(await slow.next())
        for number in range(40):
            assert len(ids_of([event for event in events if event.id == str(number)])) == 250


async def test_text_session_continues_the_token_sequence():
    async with ScriptedDecode(silent) as a, ScriptedDecode(silent) as b, gateway(a, b) as rig:
        stream = Stream(rig)
        ids = await rig.encode(" one two")
        a.script = b.script = saying(ids)
        await stream.start("1", text="First.", session="s")
        await stream.until_end("1")
        first = (a.starts or b.starts)[0]
        await stream.start("2", text=" Then.", session="s")
        await stream.until_end("2")
        stayed = a if a.starts else b
        assert len(stayed.starts) == 2  # where its pages are
        second = list(stayed.starts[1].token_ids)
        assert second == [*first.token_ids, *ids, *await rig.encode(" Then.")]


async def test_chat_session_renders_the_conversation_and_reuses_its_tokens():
    async with ScriptedDecode(silent) as node, gateway(node) as rig:
        stream = Stream(rig)
        eos = (await rig.encode("<|im_end|>"))[-1:]
        ids = await rig.encode("Fine.")
        node.script = saying([*ids, *eos], finish=STOP)
        await stream.start("1", chat=chat("How are you?"), session="s")
        assert text_of(await stream.until_end("1")) == "Fine."
        await stream.start("2", chat=chat("Why?"), session="s")
        await stream.until_end("2")
        first, second = (list(start.token_ids) for start in node.starts)
        assert second[: len(first) + len(ids)] == [*first, *ids]
        # The same as one request with the whole conversation.
        whole = chat("How are you?", "Fine.", "Why?")
        whole.messages[1].role = "assistant"
        await stream.start("3", chat=whole)
        await stream.until_end("3")
        rendered = [
            (await rig.tokens.Decode(tokenizer_pb2.DecodeRequest(sequences=[{"token_ids": ids}])))
            for ids in (second, list(node.starts[2].token_ids))
        ]
        assert rendered[0] == rendered[1]


async def test_a_sessions_second_turn_waits_for_nobody():
    async with ScriptedDecode(silent) as node, gateway(node) as rig:
        stream = Stream(rig)
        await stream.start("1", text="x", session="s")
        await stream.next()
        await stream.start("2", text="y", session="s")
        assert failure((await stream.until_end("2"))[-1]).reason == "SESSION_BUSY"
        await stream.cancel("1")
        await stream.until_end("1")
        await say(rig, node)
        await stream.start("3", text="z", session="s")
        assert (await stream.until_end("3"))[-1].HasField("finished")
        assert list(node.starts[-1].token_ids) == await rig.encode("z")  # the cancelled turn left no trace
