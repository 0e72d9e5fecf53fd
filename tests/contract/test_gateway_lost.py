"""A request goes on at another gateway, with the ticket of the first and what its client has."""

import asyncio
import json
import random
import time
from contextlib import AsyncExitStack, asynccontextmanager
from types import SimpleNamespace

import httpx
import pytest
from gateway_rig import Stream, gateway, ids_of, text_of, tokenizer, until
from scripted_decode import LENGTH, ScriptedDecode, endless, silent
from test_inference_faults import failure
from test_resume import speaking

from baton.authentication.resume_ticket import TicketSeal
from baton.client import AsyncClient, BatonError, Client
from baton.config import DecodeConfig
from baton.rpc.channel import open_channel
from baton.rpc.node import run_node
from baton.v1 import common_pb2, decode_pb2, decode_pb2_grpc, inference_pb2, inference_pb2_grpc
from baton.worker.decode import kept_logs, server
from baton.worker.decode.server import DecodeNode
from baton.worker.process import WorkerProcess
from ports import free_port

OTHER = "TICKET_OF_OTHER_REQUEST"
SECRET, KEYS = "0123456789abcdef0123456789abcdef", ("key-of-one-0000000", "key-of-two-0000000")


@pytest.fixture
def files(tmp_path):
    secret, keys = tmp_path / "secret", tmp_path / "keys"
    secret.write_text(SECRET)
    keys.write_text("\n".join(KEYS))
    for each in (secret, keys):
        each.chmod(0o600)
    return {"cluster_secret_file": str(secret), "api_keys": str(keys)}


@asynccontextmanager
async def gateways(files, *of_each):
    """Gateways of one deployment, each with decode nodes."""
    async with tokenizer() as address:
        made = [gateway(*nodes, tokenizer_address=address, **files) for nodes in of_each]
        async with made[0] as one, made[1] as two:
            yield one, two


@asynccontextmanager
async def client(rig, key=KEYS[0]):
    async with open_channel(rig.node.address, metadata=(("authorization", f"Bearer {key}"),)) as channel:
        yield Stream(SimpleNamespace(stub=inference_pb2_grpc.InferenceStub(channel)))


def request(**sampling):
    given = common_pb2.SamplingParams(max_tokens=50, **sampling)
    return inference_pb2.GenerateStart(id="a", text="x", sampling=given)


async def begun(rig, start, pause=0.3):
    """The events of a request until none comes for `pause`."""
    async with client(rig) as stream:
        await stream.call.write(inference_pb2.GenerateRequest(start=start))
        events = [await stream.next()]
        while True:
            try:
                events.append(await asyncio.wait_for(stream.call.read(), pause))
            except TimeoutError:
                return events


def going_on(start, events):
    """A client with these events wants the rest."""
    message = inference_pb2.GenerateResume(start=start, ticket=events[0].accepted.resume_ticket)
    for choice in range(start.n or 1):
        deltas = [event.delta for event in events if event.delta.choice == choice]
        message.choices.add(
            token_ids=[id for delta in deltas for id in delta.token_ids],
            text_characters=sum(len(delta.text) for delta in deltas),
            finish_reason=max((delta.finish_reason for delta in deltas), default=0),
        )
    return message


async def answer(rig, message, key=KEYS[0]):
    async with client(rig, key) as stream:
        kind = "start" if isinstance(message, inference_pb2.GenerateStart) else "resume"
        await stream.call.write(inference_pb2.GenerateRequest(**{kind: message}))
        return await stream.until_end()


def said(events, choice):
    """All that a client has of a choice."""
    deltas = [event.delta for event in events if event.delta.choice == choice and event.HasField("delta")]
    logprobs = [entry.chosen.logprob for delta in deltas for entry in delta.logprobs]
    ends = [(delta.finish_reason, delta.stop_matched) for delta in deltas if delta.finish_reason]
    return text_of(events, choice), ids_of(events, choice), logprobs, ends


