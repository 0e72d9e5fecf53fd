"""A request goes on at another decode node, and with another tokenizer, without a lost or repeated token."""

import asyncio

import pytest
from gateway_rig import Stream, gateway, ids_of, text_of, tokenizer, until
from scripted_decode import LENGTH, ScriptedDecode, saying, silent
from test_inference_faults import failure

from baton.rpc.errors import exhausted, unavailable
from baton.v1 import common_pb2, decode_pb2
from ports import free_port


def speaking(outputs, *, give=(3, 2), then=None, pause=0.0, logprobs=False):
    """Goes on from what has been delivered with the tokens of `outputs`, one list a choice: `give` of each in
    this attempt, then `then`; without that to the end. An attempt samples no position that was delivered."""

    async def script(running):
        start = running.start
        n = start.n or 1
        chosen = list(start.choices) or [decode_pb2.DeliveredChoice()] * n
        if not start.choices:
            await running.prompt(cached=1)
        for choice in range(n):
            at = len(chosen[choice].token_ids)
            assert list(chosen[choice].token_ids) == outputs[choice][:at]
            if chosen[choice].finished:
                continue
            end = len(outputs[choice]) if then is None else at + give[choice]
            for position in range(at, end):
                token = outputs[choice][position]
                entry = common_pb2.TokenLogprob(token_id=token, logprob=-position - choice / 10)
                given = [common_pb2.PositionLogprobs(chosen=entry)] if logprobs else []
                last = position == len(outputs[choice]) - 1
                await running.tokens([token], choice=choice, finish=LENGTH if last else 0, logprobs=given)
                await asyncio.sleep(pause)
        if then is not None:
            await then(running)
            return
        await running.finished(cached_tokens=7)

    return script


async def begun(rig, first, second, stream, count, **fields):
    """Starts a request and waits until `count` tokens have come: who runs it, who does not, the events."""
    await stream.start(**fields)
    events = [await stream.next()]
    while sum(len(event.delta.token_ids) for event in events) < count:
        events.append(await stream.next())
    return (first, second, events) if first.running else (second, first, events)


async def test_a_lost_decode_node_is_replaced_in_mid_sentence():
    async with ScriptedDecode(silent) as a, ScriptedDecode(silent) as b, gateway(a, b) as rig:
        outputs = [await rig.encode("one — two STOP three"), await rig.encode("uno «dos» tres")]
        a.script = b.script = speaking(outputs, then=silent, logprobs=True)
        stream = Stream(rig)
        sampling = {"max_tokens": 50, "logprobs": 0}
        node, other, events = await begun(rig, a, b, stream, 5, text="x", n=2, sampling=sampling)
        other.script = speaking(outputs, logprobs=True)
        await node.die()
        events += await stream.until_end()
        assert [ids_of(events, choice) for choice in (0, 1)] == outputs
        assert text_of(events) == "one — two STOP three" and text_of(events, 1) == "uno «dos» tres"
        for choice in (0, 1):
            got = [p.chosen for e in events if e.delta.choice == choice for p in e.delta.logprobs]
            assert [entry.logprob for entry in got] == pytest.approx(
                [-position - choice / 10 for position in range(len(outputs[choice]))]
            )
            assert all(entry.token_bytes for entry in got)
        finished = events[-1].finished
        assert finished.resumed == 1 and finished.decode_address == other.address
        assert (
            finished.usage.output_tokens == sum(map(len, outputs)) and finished.usage.cached_tokens == 1
        )  # of the first attempt
        first, second = node.starts[0], other.starts[0]
        assert (first.attempt, second.attempt) == (0, 1)
        assert first.sampling == second.sampling and second.sampling.seed
        assert [event.WhichOneof("kind") for event in events].count("accepted") == 1
        assert rig.node.gateway.metrics.registry.get_sample_value("baton_gateway_resumes_total") == 1
        await rig.idle()


async def test_a_stop_string_across_a_resume_ends_the_choice_and_is_not_shown():
    async with ScriptedDecode(silent) as a, ScriptedDecode(silent) as b, gateway(a, b) as rig:
        outputs = [await rig.encode("abc STO"), await rig.encode("never STOP here")]
        outputs[0] += await rig.encode("P more")
        give = (len(await rig.encode("abc STO")), len(outputs[1]) - 1)
        a.script = b.script = speaking(outputs, give=give, then=silent)
        stream = Stream(rig)
        fields = {"text": "x", "n": 2, "sampling": {"max_tokens": 50, "stop": ["STOP"]}}
        node, other, events = await begun(rig, a, b, stream, give[0] + 2, **fields)
        while not any(event.delta.choice == 1 and event.delta.finish_reason for event in events):
            events.append(await stream.next())  # it ends by its stop string
        other.script = speaking(outputs)
        await node.die()
        events += await stream.until_end()
        assert text_of(events) == "abc " and text_of(events, 1) == "never "
        ends = {e.delta.choice: e.delta.stop_matched for e in events if e.delta.finish_reason}
        assert ends == {0: "STOP", 1: "STOP"}
        assert [choice.finished for choice in other.starts[0].choices] == [False, True]
        await rig.idle()


