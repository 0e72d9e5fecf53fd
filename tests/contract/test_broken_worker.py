"""A worker whose steps fail: health says so, its callers get back what they had started, and it ends."""

from __future__ import annotations

import asyncio

import grpc
import pytest
from gateway_rig import until

from baton.config import DecodeConfig, PrefillConfig
from baton.rpc.channel import open_channel
from baton.rpc.errors import from_status
from baton.rpc.node import EXIT_BROKEN, run_node
from baton.v1 import common_pb2, decode_pb2, decode_pb2_grpc, prefill_pb2, prefill_pb2_grpc
from baton.worker.decode.server import DecodeNode
from baton.worker.prefill.server import PrefillNode
from baton.worker.process import WorkerProcess


class Broken:
    """A runner whose launches fail while `error` is set."""

    def __init__(self, runner):
        self._runner = runner
        self.error = None

    def launch(self, plan):
        if self.error is not None:
            raise self.error
        return self._runner.launch(plan)

    def done(self, launched):
        return self._runner.done(launched)

    def read(self, launched):
        return self._runner.read(launched)


async def started(node):
    ready = asyncio.Event()
    task = asyncio.create_task(run_node(WorkerProcess(node), node.config, ready=ready, stop=asyncio.Event()))
    await asyncio.wait_for(ready.wait(), 60)
    node.steps._pipeline._runner = Broken(node.engine.runner)
    return task, node.steps._pipeline._runner


MADE = {"http_port": 0, "kv_tokens": 2048, "threads": 1, "transports": ("grpc",)}
SAMPLING = common_pb2.SamplingParams(max_tokens=500, ignore_eos=True)


@pytest.mark.parametrize(
    ("error", "steps"), [("CUDA error: an illegal memory access was encountered", 1), ("no answer", 3)]
)
async def test_a_decode_node_that_cannot_compute_hands_back_what_it_has_and_ends(error, steps):
    node = DecodeNode(DecodeConfig(**MADE))
    task, runner = await started(node)
    async with open_channel(node._address) as channel, asyncio.timeout(90):
        call = decode_pb2_grpc.DecodeStub(channel).Generate()
        await call.write(decode_pb2.GenerateCommand(hello=decode_pb2.DecodeHello(incarnation=7)))
        await call.read()
        runner.error = RuntimeError(error)
        reasons = []
        for number in range(1, steps + 1):
            start = decode_pb2.DecodeStart(request=number, token_ids=[*range(5, 25)], sampling=SAMPLING)
            await call.write(decode_pb2.GenerateCommand(start=start))
            events = []
            while not events:
                events = (await call.read()).events
            status = from_status(events[0].failed)
            reasons.append((status.code, status.reason))
        assert reasons == [(grpc.StatusCode.UNAVAILABLE, "STEP_FAILED")] * steps
        assert [problem.reason for problem in node.load().problems] == ["STEPS_FAIL"]
        assert await asyncio.wait_for(task, 60) == EXIT_BROKEN


async def test_one_failed_step_is_no_reason_to_end():
    node = PrefillNode(PrefillConfig(**MADE))
    task, runner = await started(node)
    async with open_channel(node._address) as channel, asyncio.timeout(90):
        call = prefill_pb2_grpc.PrefillStub(channel).Run()
        await call.write(prefill_pb2.PrefillRequest(hello=prefill_pb2.PrefillHello(incarnation=7)))
        await call.read()
        kinds = []
        for number in range(3):
            runner.error = RuntimeError("no answer") if number == 1 else None
            start = prefill_pb2.PrefillStart(
                attempt=common_pb2.Attempt(gateway=7, request=number),
                token_ids=[*range(5, 25)],
                sampling=SAMPLING,
                keep_pages=False,
            )
            await call.write(prefill_pb2.PrefillRequest(start=start))
            events = []
            while not any(event.WhichOneof("kind") in ("finished", "failed") for event in events):
                events += (await call.read()).events
            kinds.append(events[-1].WhichOneof("kind"))
        assert kinds == ["finished", "failed", "finished"]
        assert not node.load().problems
        runner.error = RuntimeError("CUDA error: device lost")
        start.attempt.request = 9
        await call.write(prefill_pb2.PrefillRequest(start=start))
        await until(lambda: task.done(), 60)  # with its drain
    assert task.result() == EXIT_BROKEN
