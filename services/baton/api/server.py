"""The gateway process: gRPC and HTTP in one event loop."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import ssl
from collections.abc import Sequence

import grpc.aio

from baton.api.http_api import make_app
from baton.api.page.app import PageApp
from baton.authentication.gateway import GatewayAuthentication
from baton.authentication.interceptor import as_mapping
from baton.config import GatewayConfig
from baton.gateway.gateway import Gateway
from baton.gateway.grpc_inference import WRITE_SECONDS, InferenceServicer
from baton.gateway.traces import TRACES, TracesServicer
from baton.rpc.address import is_loopback, join_address, peer_host
from baton.rpc.bind import bind_http, host_and_port
from baton.rpc.errors import BatonError, failed_precondition
from baton.rpc.http_server import HttpServer
from baton.rpc.logs import get_logger
from baton.rpc.node import run_node
from baton.v1 import inference_pb2, inference_pb2_grpc, node_pb2, trace_pb2_grpc

START_SECONDS = 60.0
"""How long the start waits for a tokenizer and a decode node. Then the gateway serves, and refuses with
UNAVAILABLE what it cannot serve."""

_log = get_logger()


async def serve(
    config: GatewayConfig, *, ready: asyncio.Event | None = None, stop: asyncio.Event | None = None
) -> int:
    """Runs the gateway until it is stopped. Returns the process's exit code. Unless `stop` is given,
    SIGHUP reloads the API keys."""
    node = GatewayNode(config)
    loop = asyncio.get_running_loop()
    if stop is None:
        loop.add_signal_handler(signal.SIGHUP, node.reload)
    try:
        return await run_node(
            node,
            config,
            authentication=node.authentication,
            serve_metrics_http=False,
            registry=node.gateway.metrics.registry,
            ready=ready,
            stop=stop,
            on_refused=node.refused,
        )
    finally:
        if stop is None:
            loop.remove_signal_handler(signal.SIGHUP)


class GatewayNode:
    """The gateway process, as run_node runs it."""

    role = "gateway"

    def __init__(self, config: GatewayConfig) -> None:
        """Raises BatonError when files of the configuration cannot be used."""
        self._config = config
        self.authentication = GatewayAuthentication(config)
        self.gateway = Gateway(config, self.authentication.cluster.dial, self.authentication.cluster)
        self.address = ""
        """host:port of the gRPC server, once bound."""
        self.recorder = self.gateway.recorder
        self._http: HttpServer | None = None

    def add_services(self, server: grpc.aio.Server) -> Sequence[str]:
        servicer = InferenceServicer(self.gateway, self.authentication)
        inference_pb2_grpc.add_InferenceServicer_to_server(servicer, server)
        trace_pb2_grpc.add_TracesServicer_to_server(TracesServicer(self.gateway.traces), server)
        return [inference_pb2.DESCRIPTOR.services_by_name["Inference"].full_name, TRACES]

    async def start(self, address: str) -> None:
        """Serves HTTP (so that /health can say what is missing), and waits for the peers."""
        self.address = address
        if not self._config.tls_cert and not is_loopback(self._config.host):
            _log.warning(
                "keys and prompts travel in clear: give --tls-cert, or a proxy in front that ends TLS"
            )
        if self._config.http_port is not None:
            self._http = self._make_http(self._config.http_port)
            self._http.start()
            self._page.feed.start()
        self.gateway.start()
        if not await self.gateway.wait_until_usable(START_SECONDS):
            _log.warning("serving without all peers", missing="; ".join(self.gateway.missing()))

    def _make_http(self, port: int) -> HttpServer:
        """Binds. Raises BatonError if a port is in use or the certificate cannot be used."""
        config = self._config
        tls = None
        if config.tls_cert:
            tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
            try:
                tls.load_cert_chain(config.tls_cert, config.tls_key)
            except ssl.SSLError as error:
                text = f"--tls-cert and --tls-key cannot be used: {error.reason or error}"
                raise failed_precondition(text, "BAD_CERTIFICATE") from None
        unread_seconds = config.slow_reader_seconds + WRITE_SECONDS
        sockets = [bind_http(config.host, port, unread_seconds=unread_seconds)]
        if config.shared_http:
            flag = "--shared-http"
            where = host_and_port(config.shared_http, flag)
            sockets.append(bind_http(*where, flag, shared=True, unread_seconds=unread_seconds))
        api = make_app(self.gateway, self.authentication)
        self._page = PageApp(api, self.gateway, self.authentication, self.address)
        return HttpServer(
            self._page,
            sockets,
            tls,
            max_header_bytes=config.max_header_bytes,
            on_malformed=lambda client: self.gateway.refused("http", "INVALID_HTTP", None, client),
        )

    async def drain(self, seconds: float) -> int:
        return await self.gateway.drain(seconds)

    async def stop(self) -> None:
        await self.gateway.stop()
        if self._http is not None:
            await self._page.feed.close()
            await self._http.stop()

    def refused(self, error: BatonError, context: grpc.aio.ServicerContext) -> None:
        """A gRPC call has ended before it became a request."""
        key = ""
        if self.authentication.keys is not None:
            with contextlib.suppress(BatonError):
                header = as_mapping(context.invocation_metadata()).get("authorization", "")
                key = self.authentication.api_key(header).name
        client = peer_host(context.peer())
        self.gateway.refused("grpc", error.reason, error.field, client, key, message=error.message)

    def reload(self) -> None:
        """Reads the API keys again."""
        if self.authentication.keys is not None:
            self.authentication.keys.reload()

    def info(self) -> node_pb2.NodeInfo:
        info = self.gateway.info()
        if self._http is not None:
            info.http_address = join_address(self._config.host, self._http.port)
        # Gateways do not connect to each other. They are listed so that `baton status` finds all from one.
        info.peers.extend(node_pb2.Peer(role="gateway", address=each) for each in self._config.siblings)
        return info

    def load(self) -> node_pb2.Load:
        return self.gateway.load()
