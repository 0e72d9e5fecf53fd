"""The gateway process: gRPC and HTTP in one event loop."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Iterator, Sequence

import grpc.aio
import uvicorn

from baton.config import GatewayConfig
from baton.gateway.gateway import Gateway
from baton.gateway.http_api import make_app
from baton.gateway.inference import WRITE_SECONDS, InferenceServicer
from baton.rpc.errors import BatonError
from baton.rpc.logs import get_logger
from baton.rpc.node import run_node
from baton.v1 import inference_pb2, inference_pb2_grpc, node_pb2

START_SECONDS = 60.0
"""How long the start waits for a tokenizer and a decode node. Then the gateway serves, and refuses with
UNAVAILABLE what it cannot serve yet."""
HTTP_STOP_SECONDS = 2.0
HTTP_SEND_BYTES = 128 * 2**10

_log = get_logger("baton.gateway")


async def serve(
    config: GatewayConfig, *, ready: asyncio.Event | None = None, stop: asyncio.Event | None = None
) -> int:
    """Runs the gateway until it is told to stop. Returns the process's exit code."""
    node = GatewayNode(config)
    return await run_node(
        node,
        config,
        serve_metrics_http=False,
        registry=node.gateway.metrics.registry,
        ready=ready,
        stop=stop,
    )


class GatewayNode:
    """What run_node runs."""

    role = "gateway"

    def __init__(self, config: GatewayConfig) -> None:
        self._config = config
        self.gateway = Gateway(config)
        self.address = ""
        """host:port of the gRPC server, once bound."""
        self._http: _HttpServer | None = None

    def add_services(self, server: grpc.aio.Server) -> Sequence[str]:
        inference_pb2_grpc.add_InferenceServicer_to_server(InferenceServicer(self.gateway), server)
        return [inference_pb2.DESCRIPTOR.services_by_name["Inference"].full_name]

    async def start(self, address: str) -> None:
        """Serves HTTP (so that /health can say what is missing), and waits for the peers."""
        self.address = address
        if self._config.http_port is not None:
            self._http = _HttpServer(self.gateway, self._config.host, self._config.http_port)
            self._http.start()
        self.gateway.start()
        if not await self.gateway.wait_until_usable(START_SECONDS):
            _log.warning("serving without all peers", missing="; ".join(self.gateway.missing()))

    async def drain(self, seconds: float) -> int:
        return await self.gateway.drain(seconds)

    async def stop(self) -> None:
        await self.gateway.stop()
        if self._http is not None:
            await self._http.stop()

    def info(self) -> node_pb2.NodeInfo:
        info = self.gateway.info()
        if self._http is not None:
            info.http_address = self._http.address
        return info

    def load(self) -> node_pb2.Load:
        return self.gateway.load()


class _HttpServer:
    """uvicorn in this event loop. Signals are run_node's."""

    def __init__(self, gateway: Gateway, host: str, port: int) -> None:
        """Binds. Raises BatonError when the port cannot be had."""
        try:
            family = socket.AF_INET6 if ":" in host else socket.AF_INET
            self._socket = socket.create_server((host, port), family=family, backlog=1024)
            # Accepted connections inherit both. The kernel keeps no more than this of what a client does not
            # read, and resets a connection whose client has taken nothing for so long.
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, HTTP_SEND_BYTES)
            unread_ms = int(1000 * (gateway.config.slow_reader_seconds + WRITE_SECONDS))
            self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, unread_ms)
        except OSError as error:
            raise BatonError(
                grpc.StatusCode.UNAVAILABLE,
                "PORT_TAKEN",
                f"cannot serve HTTP on {host}:{port}: {error.strerror or error}; choose another --http-port",
            ) from None
        bound = self._socket.getsockname()[1]
        self.address = f"[{host}]:{bound}" if ":" in host else f"{host}:{bound}"
        config = uvicorn.Config(
            make_app(gateway),
            log_config=None,
            access_log=False,
            lifespan="off",
            server_header=False,
            timeout_graceful_shutdown=int(HTTP_STOP_SECONDS),
        )
        self._server = _Server(config)
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        self._task = asyncio.create_task(self._server.serve(sockets=[self._socket]), name="http")

    async def stop(self) -> None:
        self._server.should_exit = True
        if self._task is not None:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._task, HTTP_STOP_SECONDS + 2.0)
        self._socket.close()


class _Server(uvicorn.Server):
    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield
