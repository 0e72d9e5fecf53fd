"""baton.client, sync and asyncio, against a gateway."""

import asyncio
import gc
import subprocess
import sys
import threading
import time

import grpc
import pytest
from gateway_rig import gateway, until
from scripted_decode import LENGTH, STOP, ScriptedDecode, endless, saying, silent

from baton.client import AsyncClient, BatonError, Client
from baton.client.messages import Collector
from baton.v1 import common_pb2


async def test_generate_as_a_whole():
    async with (
        ScriptedDecode(silent) as node,
        gateway(node) as rig,
        AsyncClient(rig.node.address) as client,
    ):
        ids = await rig.encode("one two three")
        node.script = saying(*([id] for id in ids), cached=2)
        answer = await client.generate("The prompt", max_tokens=20, seed=5, n=2)
        assert answer.text == "one two three" and answer.token_ids == ids
        assert [choice.text for choice in answer.choices] == ["one two three"] * 2
        assert answer.finish_reason == "length" and answer.seed == 5 and answer.request_id
        assert answer.usage.output_tokens == 2 * len(ids) and answer.usage.cached_tokens == 2
        assert answer.stats.decode_address == node.address and 0 < answer.stats.ttft <= answer.stats.total
        (model,) = await client.models()
        assert (model.name, model.context_length) == ("scripted", 256)


async def test_all_options_arrive():
    async with (
        ScriptedDecode(saying([40])) as node,
        gateway(node) as rig,
        AsyncClient(rig.node.address) as client,
    ):
        options = {
            "temperature": 0.5,
            "top_k": 3,
            "top_p": 0.5,
            "min_p": 0.25,
            "repetition_penalty": 1.5,
            "presence_penalty": 0.5,
            "frequency_penalty": -0.5,
            "seed": 2**63 + 1,
            "max_tokens": 9,
            "min_tokens": 1,
            "ignore_eos": True,
        }
        await client.generate(
            token_ids=[1, 2],
            **options,
            logit_bias={5: -1.0},
            stop_token_ids=[7],
            stop="x",
            priority=3,
            namespace="tenant",
            timeout=10,
        )
        start = node.starts[0]
        assert {name: getattr(start.sampling, name) for name in options} == options
        assert dict(start.sampling.logit_bias) == {5: -1.0} and list(start.sampling.stop_token_ids) == [7]
        assert start.priority == 3 and start.namespace == "tenant" and start.timeout_ms <= 10_000


async def test_stream_and_leave():
    async with (
        ScriptedDecode(endless) as node,
        gateway(node) as rig,
        AsyncClient(rig.node.address) as client,
    ):
        async with client.stream("x", max_tokens=250) as stream:
            async for _ in stream:
                if len(stream.so_far.token_ids) >= 3:
                    break
        await until(lambda: node.cancels)
        await rig.idle()
        task = asyncio.create_task(client.generate("x", max_tokens=250))
        await until(lambda: len(node.starts) == 2)
        task.cancel()
        await asyncio.wait({task})
        await until(lambda: len(node.cancels) == 2)
        await rig.idle()


async def test_errors_name_code_and_field():
    async with (
        ScriptedDecode(silent) as node,
        gateway(node) as rig,
        AsyncClient(rig.node.address) as client,
    ):
        for call, field in [
            (client.generate("x", temperature=-1), "sampling.temperature"),
            (client.generate("x", n=0), "n"),
            (client.generate("x", model="other"), "model"),
        ]:
            with pytest.raises(BatonError) as error:
                await call
            assert error.value.field == field
        with pytest.raises(BatonError) as error:
            client.stream("x", nonsense=1)
        assert error.value.field == "nonsense"
        with pytest.raises(BatonError) as error:
            client.stream("x", max_tokens=2**70)
        assert error.value.field == "max_tokens"
        with pytest.raises(BatonError) as error:
            client.stream("x", messages="y")
        with pytest.raises(BatonError) as error:
            await client.generate("x", timeout=0.1)
        assert error.value.code is grpc.StatusCode.DEADLINE_EXCEEDED
        await rig.idle()


