"""Workers in this process over a model that sees, someone who has pictures, and prompts with images."""

from __future__ import annotations

import asyncio
import hashlib
from contextlib import AsyncExitStack, asynccontextmanager

import grpc
import grpc.aio
import numpy as np
import torch

from baton.config import DecodeConfig, EncodeConfig, PrefillConfig
from baton.rpc.channel import open_channel
from baton.rpc.errors import from_status, not_found, unavailable
from baton.rpc.interceptors import abort
from baton.rpc.node import run_node
from baton.v1 import common_pb2, decode_pb2, decode_pb2_grpc, pictures_pb2, pictures_pb2_grpc
from baton.worker.decode.server import DecodeNode
from baton.worker.encode.server import EncodeNode
from baton.worker.prefill.server import PrefillNode
from baton.worker.process import WorkerProcess
from vision_models import IMAGE_TOKEN, MERGE, PATCH, processor

SIDE = PATCH * MERGE
PIECE = 700
"""Bytes: most pictures have several."""


class Pictures(pictures_pb2_grpc.PicturesServicer):
    """Keeps pictures by their digests."""

    def __init__(self):
        self.kept: dict[bytes, np.ndarray] = {}
        self.fetched: list[bytes] = []
        self.slow, self.failures = 0.0, 0

    def keep(self, pixels):
        """Digests differ in their middle alone: whoever compares less than all of them confuses images."""
        digest = (
            bytes(12) + hashlib.sha256(pixels.tobytes() + bytes(pixels.shape[:2])).digest()[:8] + bytes(12)
        )
        self.kept[digest] = pixels
        return digest

    async def Fetch(self, request, context):
        self.fetched.append(request.digest)
        await asyncio.sleep(self.slow)
        if self.failures:
            self.failures -= 1
            await abort(context, unavailable("not now"))
        if request.digest not in self.kept:
            await abort(context, not_found("gone", "PICTURE_GONE"))
        pixels = self.kept[request.digest]
        data = pixels.tobytes()
        for at in range(0, len(data), PIECE):
            piece = pictures_pb2.PicturePiece(data=data[at : at + PIECE])
            if not at:
                piece.height, piece.width = pixels.shape[:2]
            yield piece