async def test_another_gateway_goes_on_where_the_client_is(files):
    """Wherever that is: within a character, a stop string that is held back, at the end of a choice, of both.
    The script refuses to be asked for a token that was delivered."""
    async with ScriptedDecode(silent) as node, gateways(files, [node], [node]) as (one, two):
        outputs = [await one.encode("é STO — two"), await one.encode("ST STOP never")]
        start = request(stop=["STOP"], logprobs=0)
        start.n = 2
        node.script = speaking(outputs, logprobs=True)
        calm = await answer(one, start)
        assert [text_of(calm, choice) for choice in (0, 1)] == ["é STO — two", "ST "]
        for count in range(1, max(map(len, outputs)) + 1):
            give = [min(count, len(output)) for output in outputs]
            node.script = speaking(outputs, give=give, then=silent, logprobs=True)
            got = await begun(one, start)
            node.script = speaking(outputs, logprobs=True)
            rest = await answer(two, going_on(start, got))
            assert [said(got + rest, choice) for choice in (0, 1)] == [
                said(calm, choice) for choice in (0, 1)
            ]
            assert rest[0].accepted.seed == got[0].accepted.seed and rest[0].accepted.resume_ticket
            finished = rest[-1].finished
            assert finished.resumed == 1
            assert finished.usage.output_tokens == calm[-1].finished.usage.output_tokens
            await two.idle()


async def test_tickets_that_do_not_fit_are_refused(files):
    other_model = {"fingerprint": "other", "vocab_size": 4096}
    async with (
        ScriptedDecode(endless) as node,
        ScriptedDecode(endless, **other_model) as other,
        gateways(files, [node], [other]) as (one, two),
    ):
        start = request(seed=7)
        message = going_on(start, await begun(one, start))

        async def refused(rig=one, key=KEYS[0], **changed):
            wrong = inference_pb2.GenerateResume()
            wrong.CopyFrom(message)
            for name, value in changed.items():
                value(wrong) if callable(value) else setattr(wrong, name, value)
            starts = len(node.starts) + len(other.starts)
            error = failure((await answer(rig, wrong, key))[-1])
            assert len(node.starts) + len(other.starts) == starts, "no node was asked"
            return error.reason

        ticket = message.ticket
        middle = len(ticket) // 2
        assert await refused(ticket=ticket[:middle] + "A" + ticket[middle + 1 :]) == "INVALID_TICKET"
        assert await refused(ticket="") == await refused(ticket="x" * 2000) == "INVALID_TICKET"
        assert await refused(ticket="é") == "INVALID_TICKET"
        assert await refused(key=KEYS[1]) == "TICKET_OF_OTHER_KEY"
        assert await refused(rig=two) == "TICKET_OF_OTHER_MODEL"
        assert await refused(_=lambda wrong: setattr(wrong.start, "n", 2)) == OTHER
        assert await refused(_=lambda wrong: setattr(wrong.start, "text", "y")) == OTHER
        assert await refused(_=lambda wrong: setattr(wrong.start.sampling, "seed", 8)) == OTHER
        assert await refused(_=lambda wrong: setattr(wrong.start, "session", "s")) == "INVALID_FIELD"
        assert await refused(_=lambda wrong: setattr(wrong.start, "resume", False)) == "INVALID_FIELD"
        assert await refused(_=lambda wrong: wrong.choices.add()) == "INVALID_FIELD"
        assert await refused(_=lambda wrong: wrong.choices[0].token_ids.append(4096)) == "INVALID_FIELD"
        assert await refused(_=lambda wrong: wrong.choices[0].token_ids.extend([40] * 50)) == "INVALID_FIELD"
        assert (
            await refused(_=lambda wrong: setattr(wrong.choices[0], "finish_reason", 99)) == "INVALID_FIELD"
        )
        assert await refused(_=lambda wrong: wrong.choices[0].ClearField("token_ids")) == "RESUME_LOST"
        one.node.gateway.seal.now = lambda: time.time() + one.node.gateway.config.request_seconds + 1
        assert await refused() == "TICKET_EXPIRED"
        await one.idle()