async def test_no_gateway_there():
    async with AsyncClient("127.0.0.1:1") as client:
        with pytest.raises(BatonError) as error:
            await client.generate("x")
        assert error.value.code is grpc.StatusCode.UNAVAILABLE
    with Client("127.0.0.1:1") as sync, pytest.raises(BatonError) as error:
        sync.models()
    assert error.value.code is grpc.StatusCode.UNAVAILABLE


async def test_a_closed_client_says_so():
    async with AsyncClient("127.0.0.1:1") as client:
        pass
    with pytest.raises(BatonError, match="closed"):
        await client.generate("x")
    with pytest.raises(BatonError, match="closed"):
        await client.models()
    with Client("127.0.0.1:1") as sync:
        pass
    for call in (sync.models, sync.session, lambda: sync.generate("x"), lambda: sync.embed(["x"])):
        with pytest.raises(BatonError, match="closed"):
            call()


async def test_session_survives_a_turn_that_was_cancelled():
    async with (
        ScriptedDecode(silent) as node,
        gateway(node) as rig,
        AsyncClient(rig.node.address) as client,
    ):
        ids = await rig.encode(" Fine.")
        eos = await rig.encode("<|im_end|>")
        async with client.session() as session:
            node.script = saying([*ids, *eos[-1:]], finish=STOP)
            assert (await session.send(messages="How are you?")).text == " Fine."
            node.script = silent
            lost = asyncio.create_task(session.send(messages="Lost"))
            await until(lambda: len(node.starts) == 2)
            lost.cancel()
            await asyncio.wait({lost})
            async with session.stream(messages="Never begun"):
                pass
            with pytest.raises(BatonError) as error:
                await session.send(messages="x", n=2)
            assert error.value.field == "n"
            node.script = saying([*ids, *eos[-1:]], finish=STOP)
            assert (await session.send(messages="Why?")).text == " Fine."
        first, _, last = (list(start.token_ids) for start in node.starts)
        assert last[: len(first) + len(ids)] == [*first, *ids]  # as if the lost turns had never been


async def test_nothing_is_left_of_sessions_that_nobody_closed():
    """Each has a thread of gRPC's, which waits for what to send."""

    def use(address):
        with Client(address) as client:
            client.generate("x")  # the gateway, which runs here too, begins threads of its own
        before = set(threading.enumerate())

        def wait():
            deadline = time.monotonic() + 20
            for thread in set(threading.enumerate()) - before:
                thread.join(max(0, deadline - time.monotonic()))
            assert set(threading.enumerate()) <= before

        with Client(address) as client:
            for _ in range(3):
                client.session().send("x")
            kept = client.session()
            kept.send("x")
        wait()
        with Client(address) as client:
            client.session().send("x")
            gc.collect()
            wait()

    async with ScriptedDecode(saying([40])) as node, gateway(node) as rig:
        await asyncio.to_thread(use, rig.node.address)
        await rig.idle()


async def test_a_turn_that_is_not_read_to_its_end_loses_nothing_to_the_next():
    """The next one would pass over its events, the last one too."""

    def use(address):
        with Client(address) as client, client.session() as session:
            early = session.stream(messages="How are you?")
            read = next(early).text
            with pytest.raises(BatonError, match="earlier turn"):
                session.send(messages="Why?")
            assert read + "".join(delta.text for delta in early) == " Fine."
            assert session.send(messages="Why?").text == " Fine."

    async with ScriptedDecode(silent) as node, gateway(node) as rig, asyncio.timeout(60):
        ids, eos = await rig.encode(" Fine."), await rig.encode("<|im_end|>")
        node.script = saying(*([id] for id in ids[:-1]), [*ids[-1:], *eos[-1:]], finish=STOP)
        await asyncio.to_thread(use, rig.node.address)
        async with AsyncClient(rig.node.address) as client, client.session() as session:
            early = session.stream(messages="How are you?")
            read = (await anext(early)).text
            with pytest.raises(BatonError, match="earlier turn"):
                await session.send(messages="Why?")
            async for delta in early:
                read += delta.text
            assert read == " Fine."
            async for _ in session.stream(messages="Why?"):
                break  # nobody can read it any more
            await rig.idle()
            assert (await session.send(messages="Why?")).text == " Fine."