class Seen:
    """A prompt: numbers are lengths of text, pairs heights and widths of new pictures in pixels, arrays
    pictures."""

    def __init__(self, pictures, parts, seed=0):
        draw = np.random.default_rng(seed)
        self.tokens, self.images, self.pixels = [], [], []
        for part in parts:
            if isinstance(part, int):
                self.tokens += draw.integers(3, IMAGE_TOKEN, part).tolist()
                continue
            pixels = part if isinstance(part, np.ndarray) else draw.integers(0, 256, (*part, 3), np.uint8)
            rows, columns = (size // SIDE for size in pixels.shape[:2])
            self.images.append(
                common_pb2.PromptImage(
                    start=len(self.tokens), rows=rows, columns=columns, digest=pictures.keep(pixels)
                )
            )
            self.pixels.append(pixels)
            self.tokens += [IMAGE_TOKEN] * (rows * columns)

    def greedy(self, model, count):
        """By transformers."""
        ids = torch.tensor([self.tokens])
        kinds = (ids == IMAGE_TOKEN).int()
        given = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
        if self.pixels:
            given |= processor()(self.pixels, return_tensors="pt", do_resize=False)
            given["mm_token_type_ids"] = kinds
        options = {"max_new_tokens": count, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
        return model.generate(**given, **options)[0, len(self.tokens) :].tolist()


class Cluster:
    """Its nodes, in this process."""

    def __init__(self):
        self.pictures = Pictures()
        self.pictures_address = ""
        self.prefill: list[PrefillNode] = []
        self.decode: list[DecodeNode] = []
        self.encode: list[EncodeNode] = []
        self.encoders: list[str] = []
        self.stops: dict[str, asyncio.Event] = {}
        """Of encode nodes, by their addresses: they stop at once, whatever they are doing."""
        self._channels: dict[str, grpc.aio.Channel] = {}
        self._numbers = 0

    def prompt(self, *parts, seed=0):
        return Seen(self.pictures, parts, seed)

    async def ask(self, node, *prompts, count=16, **fields):
        """All at once, on a call of their own -> of each a list of its choices' tokens, or its error."""
        channel = self._channels.setdefault(node._address, open_channel(node._address))
        call = decode_pb2_grpc.DecodeStub(channel).Generate()
        self._numbers += 1
        hello = decode_pb2.DecodeHello(incarnation=self._numbers)
        await call.write(decode_pb2.GenerateCommand(hello=hello))
        for number, prompt in enumerate(prompts, 1):
            await call.write(decode_pb2.GenerateCommand(start=self.start(prompt, number, count, **fields)))
        found, ended = {number: {} for number in range(1, len(prompts) + 1)}, {}
        while len(ended) < len(prompts):
            message = await asyncio.wait_for(call.read(), 60)
            assert message is not grpc.aio.EOF, (await call.code(), await call.details())
            for delta in message.tokens:
                found[delta.request].setdefault(delta.choice, []).extend(delta.token_ids)
            for event in message.events:
                kind = event.WhichOneof("kind")
                if kind == "finished":
                    choices = found[event.request]
                    ended[event.request] = [choices[each] for each in sorted(choices)]
                    self.stats = event.finished.stats
                elif kind == "failed":
                    ended[event.request] = from_status(event.failed)
        call.cancel()
        return [ended[number] for number in sorted(ended)]

    def start(self, prompt, number, count, **fields):
        sampling = common_pb2.SamplingParams(max_tokens=count, temperature=0, ignore_eos=True)
        return decode_pb2.DecodeStart(
            **{
                "request": number,
                "token_ids": prompt.tokens,
                "images": prompt.images,
                "pictures": self.pictures_address if prompt.images else "",
                "encoders": self.encoders if prompt.images else [],
                "prefill": [node._address for node in self.prefill],
                "local_prefill_tokens": 0,
                "sampling": sampling,
                **fields,
            }
        )

    @property
    def nodes(self):
        return [*self.prefill, *self.decode]

    async def close(self):
        for channel in self._channels.values():
            await channel.close()


@asynccontextmanager
async def running(
    path, *, prefill=1, decode=1, encode=0, measured=False, prefill_options=(), decode_options=(), **options
):
    made = {"model": str(path), "http_port": 0, "threads": 1, "page_size": 4, "kv_tokens": 2048}
    made |= {"token_budget": 16, "max_rows": 8, "transports": ("grpc",), **options}
    cluster = Cluster()
    async with AsyncExitStack() as stack:
        server = grpc.aio.server()
        pictures_pb2_grpc.add_PicturesServicer_to_server(cluster.pictures, server)
        cluster.pictures_address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
        await server.start()
        stack.push_async_callback(server.stop, 0)
        cluster.prefill += [
            PrefillNode(PrefillConfig(**made | dict(prefill_options))) for _ in range(prefill)
        ]
        cluster.decode += [DecodeNode(DecodeConfig(**made | dict(decode_options))) for _ in range(decode)]
        stop, tasks = asyncio.Event(), []
        kinds = made["transports"]
        config = EncodeConfig(
            model=str(path), http_port=0, threads=1, drain_seconds=0.0, embeddings_mib=4, transports=kinds
        )
        cluster.encode += [EncodeNode(config) for _ in range(encode)]
        for node in [*cluster.encode, *cluster.nodes]:
            ready, own = asyncio.Event(), asyncio.Event() if node in cluster.encode else stop
            process = node if isinstance(node, EncodeNode) else WorkerProcess(node)
            tasks.append(asyncio.create_task(run_node(process, node.config, ready=ready, stop=own)))
            await asyncio.wait_for(ready.wait(), 60)
            if node in cluster.encode:
                cluster.stops[node.address] = own
        cluster.encoders = [node.address for node in cluster.encode]
        if not measured:
            for node in cluster.nodes:
                if node._images is not None:
                    node._images.choice.in_place = lambda *asked: False
        try:
            yield cluster
            for node in cluster.nodes:
                await asyncio.to_thread(node.check_idle)
        finally:
            await cluster.close()
            for each in (stop, *cluster.stops.values()):
                each.set()
            for task in tasks:
                assert await asyncio.wait_for(task, 20) == 0
