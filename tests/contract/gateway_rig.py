"""A gateway with a real tokenizer in front of scripted decode nodes, in one event loop."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass

import grpc.aio
from scripted_decode import ScriptedDecode

from baton.api.server import GatewayNode
from baton.config import GatewayConfig, TokenizerConfig
from baton.rpc.channel import open_channel
from baton.rpc.node import run_node
from baton.tokenizer.detokenize import decode as detokenize
from baton.tokenizer.server import serve as serve_tokenizer
from baton.tokenizer.vocabulary import Vocabulary
from baton.v1 import inference_pb2, inference_pb2_grpc, tokenizer_pb2, tokenizer_pb2_grpc
from ports import free_port


async def until(condition: Callable[[], object], seconds: float = 15.0) -> None:
    """Waits for what nobody announces; fails after so long: sooner than `endless` ends by its max_tokens."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "waited in vain"
        await asyncio.sleep(0.005)


@asynccontextmanager
async def tokenizer(port: int = 0, model: str = "demo") -> AsyncIterator[str]:
    """A tokenizer process's serve(), in this loop; yields its address."""
    port = port or free_port()
    ready, stop = asyncio.Event(), asyncio.Event()
    config = TokenizerConfig(model=model, port=port, http_port=None, drain_seconds=0.1)
    task = asyncio.create_task(serve_tokenizer(config, ready=ready, stop=stop))
    await asyncio.wait_for(ready.wait(), 120)
    try:
        yield f"127.0.0.1:{port}"
    finally:
        stop.set()
        assert await asyncio.wait_for(task, 30) == 0


@dataclass
class Rig:
    node: GatewayNode
    stub: inference_pb2_grpc.InferenceStub
    tokens: tokenizer_pb2_grpc.TokenizerStub
    channel: grpc.aio.Channel
    tokens_channel: grpc.aio.Channel

    @property
    def http(self) -> str:
        return f"http://{self.node.info().http_address}"

    async def encode(self, text: str) -> list[int]:
        request = tokenizer_pb2.EncodeRequest(
            inputs=[tokenizer_pb2.EncodeInput(text=text, add_special_tokens=False)]
        )
        return list((await self.tokens.Encode(request)).results[0].token_ids)

    @property
    def vocabulary(self) -> Vocabulary:
        found = self.node.gateway.tokenizer.vocabulary
        assert found is not None
        return found

    def text(self, token_ids: Sequence[int]) -> str:
        """With special tokens."""
        return detokenize(self.vocabulary, token_ids, skip_special_tokens=False)

    async def idle(self) -> None:
        """Nothing is held any more, before silence or the end of a lease would free it: 10 s."""
        gateway = self.node.gateway
        await until(lambda: not (gateway.load().requests or gateway.load().running), 9)


@asynccontextmanager
async def gateway(*decode: ScriptedDecode, tokenizer_address: str = "", **config) -> AsyncIterator[Rig]:
    if not tokenizer_address:
        async with tokenizer() as address, gateway(*decode, tokenizer_address=address, **config) as rig:
            yield rig
        return
    settings = {"http_port": 0, "drain_seconds": 1.0, "log_level": "warning", **config}
    made = GatewayConfig(
        tokenizer=(tokenizer_address,), decode=tuple(node.address for node in decode), **settings
    )
    node = GatewayNode(made)
    ready, stop = asyncio.Event(), asyncio.Event()
    task = asyncio.create_task(
        run_node(
            node,
            made,
            authentication=node.authentication,
            serve_metrics_http=False,
            registry=node.gateway.metrics.registry,
            ready=ready,
            stop=stop,
            on_refused=node.refused,
        )
    )
    await asyncio.wait_for(ready.wait(), 120)
    async with open_channel(node.address) as public, open_channel(tokenizer_address) as inner:
        stubs = inference_pb2_grpc.InferenceStub(public), tokenizer_pb2_grpc.TokenizerStub(inner)
        rig = Rig(node, *stubs, public, inner)
        try:
            yield rig
        finally:
            stop.set()
            assert await asyncio.wait_for(task, 30) == 0


class Stream:
    """One client stream of Inference.Generate."""

    def __init__(self, rig: Rig) -> None:
        self.call = rig.stub.Generate()

    async def start(self, id: str = "a", **fields) -> None:
        start = inference_pb2.GenerateStart(id=id, **fields)
        await self.call.write(inference_pb2.GenerateRequest(start=start))

    async def cancel(self, id: str = "a") -> None:
        cancel = inference_pb2.GenerateCancel(id=id)
        await self.call.write(inference_pb2.GenerateRequest(cancel=cancel))

    async def next(self) -> inference_pb2.GenerateResponse:
        return await asyncio.wait_for(self.call.read(), 30)

    async def until_end(self, id: str = "a") -> list[inference_pb2.GenerateResponse]:
        """All events up to the terminal one of request `id`."""
        events = []
        while True:
            event = await self.next()
            events.append(event)
            if event.id == id and event.WhichOneof("kind") in ("finished", "failed"):
                return events


def text_of(events: list[inference_pb2.GenerateResponse], choice: int = 0) -> str:
    return "".join(event.delta.text for event in events if event.delta.choice == choice)


def ids_of(events: list[inference_pb2.GenerateResponse], choice: int = 0) -> list[int]:
    return [id for event in events if event.delta.choice == choice for id in event.delta.token_ids]


def kinds_of(events: list[inference_pb2.GenerateResponse]) -> list[str]:
    """The kinds of events, runs of deltas as one."""
    kinds = [event.WhichOneof("kind") for event in events]
    return [kind for i, kind in enumerate(kinds) if kind != "delta" or i == 0 or kinds[i - 1] != "delta"]