async def test_a_turn_that_is_interrupted_is_cancelled(monkeypatch):
    """An interactive Python keeps the traceback, and with it the turn's stream."""

    def interrupted(*_):
        raise KeyboardInterrupt

    def use(address):
        with Client(address) as client, client.session() as session:
            with monkeypatch.context() as patch:
                patch.setattr(Collector, "add", interrupted)
                with pytest.raises(KeyboardInterrupt) as caught:
                    session.send("x")
            assert caught.tb is not None
            assert session.send("x").finish_reason == "length"

    async with ScriptedDecode(saying([40])) as node, gateway(node) as rig, asyncio.timeout(60):
        await asyncio.to_thread(use, rig.node.address)


async def test_log_probabilities():
    async with (
        ScriptedDecode(silent) as node,
        gateway(node) as rig,
        AsyncClient(rig.node.address) as client,
    ):
        ids = await rig.encode("word")
        entries = [common_pb2.TokenLogprob(token_id=id, logprob=-1.5) for id in ids]
        positions = [common_pb2.PositionLogprobs(chosen=entry, top=[entry]) for entry in entries]

        async def script(running):
            await running.prompt()
            await running.tokens(ids, logprobs=positions, finish=LENGTH)
            await running.finished()

        node.script = script
        answer = await client.generate("x", logprobs=1)
        got = answer.choices[0].logprobs
        assert b"".join(each.chosen.token_bytes for each in got) == b"word"
        assert got[0].top[0].logprob == -1.5


async def test_sync_client():
    def use(address, node, ids, eos):
        with Client(address) as client:
            node.script = saying(*([id] for id in ids))
            assert client.generate("x").text == "one two three"
            assert "".join(delta.text for delta in client.stream("x")) == "one two three"
            assert client.models()[0].name == "scripted"
            with pytest.raises(BatonError) as error:
                client.generate("x", top_p=2)
            assert error.value.field == "sampling.top_p"
            with client.session() as session:
                node.script = saying([*ids, *eos], finish=STOP)
                session.send(messages="How are you?")
                node.script = silent
                with session.stream(messages="Lost"):
                    pass
                node.script = saying([*ids, *eos], finish=STOP)
                assert session.send(messages="Why?").text == "one two three"
            node.script = endless
            with client.stream("x", max_tokens=250) as stream:
                next(stream)
            for _ in client.stream("y", max_tokens=250):
                break  # the stream goes out of scope

    async with ScriptedDecode(silent) as node, gateway(node) as rig:
        ids, eos = await rig.encode("one two three"), await rig.encode("<|im_end|>")
        await asyncio.to_thread(use, rig.node.address, node, ids, eos[-1:])
        left = [start.request for start in node.starts[-2:]]
        await until(lambda: set(left) <= set(node.cancels))
        await rig.idle()


def test_importing_the_client_is_light():
    code = (
        "import sys, baton.client; "
        "heavy = {'torch', 'fastapi', 'transformers', 'numpy', 'uvicorn'} & set(sys.modules); "
        "assert not heavy, heavy"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=240)


async def test_a_busy_gateway_may_take_seconds_to_accept_a_connection():
    async with ScriptedDecode(saying([40])) as node, gateway(node) as rig:

        async def accept(reader, writer):
            await asyncio.sleep(2.5)
            behind = await asyncio.open_connection(*rig.node.address.split(":"))
            await asyncio.gather(_forward(reader, behind[1]), _forward(behind[0], writer))

        async with await asyncio.start_server(accept, "127.0.0.1", 0) as server:
            host, port = server.sockets[0].getsockname()
            async with AsyncClient(f"{host}:{port}") as client:
                assert (await client.generate(token_ids=[1, 2])).token_ids == [40]


async def _forward(reader, writer):
    while data := await reader.read(65536):
        writer.write(data)
    writer.close()
