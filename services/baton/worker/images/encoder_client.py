"""Pulls embeddings of images from encode nodes: Encode.Lend."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import grpc
import grpc.aio
import torch

from baton.engine.image_spans import ImageSource, ImageSpan
from baton.handoff.messages import AttemptName
from baton.handoff.pull_cost import PullCost
from baton.models.decoder import VisionTower
from baton.rpc.channel import Dial
from baton.rpc.client_stream import ClientStream
from baton.rpc.errors import (
    BatonError,
    deadline_exceeded,
    failed_precondition,
    from_rpc_error,
    unavailable,
    without_frames,
)
from baton.rpc.logs import get_logger
from baton.tracing.recorder import EventKind, Recorder
from baton.transport import HostPages, Receiver, TransportError, open_receiver
from baton.v1 import common_pb2, encode_pb2, encode_pb2_grpc, node_pb2, node_pb2_grpc
from baton.worker.convert import name_to
from baton.worker.images.channels import Channels
from baton.worker.images.choice import EncodeChoice
from baton.worker.images.pull_buffers import OpenPool, PullBuffers
from baton.worker.images.spans import images_to

LOAD_SECONDS = 2.0
"""The longest that an encode node may take to say how busy it is."""
RUN_SECONDS = 30.0
"""The longest that one image may take at one node."""
NOT_THE_NODES = ("PICTURE_GONE", "PICTURES_LOST", "WRONG_PICTURE")
"""Reasons that are the gateway's matter or the request's."""
AVOID_SECONDS = 5.0
"""A node that has failed is not asked for so long."""

_Call = ClientStream[encode_pb2.LendRequest, encode_pb2.LendResponse]


@dataclass(frozen=True, slots=True)
class Asker:
    """The request that an image is fetched for; the first one, of several."""

    name: AttemptName
    trace: str = ""
    """Trace context of the request; empty: it is not traced."""


async def _open_pool(
    kinds: Sequence[str],
    dial: Dial,
    endpoints: Sequence[common_pb2.Endpoint],
    local: HostPages,
    address: str,
) -> Receiver:
    return (await open_receiver(endpoints, local, kinds, address, dial=dial)).receiver


NOBODY = Asker(AttemptName(0, 0, 0, 0))


class EncoderClient:
    def __init__(
        self,
        dial: Dial,
        tower: VisionTower,
        name: str,
        device: torch.device,
        kinds: Sequence[str],
        recorder: Recorder,
        choice: EncodeChoice,
        open_pool: OpenPool | None = None,
    ) -> None:
        """`tower`: of this worker; `name`: tower_fingerprint; `kinds`: of transports, best first;
        `open_pool`: None: of a process."""
        self.choice = choice
        self.log = get_logger()
        self.buffers = PullBuffers(open_pool or partial(_open_pool, kinds, dial), device)
        self._recorder = recorder
        self._channels = Channels(dial)
        self._values, self._dtype = tower.values, tower.dtype
        self._name = name
        self._failed: dict[str, float] = {}
        """When nodes last failed."""

    async def fetch(self, image: ImageSpan, source: ImageSource, asker: Asker) -> torch.Tensor | None:
        """Embeddings in the form of `VisionTower.encode`; None: no node could, or it is sooner here. Images
        are divided among the nodes by their digests, so that one that comes again meets the node that knows
        it."""
        now = asyncio.get_running_loop().time
        first = sum(image.digest) % len(source.encoders)
        for address in (*source.encoders[first:], *source.encoders[:first]):
            if now() - self._failed.get(address, -AVOID_SECONDS) < AVOID_SECONDS:
                continue
            try:
                async with asyncio.timeout(RUN_SECONDS):
                    if await self._sooner_here(address, image):
                        return None
                    return await self._run(address, image, source.pictures, asker)
            except BatonError as failure:
                error = without_frames(failure)  # which may hold embeddings
            except TimeoutError:
                error = deadline_exceeded(f"no embeddings within {RUN_SECONDS:g} s")
            if error.reason in NOT_THE_NODES:
                return None
            self._failed[address] = now()
            self.log.warning("encode node failed", address=address, reason=error.reason, error=error.message)
        return None

    async def _sooner_here(self, address: str, image: ImageSpan) -> bool:
        if self.choice.local.cost is None:
            return False
        stub = node_pb2_grpc.NodeStub(await self._channels.to(address))
        try:
            load = await stub.GetLoad(node_pb2.GetLoadRequest(), timeout=LOAD_SECONDS)
        except grpc.RpcError as error:
            raise from_rpc_error(error) from error
        cost = load.encode_cost
        known = PullCost(cost.fixed, cost.token) if load.HasField("encode_cost") else None
        return self.choice.in_place(image.tokens, load.queued_tokens, known)

    async def _run(self, address: str, image: ImageSpan, pictures: str, asker: Asker) -> torch.Tensor:
        self._recorder.add(EventKind.ENCODE_ASKED, *asker.name, number=image.tokens, text=address)
        channel = await self._channels.to(address)
        (message,) = images_to([image])
        asked = encode_pb2.EncodeImageRequest(
            image=message,
            pictures=pictures,
            tower=self._name,
            attempt=name_to(asker.name),
            traceparent=asker.trace,
        )
        call = _Call(encode_pb2_grpc.EncodeStub(channel).Lend(timeout=RUN_SECONDS))
        try:
            await call.write(encode_pb2.LendRequest(image=asked))
            ready = (await self._read(call, "ready")).ready
            embeddings = await self._pull(address, ready, image)
            await call.write(encode_pb2.LendRequest(release=encode_pb2.EmbeddingsRelease()))
            if not (await self._read(call, "released")).released.stood:
                raise unavailable(
                    "the pages of the embeddings were reused while they were copied", "LEASE_LOST"
                )
            return embeddings
        finally:
            call.cancel()

    async def _read(self, call: _Call, kind: str) -> encode_pb2.LendResponse:
        answer = await call.read()
        if answer is grpc.aio.EOF or answer.WhichOneof("kind") != kind:
            raise failed_precondition(f"an encode node did not say {kind}", "PROTOCOL")
        found: encode_pb2.LendResponse = answer
        return found

    async def _pull(self, address: str, ready: encode_pb2.EmbeddingsReady, image: ImageSpan) -> torch.Tensor:
        """Raises BatonError if a page was reused before it was copied."""
        size = image.tokens * self._values * self._dtype.itemsize
        right = (image.tokens, self._values, str(self._dtype).removeprefix("torch."))
        pages, per_page = list(ready.page_ids), ready.page_bytes
        if (ready.tokens, ready.parts * ready.values, ready.dtype) != right:
            shape = [ready.parts, ready.tokens, ready.values]
            raise failed_precondition(f"embeddings of another shape came: {shape}", "PROTOCOL")
        if not per_page or len(pages) != -(-size // per_page) or len(pages) != len(ready.generations):
            text = f"{len(pages)} pages of {per_page} bytes were named for {size} bytes of embeddings"
            raise failed_precondition(text, "PROTOCOL")
        now = asyncio.get_running_loop().time
        begun = now()
        try:
            memory, generations = await self.buffers.pull(address, ready, size)
        except TransportError as error:
            raise unavailable(f"embeddings cannot be pulled: {error}", "PULL_FAILED") from error
        if generations is not None and generations != list(ready.generations):
            raise unavailable("embeddings were overwritten before they had been copied", "STALE_PAGES")
        self.choice.pulls.add(image.tokens, max(now() - begun, 1e-6))
        return memory.view(self._dtype).view(ready.parts, ready.tokens, ready.values)

    async def close(self) -> None:
        await self.buffers.close()
        await self._channels.close()