async def test_a_ticket_of_another_deployment_is_none(files):
    seal, other = TicketSeal(SECRET), TicketSeal(SECRET + "x")
    async with ScriptedDecode(endless) as node, gateways(files, [node], [node]) as (one, _):
        start = request()
        message = going_on(start, await begun(one, start))
        key = one.node.authentication.api_key(f"Bearer {KEYS[0]}")
        opened = seal.open(message.ticket, key)
        assert opened.expires > time.time() and opened.resumed == 0
        message.ticket = other.seal(opened)
        assert failure((await answer(one, message))[-1]).reason == "INVALID_TICKET"


async def test_the_time_of_a_resumed_request_runs_on(files):
    async with ScriptedDecode(silent) as node, gateways(files, [node], [node]) as (one, two):
        start = request()
        start.timeout_ms = 2000
        node.script = speaking([[40, 41, 42]], give=(2,), then=silent)
        got = await begun(one, start, pause=1.0)
        node.script = silent
        start.timeout_ms = 60_000  # the ticket tells
        begin = time.monotonic()
        assert failure((await answer(two, going_on(start, got)))[-1]).reason == "DEADLINE_EXCEEDED"
        assert time.monotonic() - begin < 2.0


async def test_only_what_can_be_resumed_has_a_ticket(files):
    async with ScriptedDecode(speaking([[40, 41]])) as node, gateways(files, [node], [node]) as (one, _):
        for fields, resumable in (({}, True), ({"resume": False}, False), ({"session": "s"}, False)):
            start = inference_pb2.GenerateStart(id="a", text="x", **fields)
            accepted = (await answer(one, start))[0].accepted
            assert bool(accepted.resume_ticket) is resumable
    async with ScriptedDecode(speaking([[40, 41]])) as node, gateway(node) as rig:
        stream = Stream(rig)  # without a cluster secret
        await stream.start(text="x")
        assert not (await stream.until_end())[0].accepted.resume_ticket


@asynccontextmanager
async def one_that_ends(files, node):
    """Addresses of two gateways, and what ends the first."""
    async with tokenizer() as address, gateway(node, tokenizer_address=address, **files) as two:
        first = AsyncExitStack()
        files["drain_seconds"] = 0.01
        one = await first.enter_async_context(gateway(node, tokenizer_address=address, **files))
        try:
            yield [one.node.address, two.node.address], one.encode, first.aclose
        finally:
            await first.aclose()


def sse(response):
    """Events of a stream: their ids and what they say."""
    found = []
    for part in response.text.split("\n\n"):
        lines = dict(line.split(": ", 1) for line in part.splitlines() if line and not line.startswith(":"))
        if lines.get("data", "[DONE]") != "[DONE]":
            found.append((lines.get("id", ""), json.loads(lines["data"])))
    return found


def texts(found, n):
    told = [""] * n
    for _, event in found:
        for choice in event.get("choices", ()):
            told[choice["index"]] += (
                choice.get("text", "") or choice.get("delta", {}).get("content", "") or ""
            )
    return told


