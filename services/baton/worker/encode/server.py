"""The encode process: the vision tower of a model as a gRPC service."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from functools import partial
from itertools import count
from typing import Any

import grpc.aio
import torch

from baton.authentication.cluster import ClusterAuthentication, ClusterCredentials
from baton.config import EncodeConfig
from baton.discovery.etcd import Registration, register
from baton.engine.image_spans import ImageSource
from baton.engine.images import EmbeddingCache
from baton.model_path import CheckpointError, model_name, resolve
from baton.models.vision import load_tower, tower_fingerprint
from baton.rpc.address import new_incarnation
from baton.rpc.errors import BatonError, deadline_exceeded, failed_precondition, invalid, unavailable
from baton.rpc.message_size import PIECE_BYTES
from baton.rpc.node import run_node
from baton.rpc.tasks import Tasks
from baton.tracing.recorder import EventKind, Recorder
from baton.transport import SegmentError, check_kinds, reap_orphans
from baton.transport.base import nothing
from baton.transport.grpc import PageSourceServicer
from baton.v1 import common_pb2, encode_pb2, encode_pb2_grpc, node_pb2, prefill_pb2, prefill_pb2_grpc
from baton.worker.encode.batches import EncodeBatches, Note
from baton.worker.encode.pool import LEND_SECONDS, EmbeddingLease, EmbeddingPool, pin
from baton.worker.images.choice import measure_encoding
from baton.worker.images.contents import ImageContents
from baton.worker.images.spans import check_spans, spans_from
from baton.worker.model import device_of, dtype_of, use_device
from baton.worker.pool import PublishedPool, byte_pool

POLL_SECONDS = 0.02
IMAGE_SECONDS = 30.0
"""The longest that an image may take whose caller names no limit."""
MOST_TOKENS = 2**18
"""Tokens of an image."""
PAGE_TOKENS = 16
"""Whose embeddings a page has room for."""


class EncodeNode(encode_pb2_grpc.EncodeServicer):
    """The encode process, as run_node runs it."""

    role = "encode"
    pool: EmbeddingPool
    _published: PublishedPool

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
        self._page_source = PageSourceServicer()
        self._unpin: Callable[[], object] = nothing
        self._tower = ""
        self._numbers = count(1)
        """Numbers of the images that are asked for."""
        self._info = node_pb2.ModelInfo(images=True)

    def add_services(self, server: grpc.aio.Server) -> Sequence[str]:
        encode_pb2_grpc.add_EncodeServicer_to_server(self, server)
        prefill_pb2_grpc.add_PageSourceServicer_to_server(self._page_source, server)
        services = {**encode_pb2.DESCRIPTOR.services_by_name, **prefill_pb2.DESCRIPTOR.services_by_name}
        return [services[name].full_name for name in ("Encode", "PageSource")]

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
        page_bytes = PAGE_TOKENS * tower.values * tower.dtype.itemsize
        pages = max(1, config.embeddings_mib * 2**20 // page_bytes)
        reap_orphans()
        kinds = check_kinds(config.transports)
        try:
            rows, self._published = await asyncio.to_thread(
                byte_pool, pages, page_bytes, kinds, self._incarnation, "--embeddings-mib"
            )
        except SegmentError as error:
            raise failed_precondition(str(error), "SHARED_MEMORY") from error
        if device.type == "cuda":
            self._unpin = await asyncio.to_thread(pin, rows, device)
        self._page_source.pools = (self._published.pages,)
        self.pool = EmbeddingPool(rows, self._published.generations, time.monotonic)
        self._contents = ImageContents(tower, EmbeddingCache(0), self.cluster.dial, self.tasks.spawn)
        meter = await asyncio.to_thread(measure_encoding, tower, device)
        self.batches = EncodeBatches(tower, self.pool, self._contents, self.tasks.spawn, meter)
        self._info.name = model_name(config.model)
        self._info.dtype = str(tower.dtype).removeprefix("torch.")
        self._registration = register(config, self.role, self._incarnation, address)

    async def Run(
        self, request: encode_pb2.EncodeImageRequest, context: Any
    ) -> AsyncIterator[encode_pb2.EmbeddingPiece]:
        async with self._lease(request, context) as lease:
            data, (parts, tokens, values) = self.pool.read(lease), lease.stored.shape
        for at in range(0, len(data), PIECE_BYTES):
            piece = encode_pb2.EmbeddingPiece(data=data[at : at + PIECE_BYTES])
            if not at:
                piece.parts, piece.tokens, piece.values = parts, tokens, values
                piece.dtype = self._info.dtype
            yield piece

    async def Lend(
        self, request_iterator: AsyncIterator[encode_pb2.LendRequest], context: Any
    ) -> AsyncIterator[encode_pb2.LendResponse]:
        first = await _next(request_iterator)
        if first is None or first.WhichOneof("kind") != "image":
            raise invalid("kind", "the first message on Encode.Lend sets `image`")
        async with self._lease(first.image, context) as lease:
            parts, tokens, values = lease.stored.shape
            ready = encode_pb2.EmbeddingsReady(
                parts=parts,
                tokens=tokens,
                values=values,
                dtype=self._info.dtype,
                endpoints=self._published.endpoints(),
                page_bytes=self._published.pages.page_bytes,
                page_ids=lease.stored.pages,
                generations=lease.generations,
            )
            yield encode_pb2.LendResponse(ready=ready)
            second = await _next(request_iterator)
            if second is None or second.WhichOneof("kind") != "release":
                raise invalid("kind", "the second message on Encode.Lend sets `release`")
            released = encode_pb2.EmbeddingsReleased(stood=lease.stood)
            yield encode_pb2.LendResponse(released=released)

    @asynccontextmanager
    async def _lease(
        self, request: encode_pb2.EncodeImageRequest, context: Any
    ) -> AsyncIterator[EmbeddingLease]:
        """Recorded. Raises BatonError."""
        name, number = request.attempt, next(self._numbers)
        if request.traceparent:
            self.recorder.begin_span(
                name.gateway, name.request, number, operation="encode", traceparent=request.traceparent
            )
        self._note(name, number, EventKind.RECEIVED)
        end, lease = "cancelled", None
        try:
            lease = await self._embeddings(request, context, partial(self._note, name, number))
            yield lease
            end = "finished"
        except BatonError as error:
            end = error.reason
            raise
        finally:
            if lease is not None:
                self.pool.give_back(lease)
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

    async def _embeddings(
        self, request: encode_pb2.EncodeImageRequest, context: Any, note: Note
    ) -> EmbeddingLease:
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
        return await self.batches.lend(span, ImageSource(request.pictures), seconds, note)

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
            self._published.close()
            self._unpin()

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


async def _next(requests: AsyncIterator[encode_pb2.LendRequest]) -> encode_pb2.LendRequest | None:
    """None: the caller sends no more. Raises BatonError."""
    try:
        async with asyncio.timeout(LEND_SECONDS):
            return await anext(requests, None)
    except TimeoutError:
        text = f"no message for {LEND_SECONDS:g} s; pages are promised no longer"
        raise deadline_exceeded(text) from None


async def serve(
    config: EncodeConfig, *, ready: asyncio.Event | None = None, stop: asyncio.Event | None = None
) -> int:
    """Runs the process until it is stopped. Returns its exit code."""
    node = EncodeNode(config)
    return await run_node(
        node, config, authentication=ClusterAuthentication(node.cluster), ready=ready, stop=stop
    )