async def test_what_had_all_its_tokens_finishes_without_its_node():
    async def all_but_the_end(running):
        await running.prompt()
        await running.tokens([40, 41], finish=LENGTH)
        await silent(running)

    async with ScriptedDecode(all_but_the_end) as a, gateway(a) as rig:
        stream = Stream(rig)
        _, _, events = await begun(rig, a, a, stream, 2, text="x")
        await a.die()
        events += await stream.until_end()
        assert ids_of(events) == [40, 41] and events[-1].finished.resumed == 0


async def test_a_client_that_prefers_an_error_gets_it():
    async with ScriptedDecode(silent) as a, ScriptedDecode(silent) as b, gateway(a, b) as rig:
        a.script = b.script = speaking([[40, 41, 42, 43]], then=silent)
        stream = Stream(rig)
        node, other, _ = await begun(rig, a, b, stream, 3, text="x", resume=False)
        await node.die()
        error = failure((await stream.until_end())[-1])
        assert error.reason == "DECODE_LOST" and not other.starts
        await rig.idle()


async def test_resumes_are_limited():
    async def back(running):
        await running.failed(unavailable("the node failed", "NODE_FAILED"))

    async with (
        ScriptedDecode(silent) as a,
        ScriptedDecode(silent) as b,
        gateway(a, b, max_resumes=2) as rig,
    ):
        a.script = b.script = speaking([list(range(40, 60))], then=back)
        stream = Stream(rig)
        await stream.start(text="x")
        events = await stream.until_end()
        assert failure(events[-1]).reason == "TOO_MANY_RESUMES"
        got = ids_of(events)  # without those whose text was still to come
        assert 3 <= len(got) <= 9 and got == list(range(40, 49))[: len(got)]
        assert len(a.starts) + len(b.starts) == 3


@pytest.mark.parametrize("error", [unavailable("draining", "DRAINING"), exhausted("full", "QUEUE_FULL")])
async def test_with_output_a_refusal_is_waited_out(error):
    refusals = []

    async def refuse(running):
        refusals.append(running.start.attempt)
        await running.failed(error)

    async with ScriptedDecode(silent) as a, ScriptedDecode(refuse) as b, gateway(a, b) as rig:
        outputs = [list(range(40, 48))]
        a.script = speaking(outputs, then=silent)
        stream = Stream(rig)
        await begun(rig, a, a, stream, 3, text="x", sampling={"seed": 1})
        refusals.clear()
        await a.die()
        await until(lambda: len(refusals) > 3)
        b.script = speaking(outputs)
        events = await stream.until_end()
        assert ids_of(events) == outputs[0][3:] and events[-1].finished.resumed == 1


async def test_a_node_that_comes_back_takes_up_what_it_ran():
    async with ScriptedDecode(silent) as a, gateway(a, resume_wait_seconds=10.0) as rig:
        outputs = [list(range(40, 48))]
        a.script = speaking(outputs, then=silent)
        stream = Stream(rig)
        _, _, events = await begun(rig, a, a, stream, 3, text="x")
        port = int(a.address.rpartition(":")[2])
        await a.die()
        await stream.start("late", text="x")  # waits too, rather than fail
        a.script = speaking(outputs)
        await a.serve(port)
        late = await stream.until_end("late")
        events += late
        if not any(event.id == "a" and event.HasField("finished") for event in events):
            events += await stream.until_end()
        assert ids_of([event for event in events if event.id == "a"]) == outputs[0]
        assert ids_of([event for event in events if event.id == "late"]) == outputs[0]


async def test_without_any_node_a_request_ends_in_time_with_the_reason():
    async with ScriptedDecode(silent) as a, gateway(a, resume_wait_seconds=0.5) as rig:
        a.script = speaking([list(range(40, 48))], then=silent)
        stream = Stream(rig)
        await begun(rig, a, a, stream, 3, text="x")
        await a.die()
        error = failure((await stream.until_end())[-1])
        assert error.reason == "DECODE_LOST" and "0.5 s" in error.message
        await stream.start("b", text="x")
        assert failure((await stream.until_end("b"))[-1]).reason == "NO_DECODE_NODE"
        await stream.start("c", text="x", timeout_ms=100)
        assert failure((await stream.until_end("c"))[-1]).reason == "DEADLINE_EXCEEDED"
        await rig.idle()


