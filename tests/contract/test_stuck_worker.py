"""A worker whose step does not end: health says so, its callers leave, and it comes back."""

from __future__ import annotations

import asyncio
import threading
import time
from contextlib import asynccontextmanager

import grpc
import pytest
from gateway_rig import until

from baton.config import DecodeConfig, PrefillConfig
from baton.rpc.channel import open_channel
from baton.rpc.errors import from_rpc_error
from baton.rpc.node import run_node
from baton.v1 import common_pb2, decode_pb2, decode_pb2_grpc, node_pb2, node_pb2_grpc
from baton.worker.decode.server import DecodeNode
from baton.worker.prefill.server import PrefillNode
from baton.worker.process import WorkerProcess

pytestmark = pytest.mark.times

STUCK = 0.6
SLOW = 2 * STUCK
TOKENS = 4


class Wedge:
    """A runner whose steps take `seconds` more, and wait as long as it is shut: their launch, or (`device`)
    their end."""

    def __init__(self, runner, seconds: float = 0.0, device: bool = False) -> None:
        self._runner = runner
        self._seconds = seconds
        self._device = device
        self.open = threading.Event()
        self.open.set()

    def launch(self, plan):
        time.sleep(self._seconds)
        if not self._device:
            self.open.wait()
        return self._runner.launch(plan)

    def done(self, launched):
        return self._runner.done(launched) and (not self._device or self.open.is_set())

    def read(self, launched):
        if self._device:
            self.open.wait()
        return self._runner.read(launched)


@asynccontextmanager
async def running(role: str, stuck_seconds: float, step_seconds: float = 0.0, device: bool = False):
    """A worker and its wedge; with overlap where it is the device that hangs."""
    made = {"http_port": 0, "kv_tokens": 2048, "threads": 1, "transports": ("grpc",)}
    made |= {"stuck_seconds": stuck_seconds, "overlap": device}
    node = DecodeNode(DecodeConfig(**made)) if role == "decode" else PrefillNode(PrefillConfig(**made))
    ready, stop = asyncio.Event(), asyncio.Event()
    task = asyncio.create_task(run_node(WorkerProcess(node), node.config, ready=ready, stop=stop))
    await asyncio.wait_for(ready.wait(), 60)
    wedge = node.steps._pipeline._runner = Wedge(node.engine.runner, step_seconds, device)
    try:
        yield node, wedge
    finally:
        wedge.open.set()
        stop.set()
        assert await asyncio.wait_for(task, 20) == 0


@pytest.mark.parametrize(("role", "device"), [("decode", False), ("decode", True), ("prefill", False)])
async def test_a_stuck_step_thread_is_seen_and_forgiven(role, device):
    async with (
        running(role, STUCK, device=device) as (node, wedge),
        open_channel(node._address) as channel,
    ):
        about = node_pb2_grpc.NodeStub(channel)
        if role == "decode":
            await _decode_streams_end(channel, node, wedge)
        else:
            _begin_a_prompt(node, wedge)
        load = await about.GetLoad(node_pb2.GetLoadRequest(), timeout=30)
        assert [problem.reason for problem in load.problems if problem.stops_serving] == ["STEP_THREAD_STUCK"]
        assert load.step_age_ms >= 1000 * STUCK
        info = await about.GetInfo(node_pb2.GetInfoRequest(), timeout=30)
        assert await _health(info.http_address) == 503
        wedge.open.set()
        await until(lambda: node.steps.step_age < STUCK)
        async with asyncio.timeout(30):
            while await _health(info.http_address) != 200:  # noqa: ASYNC110
                await asyncio.sleep(0.05)
        assert not node.load().problems
        await until(lambda: not node.load().requests)
        node.check_idle()


async def test_steps_that_are_always_slow_are_not_stuck():
    """Longer than --stuck-seconds each; the node answers heartbeats all the while."""
    async with (
        running("decode", STUCK, step_seconds=SLOW) as (node, _),
        open_channel(node._address) as channel,
    ):
        call = await _opened(channel)
        await call.write(_start(1))
        kinds = []
        while "finished" not in kinds:
            message = await call.read()
            kinds = [event.WhichOneof("kind") for event in message.events]
            if message.tokens and "finished" not in kinds:  # the next step has just begun
                await call.write(decode_pb2.GenerateCommand(heartbeat=decode_pb2.DecodeHeartbeat()))
                async with asyncio.timeout(0.9 * SLOW):
                    assert await call.read() == decode_pb2.StepEvents()
                assert node.load().problems == []


async def _decode_streams_end(channel, node, wedge) -> None:
    call = await _opened(channel)
    await call.write(_start(1))  # of the first step of all more is forgiven
    while not any(event.WhichOneof("kind") == "finished" for event in (await call.read()).events):
        pass
    wedge.open.clear()
    await call.write(_start(2))
    await _refused(call)
    again = decode_pb2_grpc.DecodeStub(channel).Generate()
    await again.write(decode_pb2.GenerateCommand(hello=decode_pb2.DecodeHello(incarnation=7)))
    await _refused(again)


async def _opened(channel):
    call = decode_pb2_grpc.DecodeStub(channel).Generate()
    await call.write(decode_pb2.GenerateCommand(hello=decode_pb2.DecodeHello(incarnation=7)))
    assert (await call.read()).events[0].welcome.incarnation
    return call


def _start(number: int) -> decode_pb2.GenerateCommand:
    sampling = common_pb2.SamplingParams(max_tokens=TOKENS, ignore_eos=True)
    start = decode_pb2.DecodeStart(request=number, token_ids=[5, 6, 7], sampling=sampling)
    return decode_pb2.GenerateCommand(start=start)


async def _refused(call) -> None:
    """The stream ends, because the step thread is stuck."""
    with pytest.raises(grpc.aio.AioRpcError) as ended:
        async with asyncio.timeout(STUCK + 30):
            while await call.read() is not grpc.aio.EOF:
                pass
    assert from_rpc_error(ended.value).reason == "STEP_THREAD_STUCK"


def _begin_a_prompt(node, wedge) -> None:
    """A call that blocks the step thread just as a step would."""
    wedge.open.clear()
    node.steps.call(lambda core, now: wedge.open.wait())
    time.sleep(STUCK + 0.1)


async def _health(address: str) -> int:
    reader, writer = await asyncio.open_connection(*address.split(":"))
    writer.write(b"GET /health HTTP/1.0\r\n\r\n")
    line = await reader.readline()
    writer.close()
    return int(line.split()[1])
