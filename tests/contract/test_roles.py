"""A worker changes its role while it serves: real nodes in this process."""

from __future__ import annotations

import asyncio
import atexit
import os
import tempfile
from contextlib import asynccontextmanager
from pathlib import Path

import grpc
import pytest

from baton.config import DecodeConfig, PrefillConfig
from baton.rpc.channel import open_channel
from baton.rpc.errors import BatonError, from_rpc_error, from_status
from baton.rpc.node import run_node
from baton.v1 import (
    cache_pb2,
    cache_pb2_grpc,
    common_pb2,
    decode_pb2,
    decode_pb2_grpc,
    node_pb2,
    node_pb2_grpc,
    prefill_pb2,
    prefill_pb2_grpc,
)
from baton.worker.decode.server import DecodeNode
from baton.worker.prefill.server import PrefillNode
from baton.worker.process import WorkerProcess, config_of

pytestmark = pytest.mark.thorough

MADE = {"http_port": 0, "kv_tokens": 2048, "threads": 1, "model": "demo", "max_rows": 4}
MADE["step_cost"] = str(Path(tempfile.gettempdir()) / f"baton-roles-{os.getpid()}.step-cost")
atexit.register(Path(MADE["step_cost"]).unlink, missing_ok=True)
PROMPT = [*range(40, 104)]
"""Four pages."""


@asynccontextmanager
async def running(node):
    ready, stop, process = asyncio.Event(), asyncio.Event(), WorkerProcess(node)
    task = asyncio.create_task(run_node(process, node.config, ready=ready, stop=stop))
    await asyncio.wait_for(ready.wait(), 60)
    try:
        async with asyncio.timeout(60):
            yield process
    finally:
        stop.set()
        assert await asyncio.wait_for(task, 30) == 0


async def set_role(process, role, milliseconds=5000):
    async with open_channel(process.node._address) as channel:
        request = node_pb2.SetRoleRequest(role=role, timeout_ms=milliseconds)
        try:
            return await node_pb2_grpc.NodeStub(channel).SetRole(request)
        except grpc.aio.AioRpcError as error:
            raise from_rpc_error(error) from error


class Asker:
    """A caller of Decode.Generate."""

    def __init__(self, call):
        self.call = call

    async def start(self, number, tokens=12, prompt=PROMPT, **fields):
        sampling = common_pb2.SamplingParams(max_tokens=tokens, ignore_eos=True, temperature=0)
        start = decode_pb2.DecodeStart(request=number, token_ids=prompt, sampling=sampling, **fields)
        await self.call.write(decode_pb2.GenerateCommand(start=start))

    async def end(self):
        """Tokens and how the request ended."""
        found = []
        while True:
            message = await self.call.read()
            for delta in message.tokens:
                found += delta.token_ids
            for event in message.events:
                if event.WhichOneof("kind") == "finished":
                    return found, event.finished.stats
                if event.WhichOneof("kind") == "failed":
                    return found, from_status(event.failed)


@asynccontextmanager
async def asking(process, incarnation=7):
    async with open_channel(process.node._address) as channel:
        call = decode_pb2_grpc.DecodeStub(channel).Generate()
        await call.write(decode_pb2.GenerateCommand(hello=decode_pb2.DecodeHello(incarnation=incarnation)))
        assert (await call.read()).events[0].welcome.incarnation == process.node.incarnation
        yield Asker(call)


async def until(condition):
    async with asyncio.timeout(30):
        while not condition():  # noqa: ASYNC110 (nothing signals)
            await asyncio.sleep(0.005)


async def first_token(process, prompt=PROMPT):
    """What a prefill node says of a prompt."""
    async with open_channel(process.node._address) as channel:
        call = prefill_pb2_grpc.PrefillStub(channel).Run()
        await call.write(prefill_pb2.PrefillRequest(hello=prefill_pb2.PrefillHello(incarnation=9)))
        await call.read()
        attempt = common_pb2.Attempt(gateway=9, request=1)
        sampling = common_pb2.SamplingParams(max_tokens=4, temperature=0)
        start = prefill_pb2.PrefillStart(attempt=attempt, token_ids=prompt, sampling=sampling)
        start.keep_pages = False
        await call.write(prefill_pb2.PrefillRequest(start=start))
        while True:
            for event in (await call.read()).events:
                if event.WhichOneof("kind") == "first":
                    return event.first
                assert event.WhichOneof("kind") != "failed", event