@pytest.mark.parametrize("path", ["completions", "chat/completions"])
async def test_a_stream_of_events_goes_on_at_another_gateway_after_any_event(files, path):
    chat = path != "completions"
    body = {"model": "scripted", "max_tokens": 50, "n": 2, "stream": True, "seed": 5, "stop": ["STOP"]}
    body |= {"messages": [{"role": "user", "content": "x"}], "logprobs": True} if chat else {"prompt": "x"}
    head = {"authorization": f"Bearer {KEYS[0]}"}
    async with (
        ScriptedDecode(silent) as node,
        gateways(files, [node], [node]) as (one, two),
        httpx.AsyncClient(timeout=60) as http,
    ):
        outputs = [await one.encode("é STO — two"), await one.encode("ST STOP never")]
        node.script = speaking(outputs, logprobs=chat)

        async def ask(rig, **more):
            return await http.post(f"{rig.http}/v1/{path}", json=body, headers=head | more)

        calm = await ask(one)
        assert node.starts[-1].keep_log
        told, whole = sse(calm), ["é STO — two", "ST "]
        assert texts(told, 2) == whole
        first = f"{told[0][1]['id']}"
        for cut in range(len(told)):
            # The decode node has gone on: a few tokens more than the client has.
            node.log = decode_pb2.DecodeLog()
            for choice, output in enumerate(outputs):
                known = output[: len(output) if cut > 6 else max(5, cut)]
                entries = [
                    common_pb2.PositionLogprobs(chosen={"token_id": token, "logprob": -at - choice / 10})
                    for at, token in enumerate(known)
                ]
                end = LENGTH if known == output else 0
                node.log.choices.add(token_ids=known, logprobs=entries if chat else (), finish_reason=end)
            position = next((id for id, _ in reversed(told[: cut + 1]) if id), "")
            ticket = calm.headers["x-baton-resume"]
            rest = await ask(two, **{"x-baton-resume": ticket, "last-event-id": position})
            assert rest.status_code == 200, rest.text
            found = sse(rest)
            had = told[: cut + 1] if position else []
            assert texts(had + found, 2) == whole, (cut, position)
            if chat:
                for choice in (0, 1):
                    entries = [
                        entry["logprob"]
                        for _, event in had + found
                        for each in event["choices"]
                        if each["index"] == choice and each["logprobs"]
                        for entry in each["logprobs"]["content"]
                    ]
                    assert entries == pytest.approx([-at - choice / 10 for at in range(len(entries))])
            ends = [each["index"] for _, e in had + found for each in e["choices"] if each["finish_reason"]]
            assert sorted(ends) == [0, 1]
            assert all(event["id"] == first for _, event in found)
        node.log = None  # no node has it any more
        lost = await ask(two, **{"x-baton-resume": ticket, "last-event-id": told[-1][0]})
        assert "RESUME_LOST" in lost.text or "are not known any more" in lost.text
        for wrong in ("1", "1.1.1.1.1", "9" * 500, "1.0.0.0.7,1.0.0.0.0", "é"):
            refused = await ask(two, **{"x-baton-resume": ticket, "last-event-id": wrong.encode()})
            assert refused.status_code == 400 and "last-event-id" in refused.text, refused.text
        body["stream"] = False
        assert (await ask(two, **{"x-baton-resume": ticket})).status_code == 400
        body["stream"] = True
        for wrong in ("wrong", "é"):
            assert (await ask(two, **{"x-baton-resume": wrong.encode()})).status_code == 400


OPTIONS = {"max_tokens": 50, "logprobs": 0, "stop": "STOP", "n": 2, "prompt_logprobs": 0}


async def test_the_client_goes_on_by_itself(files):
    async with (
        ScriptedDecode(silent) as node,
        one_that_ends(files, node) as (addresses, encode, end),
        AsyncClient(addresses, api_key=KEYS[0]) as client,
    ):
        outputs = [await encode("é STO — two"), await encode("ST STOP never")]
        node.script = speaking(outputs, logprobs=True)
        calm = await client.generate("x", **OPTIONS)
        node.script = speaking(outputs, give=(3, 3), then=silent, logprobs=True)
        async with client.stream("x", **OPTIONS) as stream:
            await anext(stream)
            node.script = speaking(outputs, logprobs=True)
            await end()
            answer = await stream.completion()
        assert answer.choices == calm.choices and answer.seed != calm.seed
        assert answer.stats.resumed == 1 and client.address == addresses[1]
        assert (await client.generate("x", **OPTIONS)).choices == calm.choices
        node.script = endless
        begun = client.stream("x")
        await anext(begun)
        await begun.aclose()
        with pytest.raises(BatonError) as refused:
            await client.generate("x", max_tokens=0)
        assert refused.value.reason == "INVALID_FIELD"


