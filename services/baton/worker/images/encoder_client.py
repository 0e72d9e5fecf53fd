"""Pulls embeddings of images from encode nodes: Encode.Run."""

from __future__ import annotations

import time
from dataclasses import dataclass

import grpc
import grpc.aio
import numpy as np
import numpy.typing as npt
import torch

from baton.engine.image_spans import ImageSource, ImageSpan
from baton.handoff.messages import AttemptName
from baton.models.decoder import VisionTower
from baton.rpc.channel import Dial
from baton.rpc.errors import BatonError, failed_precondition, from_rpc_error
from baton.rpc.logs import get_logger
from baton.tracing.recorder import EventKind, Recorder
from baton.v1 import encode_pb2, encode_pb2_grpc
from baton.worker.convert import name_to
from baton.worker.images.channels import Channels
from baton.worker.images.spans import images_to

RUN_SECONDS = 30.0
"""The longest that one image may take at one node."""
NOT_THE_NODES = ("PICTURE_GONE", "PICTURES_LOST", "WRONG_PICTURE")
"""Reasons that are the gateway's matter or the request's."""
AVOID_SECONDS = 5.0
"""A node that has failed is not asked for so long."""

_log = get_logger()


@dataclass(frozen=True, slots=True)
class Asker:
    """The request that an image is fetched for; the first one, of several."""

    name: AttemptName
    trace: str = ""
    """Its trace context; empty: it is not traced."""


NOBODY = Asker(AttemptName(0, 0, 0, 0))


class EncoderClient:
    def __init__(
        self, dial: Dial, tower: VisionTower, name: str, device: torch.device, recorder: Recorder
    ) -> None:
        """`tower`: of this worker; `name`: tower_fingerprint."""
        self._recorder = recorder
        self._channels = Channels(dial)
        self._values, self._dtype = tower.values, tower.dtype
        self._name, self._device = name, device
        self._failed: dict[str, float] = {}
        """When nodes last failed."""

    async def fetch(self, image: ImageSpan, source: ImageSource, asker: Asker) -> torch.Tensor | None:
        """As `VisionTower.encode` has them; None: no node could. Images are divided among the nodes by their
        digests, so that one that comes again meets the node that knows it."""
        first = sum(image.digest) % len(source.encoders)
        for address in (*source.encoders[first:], *source.encoders[:first]):
            if time.monotonic() - self._failed.get(address, -AVOID_SECONDS) < AVOID_SECONDS:
                continue
            try:
                return await self._run(address, image, source.pictures, asker)
            except grpc.RpcError as failure:
                error = from_rpc_error(failure)
            except BatonError as failure:
                error = failure
            if error.reason in NOT_THE_NODES:
                return None
            self._failed[address] = time.monotonic()
            _log.warning("encode node failed", address=address, reason=error.reason, error=error.message)
        return None

    async def _run(self, address: str, image: ImageSpan, pictures: str, asker: Asker) -> torch.Tensor:
        self._recorder.add(EventKind.ENCODE_ASKED, *asker.name, number=image.tokens, text=address)
        channel, tokens = await self._channels.to(address), image.rows * image.columns
        parts, at = torch.empty(tokens * self._values, dtype=self._dtype), 0
        whole: npt.NDArray[np.uint8] = parts.view(torch.uint8).numpy()
        (message,) = images_to([image])
        asked = encode_pb2.EncodeImageRequest(
            image=message,
            pictures=pictures,
            tower=self._name,
            attempt=name_to(asker.name),
            traceparent=asker.trace,
        )
        shape: tuple[int, int, int] | None = None
        async for piece in encode_pb2_grpc.EncodeStub(channel).Run(asked, timeout=RUN_SECONDS):
            if shape is None:
                shape = piece.parts, piece.tokens, piece.values
                right = (tokens, self._values, str(self._dtype).removeprefix("torch."))
                if (piece.tokens, piece.parts * piece.values, piece.dtype) != right:
                    raise failed_precondition(f"embeddings of another shape came: {shape}", "PROTOCOL")
            end = at + len(piece.data)
            if end > len(whole):
                raise failed_precondition("more embeddings came than were announced", "PROTOCOL")
            whole[at:end] = np.frombuffer(piece.data, np.uint8)
            at = end
        if shape is None or at < len(whole):
            raise failed_precondition("embeddings came in part only", "PROTOCOL")
        return parts.view(shape).to(self._device)

    async def close(self) -> None:
        await self._channels.close()