async def test_what_is_cached_stays_in_the_new_role_and_back():
    """Steps go on counting: a receiver of an earlier promise waits for a number."""
    async with running(DecodeNode(DecodeConfig(**MADE))) as process:
        async with asking(process) as ask:
            await ask.start(1)
            tokens, _ = await ask.end()
        before, steps = process.node, process.node.core_or_none.scheduler.step_number
        answer = await set_role(process, "prefill")
        assert process.role == "prefill" and answer.incarnation == process.node.incarnation
        assert answer.incarnation != before.incarnation and answer.pause_ms < 2000
        async with open_channel(process.node._address) as channel:
            info = await node_pb2_grpc.NodeStub(channel).GetInfo(node_pb2.GetInfoRequest())
            assert (info.role, info.incarnation) == ("prefill", answer.incarnation)
            watch, stored = cache_pb2_grpc.CacheStub(channel).Watch(cache_pb2.WatchRequest()), 0
            while stored < 4:  # it is followed from the first watcher on
                update = await watch.read()
                assert (update.role, update.incarnation) == ("prefill", answer.incarnation)
                stored += len(update.stored)
            with pytest.raises(grpc.aio.AioRpcError, match="this node is a prefill node"):
                await decode_pb2_grpc.DecodeStub(channel).Generate().read()
        first = await first_token(process, [*PROMPT, *tokens[:4]])
        assert first.tokens[0].token_id == tokens[4] and first.cached_tokens == len(PROMPT)
        assert process.node.core_or_none.scheduler.step_number > steps
        await set_role(process, "decode")
        async with asking(process) as ask:
            await ask.start(1)
            again, stats = await ask.end()
        assert again == tokens and stats.cached_tokens == 48
        await asyncio.to_thread(process.node.check_idle)


@pytest.mark.parametrize("milliseconds", [0, 30_000])
async def test_what_runs_ends_within_its_time_or_is_handed_back(milliseconds):
    async with running(DecodeNode(DecodeConfig(**MADE))) as process, asking(process) as ask:
        await ask.start(1, tokens=300)
        assert (await ask.call.read()).tokens
        changing = asyncio.create_task(set_role(process, "prefill", milliseconds))
        _, end = await ask.end()
        answer = await changing
        if milliseconds:
            assert end.output_tokens == 300 and answer.handed_back == 0
        else:
            assert end.reason == "DRAINING" and answer.handed_back == 1
        assert process.role == "prefill"


async def test_a_prefill_node_hands_back_what_it_has_lent():
    """A lease, of a holder that does not release."""
    async with running(PrefillNode(PrefillConfig(**MADE))) as process:
        async with open_channel(process.node._address) as channel:
            call = prefill_pb2_grpc.PrefillStub(channel).Run()
            hello = prefill_pb2.PrefillHello(incarnation=9, layout=process.node.layout)
            await call.write(prefill_pb2.PrefillRequest(hello=hello))
            attempt = common_pb2.Attempt(gateway=9, request=1)
            start = prefill_pb2.PrefillStart(attempt=attempt, token_ids=PROMPT)
            await call.write(prefill_pb2.PrefillRequest(start=start))
            await until(lambda: process.node.load().leases)
            answer = await set_role(process, "decode", 50)
            assert answer.handed_back == 1 and answer.pause_ms < 2000
            kinds = []
            while (message := await call.read()) is not grpc.aio.EOF:
                kinds += [event.WhichOneof("kind") for event in message.events]
                failed = [each.failed for each in message.events if each.HasField("failed")]
                if failed:
                    assert from_status(failed[0]).reason == "DRAINING"
                    break
            assert kinds.count("failed") == 1
        async with asking(process) as ask:
            await ask.start(1)
            tokens, stats = await ask.end()
        assert len(tokens) == 12 and stats.cached_tokens == 48