async def test_what_was_delivered_is_not_computed_again(files):
    """Tokens are others in each attempt, as those of a model whose logits depend on the batch may be."""
    said = []

    async def chance(running):
        said.append([*running.start.choices[0].token_ids] if running.start.choices else [])
        last = len(said) == 2
        await running.prompt()
        for at in range(len(said[-1]), 40):
            if at == 20 and not last:
                await silent(running)
            said[-1].append(random.randrange(40, 90))
            await running.tokens([said[-1][-1]], finish=LENGTH if at == 39 else 0)
        await running.finished()

    async with (
        ScriptedDecode(chance) as node,
        one_that_ends(files, node) as (addresses, _, end),
        AsyncClient(addresses, api_key=KEYS[0]) as client,
        client.stream("x", max_tokens=40) as stream,
    ):
        while len(stream.so_far.token_ids) < 20:
            await anext(stream)
        had, text = list(stream.so_far.token_ids), stream.so_far.text
        await end()
        answer = await stream.completion()
        assert had == said[0] and answer.token_ids == said[1] and said[1][:20] == said[0]
        assert answer.text.startswith(text) and answer.stats.resumed == 1


async def test_so_does_the_client_for_threads(files):
    async with (
        ScriptedDecode(silent) as node,
        one_that_ends(files, node) as (addresses, encode, end),
    ):
        outputs = [await encode("é STO — two"), await encode("ST STOP never")]
        node.script = speaking(outputs, give=(3, 3), then=silent, logprobs=True)
        with Client(addresses, api_key=KEYS[0]) as client:
            stream = client.stream("x", **OPTIONS)
            await asyncio.to_thread(next, stream)
            node.script = speaking(outputs, logprobs=True)
            await end()
            answer = await asyncio.to_thread(stream.completion)
            assert [choice.text for choice in answer.choices] == ["é STO — two", "ST "]
            assert answer.stats.resumed == 1 and client.address == addresses[1]


async def test_a_request_without_a_gateway_is_begun_at_the_next(files):
    nobody = f"127.0.0.1:{free_port()}"
    async with ScriptedDecode(speaking([[40, 41]])) as node, gateway(node) as rig:
        async with AsyncClient([nobody, rig.node.address]) as client:
            assert (await client.generate("x")).token_ids == [40, 41]
        with Client([nobody, rig.node.address]) as client:
            assert (await asyncio.to_thread(client.generate, "x")).token_ids == [40, 41]
        async with AsyncClient([nobody, nobody]) as client:
            with pytest.raises(BatonError) as lost:
                await client.generate("x")
            assert lost.value.reason == "UNAVAILABLE"
        node.script = speaking([[40, 41, 42]], give=(2,), then=silent)
        async with AsyncClient(rig.node.address) as client:  # without a ticket nothing goes on
            stream = client.stream("x")
            await anext(stream)
            await rig.node.gateway.stop()
            with pytest.raises(BatonError) as lost:
                await stream.completion()
            assert lost.value.reason == "STOPPING"


async def test_a_decode_node_that_has_nothing_to_do_forgets_what_nobody_takes(monkeypatch):
    monkeypatch.setattr(kept_logs, "KEEP_SECONDS", 0.5)
    monkeypatch.setattr(server, "LET_GO_SECONDS", 0.05)
    node = DecodeNode(DecodeConfig(http_port=0, kv_tokens=2048, threads=1, transports=("grpc",)))
    ready, stop = asyncio.Event(), asyncio.Event()
    task = asyncio.create_task(run_node(WorkerProcess(node), node.config, ready=ready, stop=stop))
    await asyncio.wait_for(ready.wait(), 60)
    try:
        async with open_channel(node._address) as channel, asyncio.timeout(30):
            call = decode_pb2_grpc.DecodeStub(channel).Generate()
            await call.write(decode_pb2.GenerateCommand(hello=decode_pb2.DecodeHello(incarnation=7)))
            start = decode_pb2.DecodeStart(request=1, token_ids=[5, 6, 7], keep_log=True)
            start.sampling.max_tokens = 3
            await call.write(decode_pb2.GenerateCommand(start=start))
            kinds = []
            while "finished" not in kinds:
                kinds += [event.WhichOneof("kind") for event in (await call.read()).events]
            call.cancel()
            await until(lambda: len(node.kept) == 1)
            await until(lambda: not len(node.kept))
    finally:
        stop.set()
        assert await asyncio.wait_for(task, 20) == 0
