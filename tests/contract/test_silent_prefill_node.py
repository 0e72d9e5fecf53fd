"""A prefill node whose connection takes everything and brings nothing, as one that has been cut may."""

from __future__ import annotations

import asyncio
import contextlib

import grpc.aio
from gateway_rig import until

from baton.config import DecodeConfig
from baton.rpc.channel import open_channel
from baton.rpc.node import run_node
from baton.v1 import common_pb2, decode_pb2, decode_pb2_grpc, prefill_pb2, prefill_pb2_grpc
from baton.worker.decode.server import DecodeNode
from baton.worker.process import WorkerProcess

HANDOFF_SECONDS = 6.0
"""Long enough for some heartbeats, of one a second."""


class Mute(prefill_pb2_grpc.PrefillServicer):
    """Says welcome, and then nothing."""

    def __init__(self, node: DecodeNode) -> None:
        self.sessions = 0
        self._node = node

    async def Run(self, requests, context):
        self.sessions += 1
        endpoint = common_pb2.Endpoint(
            grpc=common_pb2.GrpcEndpoint(page_bytes=self._node.page_bytes, num_pages=9)
        )
        welcome = prefill_pb2.PrefillWelcome(incarnation=3, layout=self._node.layout, endpoints=[endpoint])
        yield prefill_pb2.PrefillResponse(events=[prefill_pb2.PrefillEvent(welcome=welcome)])
        async for _ in requests:
            pass


async def test_its_connection_is_opened_anew_and_its_prompts_go_on():
    made = {"http_port": 0, "kv_tokens": 2048, "threads": 1, "transports": ("grpc",)}
    node = DecodeNode(DecodeConfig(**made, handoff_seconds=HANDOFF_SECONDS))
    ready, stop = asyncio.Event(), asyncio.Event()
    task = asyncio.create_task(run_node(WorkerProcess(node), node.config, ready=ready, stop=stop))
    await asyncio.wait_for(ready.wait(), 60)
    mute, server = Mute(node), grpc.aio.server()
    prefill_pb2_grpc.add_PrefillServicer_to_server(mute, server)
    address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    await server.start()
    try:
        async with open_channel(node._address) as channel, asyncio.timeout(60):
            call = decode_pb2_grpc.DecodeStub(channel).Generate()
            await call.write(decode_pb2.GenerateCommand(hello=decode_pb2.DecodeHello(incarnation=7)))
            sampling = common_pb2.SamplingParams(max_tokens=3, ignore_eos=True)
            for number in range(1, 4):
                start = decode_pb2.DecodeStart(
                    request=number, token_ids=[number, *range(5, 205)], sampling=sampling, prefill=[address]
                )
                await call.write(decode_pb2.GenerateCommand(start=start))
                kinds = []
                while "finished" not in kinds:
                    kinds = [event.WhichOneof("kind") for event in (await call.read()).events]
                # A connection that is up too late for a prompt is not asked anything until the next one.
                with contextlib.suppress(AssertionError):
                    await until(lambda: mute.sessions >= 2, 3)
                    break
            assert mute.sessions >= 2
        await until(lambda: not node.load().requests)
        node.check_idle()
    finally:
        stop.set()
        assert await asyncio.wait_for(task, 20) == 0
        await server.stop(0)
