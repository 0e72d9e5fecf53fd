"""baton.v1.Pictures: workers fetch the images of requests from the gateway that they come from."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import grpc.aio

from baton.authentication.cluster import ClusterAuthentication
from baton.authentication.interceptor import AuthenticationInterceptor
from baton.config import GatewayConfig
from baton.discovery.etcd import seen_from
from baton.gateway.pictures import PictureStore
from baton.rpc.address import join_address, split_address
from baton.rpc.bind import bind_grpc
from baton.rpc.channel import server_options
from baton.rpc.errors import not_found
from baton.rpc.interceptors import MalformedMessages
from baton.v1 import pictures_pb2, pictures_pb2_grpc

PIECE_BYTES = 2**20


class PicturesServer:
    """A server of its own: that of clients has another certificate, and other keys. It is started with the
    first image, so that who has none has no such port."""

    def __init__(
        self, config: GatewayConfig, authentication: ClusterAuthentication, store: PictureStore
    ) -> None:
        self._config = config
        self._authentication = authentication
        self._store = store
        self._starting = asyncio.Lock()
        self._server: grpc.aio.Server | None = None
        self._bound = ""

    async def address(self, peer: str) -> str:
        """host:port at which `peer`, the address of a decode node, reaches this server. Raises BatonError if
        it cannot be bound."""
        async with self._starting:
            if self._server is None:
                await self._start()
        if self._config.advertise:
            host, _ = split_address(self._config.advertise)
            return join_address(host, split_address(self._bound)[1])
        return await asyncio.to_thread(seen_from, self._bound, peer)  # may ask for a name

    async def _start(self) -> None:
        config, authentication = self._config, self._authentication
        options = dict(server_options()) | dict(authentication.options())
        server = grpc.aio.server(
            options=list(options.items()),
            interceptors=[AuthenticationInterceptor(authentication), MalformedMessages()],
        )
        pictures_pb2_grpc.add_PicturesServicer_to_server(PicturesServicer(self._store), server)
        self._bound = bind_grpc(
            server, config.host, config.pictures_port, authentication, config.insecure, flag="--pictures-port"
        )
        await server.start()
        self._server = server

    async def stop(self) -> None:
        if self._server is not None:
            await self._server.stop(0.5)


class PicturesServicer(pictures_pb2_grpc.PicturesServicer):
    def __init__(self, store: PictureStore) -> None:
        self._store = store

    async def Fetch(
        self, request: pictures_pb2.PictureRequest, context: Any
    ) -> AsyncIterator[pictures_pb2.PicturePiece]:
        picture = self._store.find(request.digest)
        if picture is None:
            raise not_found("the picture is kept here no more: its requests have ended", "PICTURE_GONE")
        height, width, _ = picture.pixels.shape
        data = picture.pixels.reshape(-1).data
        for first in range(0, len(data), PIECE_BYTES):
            piece = pictures_pb2.PicturePiece(data=bytes(data[first : first + PIECE_BYTES]))
            if not first:
                piece.height, piece.width = height, width
            yield piece