async def test_one_change_at_a_time():
    async with running(DecodeNode(DecodeConfig(**MADE))) as process, asking(process) as ask:
        await ask.start(1, tokens=200)
        assert (await ask.call.read()).tokens
        changing = asyncio.create_task(set_role(process, "prefill", 30_000))
        await until(lambda: process.node.draining)
        for role in ("prefill", "decode"):
            with pytest.raises(BatonError, match="another change of role is under way") as raised:
                await set_role(process, role)
            assert raised.value.reason == "ROLE_CHANGING"
        await ask.end()
        answer = await changing
        assert (await set_role(process, "prefill", 0)).incarnation == answer.incarnation  # as it is


async def test_a_caller_that_leaves_does_not_end_a_change():
    async with running(DecodeNode(DecodeConfig(**MADE))) as process, asking(process) as ask:
        await ask.start(1, tokens=200)
        assert (await ask.call.read()).tokens
        changing = asyncio.create_task(set_role(process, "prefill", 30_000))
        await until(lambda: process.node.draining)
        changing.cancel()
        await asyncio.sleep(0.2)  # the node has noticed
        with pytest.raises(BatonError) as raised:
            await set_role(process, "prefill")
        assert raised.value.reason == "ROLE_CHANGING"
        _, stats = await ask.end()
        assert stats.output_tokens == 200
        await until(lambda: process.role == "prefill")


async def test_a_node_that_stops_gives_a_change_up():
    """The request runs on until it is handed back; nothing hangs."""
    async with running(DecodeNode(DecodeConfig(**MADE, drain_seconds=0))) as process, asking(process) as ask:
        await ask.start(1, tokens=1500)
        assert (await ask.call.read()).tokens
        changing = asyncio.create_task(set_role(process, "prefill", 1000))
        await until(lambda: process.node.draining)
    with pytest.raises(BatonError):
        await changing
    assert process.role == "decode"


async def test_a_copy_that_does_not_end_leaves_the_old_role(monkeypatch):
    monkeypatch.setattr("baton.worker.process.QUIET_SECONDS", 0.2)
    async with running(DecodeNode(DecodeConfig(**MADE))) as process:
        cache, block_tables = process.node.engine.cache, []
        process.node.steps.call(lambda core, now: block_tables.append(cache.hold(())))
        process.node.steps.call(lambda core, now: cache.extend(block_tables[0], 1))
        with pytest.raises(BatonError, match="stays a decode node") as raised:
            await set_role(process, "prefill")
        assert raised.value.reason == "STILL_BUSY"
        async with asking(process) as ask:
            await ask.start(1)
            assert len((await ask.end())[0]) == 12
        process.node.steps.call(lambda core, now: cache.release(block_tables[0], 0))
        await set_role(process, "prefill")


async def test_no_other_role():
    async with running(DecodeNode(DecodeConfig(**MADE))) as process:
        with pytest.raises(BatonError, match="role must be prefill or decode, not 'gateway'"):
            await set_role(process, "gateway")


def test_the_configuration_of_the_other_role():
    engine = PrefillConfig(**MADE, token_budget=96, max_leased_fraction=0.5)
    found = config_of(engine, DecodeConfig(port=3, fallback_tokens=9, draft="suffix"))
    assert found == DecodeConfig(**MADE, token_budget=96, fallback_tokens=9, draft="off")
    drafting = DecodeConfig(**MADE, draft="suffix", prefill=("a:1",))
    assert config_of(drafting, drafting) == drafting
    assert config_of(drafting, PrefillConfig(lease_grace_seconds=3)) == PrefillConfig(
        **MADE, lease_grace_seconds=3, draft="suffix"
    )
    filling = PrefillConfig(**MADE, draft="mtp")
    assert config_of(filling, PrefillConfig()) == filling, "also when it comes back to its first role"
    assert config_of(filling, DecodeConfig()).draft == "off"
