"""The encode process: the vision tower of a model as a gRPC service."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from functools import partial
from itertools import count
from typing import Any

import grpc.aio
import numpy as np
import numpy.typing as npt
import torch

from baton.config import EncodeConfig
from baton.discovery.etcd import Registration, register
from baton.engine.image_spans import ImageSource
from baton.engine.images import EmbeddingCache
from baton.model_path import CheckpointError, model_name, resolve
from baton.models.vision import load_tower, tower_fingerprint
from baton.rpc.address import new_incarnation
from baton.rpc.authentication import ClusterAuthentication, ClusterCredentials
from baton.rpc.errors import BatonError, failed_precondition, invalid, unavailable
from baton.rpc.message_size import PIECE_BYTES
from baton.rpc.node import run_node
from baton.rpc.tasks import Tasks
from baton.tracing.recorder import EventKind, Recorder
from baton.v1 import common_pb2, encode_pb2, encode_pb2_grpc, node_pb2
from baton.worker.encode.batches import EncodeBatches, Note
from baton.worker.images.contents import ImageContents
from baton.worker.images.spans import check_spans, spans_from
from baton.worker.model import device_of, dtype_of, use_device

POLL_SECONDS = 0.02
IMAGE_SECONDS = 30.0
"""The longest that an image may take whose caller names no limit."""
MOST_TOKENS = 2**18
"""Of an image."""


class EncodeNode(encode_pb2_grpc.EncodeServicer):
    """The encode process, as run_node runs it."""

    role = "encode"

    def __init__(self, config: EncodeConfig) -> None:
        self.config = config
        self.cluster = ClusterCredentials.load(config)
        self.recorder = Recorder(config.recorder_events)
        self.tasks = Tasks()
        self.batches: EncodeBatches | None = None
        self.draining = False
        self.address = ""
        self._incarnation = new_incarnation()
        self._registration: Registration | None = None
        self._contents: ImageContents | None = None
        self._tower = ""
        self._numbers = count(1)
        """Of the images that are asked for."""
        self._info = node_pb2.ModelInfo(images=True)

    def add_services(self, server: grpc.aio.Server) -> Sequence[str]:
        encode_pb2_grpc.add_EncodeServicer_to_server(self, server)
        return [encode_pb2.DESCRIPTOR.services_by_name["Encode"].full_name]

    async def start(self, address: str) -> None:
        self.address = address
        config, device = self.config, device_of(self.config.device)
        path = resolve(config.model)
        dtype = dtype_of(config.dtype, device)
        if config.threads and device.type == "cpu":
            torch.set_num_threads(config.threads)
        use_device(device)
        try:
            tower = await asyncio.to_thread(load_tower, path, dtype, device, config.load_format)
            self._tower = await asyncio.to_thread(
                tower_fingerprint, path, tower.dtype, device, config.load_format
            )
        except CheckpointError as error:
            raise failed_precondition(str(error), "CHECKPOINT") from error
        cache = EmbeddingCache(config.embeddings_mib * 2**20)
        self._contents = ImageContents(tower, cache, self.cluster.dial, self.tasks.spawn)
        self.batches = EncodeBatches(tower, cache, self._contents, self.tasks.spawn)
        self._info.name = model_name(config.model)
        self._info.dtype = str(tower.dtype).removeprefix("torch.")
        self._registration = register(config, self.role, self._incarnation, address)

    async def Run(
        self, request: encode_pb2.EncodeImageRequest, context: Any
    ) -> AsyncIterator[encode_pb2.EmbeddingPiece]:
        name, number = request.attempt, next(self._numbers)
        if request.traceparent:
            self.recorder.begin_span(
                name.gateway, name.request, number, operation="encode", traceparent=request.traceparent
            )
        self._note(name, number, EventKind.RECEIVED)
        end = "cancelled"
        try:
            async for piece in self._run(request, context, partial(self._note, name, number)):
                yield piece
            end = "finished"
        except BatonError as error:
            end = error.reason
            raise
        finally:
            self._note(name, number, EventKind.ENDED, text=end)

    def _note(
        self,
        name: common_pb2.Attempt,
        image: int,
        kind: EventKind,
        number: int = 0,
        size: int = 0,
        text: str = "",
    ) -> None:
        """`image`: its number."""
        if name.gateway:
            attempt = (name.gateway, name.request, name.attempt, name.decode_try)
            self.recorder.add(kind, *attempt, number=number, size=size, step=image, text=text)

    async def _run(
        self, request: encode_pb2.EncodeImageRequest, context: Any, note: Note
    ) -> AsyncIterator[encode_pb2.EmbeddingPiece]:
        if self.draining or self.batches is None:
            raise unavailable("this node is draining; encode the image elsewhere", "DRAINING")
        if request.tower != self._tower:
            text = "this node has another model, dtype or kind of device: start both alike"
            raise failed_precondition(text, "OTHER_MODEL")
        image = request.image
        check_spans([image], image.start + MOST_TOKENS, self._info)
        if not request.pictures:
            raise invalid("pictures", "pictures is empty: it names who has the image's pixels, as host:port")
        left = context.time_remaining()
        (span,) = spans_from([image])
        seconds = IMAGE_SECONDS if left is None else left
        rows = await self.batches.embeddings(span, ImageSource(request.pictures), seconds, note)
        data: npt.NDArray[np.uint8] = rows.view(torch.uint8).numpy().reshape(-1)
        for at in range(0, len(data), PIECE_BYTES):
            piece = encode_pb2.EmbeddingPiece(data=data[at : at + PIECE_BYTES].tobytes())
            if not at:
                piece.parts, piece.tokens, piece.values = rows.shape
                piece.dtype = self._info.dtype
            yield piece

    async def drain(self, seconds: float) -> int:
        self.draining = True
        clock = asyncio.get_running_loop().time
        deadline = clock() + seconds
        while self.load().requests and clock() < deadline:  # noqa: ASYNC110
            await asyncio.sleep(POLL_SECONDS)
        return self.load().requests

    async def stop(self) -> None:
        if self._registration is not None:
            await self._registration.close()
        await self.tasks.close()
        if self._contents is not None:
            await self._contents.close()
        if self.batches is not None:
            self.batches.close()

    def info(self) -> node_pb2.NodeInfo:
        info = node_pb2.NodeInfo(incarnation=self._incarnation)
        info.model.CopyFrom(self._info)
        return info

    def load(self) -> node_pb2.Load:
        load = node_pb2.Load(draining=self.draining)
        if self.batches is not None:
            load.requests = self.batches.images
            self.batches.add_to(load)
        return load


async def serve(
    config: EncodeConfig, *, ready: asyncio.Event | None = None, stop: asyncio.Event | None = None
) -> int:
    """Runs the process until it is stopped. Returns its exit code."""
    node = EncodeNode(config)
    return await run_node(
        node, config, authentication=ClusterAuthentication(node.cluster), ready=ready, stop=stop
    )
