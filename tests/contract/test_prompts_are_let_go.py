"""A prompt's message is kept until its tokens are known, or it has been refused, and no longer."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

import psutil
import pytest
from gateway_rig import tokenizer
from scripted_decode import ScriptedDecode, silent

from baton.rpc.channel import open_channel
from baton.v1 import inference_pb2, inference_pb2_grpc, node_pb2

sys.path.insert(0, str(Path(__file__).parent.parent / "cluster"))

from process import Process

REQUESTS = 150
MIB = 2**20
ALLOWED_MIB = 60
"""Of 150. Allocators keep some; a message is parsed at a time."""
PADDING = b"\xc2\x3e\x80\x80\x40" + bytes(MIB)
"""A field that this version does not know: it makes a message large, and nothing else."""


@pytest.mark.parametrize("refused", [True, False], ids=["refused", "accepted"])
async def test_requests_that_wait_do_not_keep_their_messages(tmp_path, refused: bool):
    """Refused: nobody reads that they are. Accepted: by a decode node that never answers."""
    async with ScriptedDecode(silent) as node, tokenizer() as address:
        flags = ["--tokenizer", address, "--decode", node.address, "--log-level", "warning"]
        process = Process("gateway", "gateway", flags, tmp_path)
        process.start()
        try:
            await asyncio.to_thread(process.wait_ready)
            async with open_channel(process.address) as channel:
                call = inference_pb2_grpc.InferenceStub(channel).Generate()
                await ask(call, 0, refused)
                await until_taken(process, 1, refused)
                before = psutil.Process(process.pid).memory_info().rss
                for number in range(1, REQUESTS):
                    await ask(call, number, refused)
                await until_taken(process, REQUESTS, refused)
                grown = (psutil.Process(process.pid).memory_info().rss - before) / MIB
                assert grown < ALLOWED_MIB, f"{grown:.0f} MiB"
        finally:
            await asyncio.to_thread(process.kill)


async def ask(call, number: int, refused: bool) -> None:
    start = inference_pb2.GenerateStart(id=str(number), tokens={"token_ids": [5, 6, 7]})
    start.sampling.temperature = -1 if refused else 1
    start.MergeFromString(PADDING)
    await call.write(inference_pb2.GenerateRequest(start=start))


async def until_taken(process: Process, count: int, refused: bool) -> None:
    for _ in range(600):
        load: node_pb2.Load = await asyncio.to_thread(process.load)
        if (load.failed if refused else load.running) == count:
            return
        await asyncio.sleep(0.1)
    raise AssertionError(f"{load.running} requests run, {load.failed} have failed, not {count}")