async def test_a_silent_node_is_given_up_and_its_late_tokens_never_arrive():
    async with (
        ScriptedDecode(silent) as a,
        ScriptedDecode(silent) as b,
        gateway(a, b, silence_seconds=1.5) as rig,
    ):
        outputs = [list(range(40, 48))]
        talking: list[asyncio.Task[None]] = []

        async def talk_later(running):
            async def talk() -> None:
                """Not of the script: it does not hear that it has been cancelled."""
                await until(lambda: a.starts and b.starts)
                for token in outputs[0][3:6]:
                    await running.tokens([token])

            talking.append(asyncio.create_task(talk()))
            await silent(running)

        a.script = b.script = speaking(outputs, then=talk_later)
        stream = Stream(rig)
        node, other, events = await begun(rig, a, b, stream, 3, text="x")
        other.script = speaking(outputs, pause=0.05)
        node.mute = True
        events += await stream.until_end()
        await asyncio.gather(*talking)
        assert ids_of(events) == outputs[0] and events[-1].finished.resumed == 1
        assert node.cancels and events[-1].finished.decode_address == other.address
        await rig.idle()


async def test_a_draining_node_gets_nothing_new_and_keeps_what_it_runs():
    async with ScriptedDecode(silent) as a, ScriptedDecode(silent) as b, gateway(a, b) as rig:
        proceed = asyncio.Event()

        async def drains(running):
            event = decode_pb2.DecodeEvent(draining=decode_pb2.DecodeDraining())
            await running.send(decode_pb2.StepEvents(events=[event]))
            await proceed.wait()
            await running.tokens([43], finish=LENGTH)
            await running.finished()

        a.script = b.script = speaking([[40, 41, 42, 43]], then=drains)
        stream = Stream(rig)
        node, other, events = await begun(rig, a, b, stream, 3, text="x")
        other.script = saying([50])
        await until(lambda: not rig.node.gateway.nodes.decode[node.address].usable, 9)
        for number in range(3):
            await stream.start(str(number), text="x")
            events += await stream.until_end(str(number))
        proceed.set()
        events += await stream.until_end()
        assert len(node.starts) == 1 and len(other.starts) == 3
        assert ids_of([event for event in events if event.id == "a"]) == [40, 41, 42, 43]


async def test_running_streams_do_not_notice_that_the_tokenizer_is_gone():
    """In the middle of a character, of a stop string's beginning, and with log-probabilities due."""
    text = "é ∀x∈É «quoted» — and STOP"
    port = free_port()
    async with ScriptedDecode(silent) as node:
        async with tokenizer(port) as address:
            context = gateway(node, tokenizer_address=address)
            rig = await context.__aenter__()
            output = await rig.encode(text)
            node.script = speaking([output], pause=0.02, logprobs=True)
            stream = Stream(rig)
            sampling = {"max_tokens": 100, "logprobs": 0, "stop": ["STOP"]}
            _, _, events = await begun(rig, node, node, stream, 3, text="x", sampling=sampling)
        try:
            await until(lambda: not rig.node.gateway.tokenizer.connected, 9)
            await stream.start("b", text="y", sampling=sampling)  # encoded when the tokenizer is back
            await stream.start("c", tokens={"token_ids": [50, 51]}, sampling=sampling)  # is encoded already
            events += await stream.until_end()
            events += await stream.until_end("c")
            assert not any(event.id == "b" for event in events)
            async with tokenizer(port):
                events += await stream.until_end("b")
                for id in ("a", "b", "c"):
                    own = [event for event in events if event.id == id]
                    assert text_of(own) == text.removesuffix("STOP")
                    got = [p.chosen for e in own for p in e.delta.logprobs]
                    # The last token that begins in the text is " ST".
                    assert b"".join(entry.token_bytes for entry in got).decode() == text.removesuffix("OP")
                await rig.idle()
        finally:
            await context.__aexit__(None, None, None)


async def test_a_chat_that_comes_while_the_tokenizer_restarts_waits():
    port = free_port()
    async with ScriptedDecode(saying([40, 41])) as node:
        async with tokenizer(port) as address:
            context = gateway(node, tokenizer_address=address)
            rig = await context.__aenter__()
        try:
            await until(lambda: not rig.node.gateway.tokenizer.connected, 9)
            stream = Stream(rig)
            await stream.start(chat={"messages": [{"role": "user", "content": "hi"}]})
            await asyncio.sleep(0.3)
            async with tokenizer(port):
                events = await stream.until_end()
                assert ids_of(events) == [40, 41] and events[-1].HasField("finished"), events[-1]
                await rig.idle()
        finally:
            await context.__aexit__(None, None, None)


async def test_nodes_come_and_go():
    async with ScriptedDecode(silent) as a, ScriptedDecode(silent) as b, gateway(a) as rig:
        outputs = [list(range(40, 48))]
        a.script = speaking(outputs, then=silent)
        b.script = speaking(outputs)
        stream = Stream(rig)
        _, _, events = await begun(rig, a, a, stream, 3, text="x")
        nodes = rig.node.gateway.nodes
        nodes.add("decode", b.address)
        await until(lambda: nodes.decode[b.address].usable)
        nodes.remove("decode", a.address)
        events += await stream.until_end()
        assert ids_of(events) == outputs[0] and events[-1].finished.decode_address == b.address
