"""Fetches the pixels of pictures from a gateway: Pictures.Fetch."""

from __future__ import annotations

import asyncio

import grpc
import grpc.aio
import numpy as np
import numpy.typing as npt

from baton.rpc.channel import Dial
from baton.rpc.errors import BatonError, failed_precondition, from_rpc_error, unavailable
from baton.v1 import pictures_pb2, pictures_pb2_grpc
from baton.worker.images.channels import Channels

FETCH_SECONDS = 30.0
"""The longest that one picture may take."""
TRIES = 3
PAUSE_SECONDS = 0.2
"""Between two tries at a gateway that cannot be reached."""

Pixels = npt.NDArray[np.uint8]


class PictureClient:
    def __init__(self, dial: Dial) -> None:
        self._channels = Channels(dial)

    async def fetch(self, address: str, digest: bytes, size: tuple[int, int]) -> Pixels:
        """`size`: height and width that it must have. Raises BatonError: UNAVAILABLE where another try, or
        another node, may help."""
        for left in reversed(range(TRIES)):
            try:
                return await self._fetch(await self._channels.to(address), digest, size)
            except grpc.RpcError as failure:
                error = from_rpc_error(failure)
            if error.code is grpc.StatusCode.NOT_FOUND:
                text = "a picture of the request is not kept any more: send the request again"
                raise failed_precondition(text, "PICTURE_GONE")
            if error.code is not grpc.StatusCode.UNAVAILABLE or not left:
                break
            await asyncio.sleep(PAUSE_SECONDS)
        text = f"a picture cannot be fetched from {address}: {error.code.name}: {error.message}"
        raise unavailable(text, "PICTURES_LOST")

    async def _fetch(self, channel: grpc.aio.Channel, digest: bytes, size: tuple[int, int]) -> Pixels:
        pixels, at = np.empty(3 * size[0] * size[1], np.uint8), 0
        stub = pictures_pb2_grpc.PicturesStub(channel)
        async for piece in stub.Fetch(pictures_pb2.PictureRequest(digest=digest), timeout=FETCH_SECONDS):
            if not at and (piece.height, piece.width) != size:
                raise _wrong(f"has {piece.width} x {piece.height} pixels, not {size[1]} x {size[0]}")
            end = at + len(piece.data)
            if end > len(pixels):
                raise _wrong("has more bytes than it says")
            pixels[at:end] = np.frombuffer(piece.data, np.uint8)
            at = end
        if at < len(pixels):
            raise _wrong(f"has {at} bytes, not {len(pixels)}")
        return pixels.reshape(*size, 3)

    async def close(self) -> None:
        await self._channels.close()


def _wrong(what: str) -> BatonError:
    return failed_precondition(f"a picture of the request {what}", "WRONG_PICTURE")
