"""The gateway's HTTP server: uvicorn in its event loop, with bounds on what a connection may hold."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import ssl
import sys
from collections.abc import Iterator

import h11
import uvicorn
from starlette.types import ASGIApp
from uvicorn.protocols.http.h11_impl import H11Protocol

from baton.config import GatewayConfig
from baton.gateway.inference import WRITE_SECONDS
from baton.gateway.openai_errors import ApiError, body
from baton.rpc.address import family_of, join_address, split_address
from baton.rpc.errors import failed_precondition, invalid, unavailable

HTTP_STOP_SECONDS = 2.0
HTTP_SEND_BYTES = 128 * 2**10
HEADER_SECONDS = 20.0
"""A request's headers must have arrived by then: from the connection's begin, or from their first byte."""
IDLE_SECONDS = 30
"""A connection between two requests is closed after so long."""


class HttpServer:
    """Signals are run_node's."""

    def __init__(self, app: ASGIApp, config: GatewayConfig) -> None:
        """Binds. Raises BatonError when the port cannot be had or the certificate cannot be used."""
        host, port = config.host.strip("[]"), config.http_port or 0
        settings = uvicorn.Config(
            app,
            http=_Protocol,
            ws="none",
            log_config=None,
            access_log=False,
            lifespan="off",
            server_header=False,
            timeout_keep_alive=IDLE_SECONDS,
            timeout_graceful_shutdown=int(HTTP_STOP_SECONDS),
            # What is a little larger is refused by the application, with the sizes.
            h11_max_incomplete_event_size=2 * config.max_header_bytes,
            ssl_certfile=config.tls_cert or None,
            ssl_keyfile=config.tls_key or None,
        )
        try:
            settings.load()
        except ssl.SSLError as error:
            raise failed_precondition(
                f"--tls-cert and --tls-key cannot be used: {error.reason or error}", "BAD_CERTIFICATE"
            ) from None
        try:
            self._sockets = [_listen(host, port, config)]
            if config.shared_http:
                host, port = split_address(config.shared_http)
                self._sockets.append(_listen(host, port, config, shared=True))
        except ValueError as error:
            raise invalid("shared_http", f"--shared-http: {error}") from None
        except OSError as error:
            raise unavailable(
                f"cannot serve HTTP on {host}:{port}: {error.strerror or error}; choose another --http-port",
                "PORT_TAKEN",
            ) from None
        self.address = join_address(config.host, self._sockets[0].getsockname()[1])
        self._server = _Server(settings)
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        self._task = asyncio.create_task(self._server.serve(sockets=self._sockets), name="http")

    async def stop(self) -> None:
        self._server.should_exit = True
        if self._task is not None:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._task, HTTP_STOP_SECONDS + 2.0)
        for each in self._sockets:
            each.close()


def _listen(host: str, port: int, config: GatewayConfig, shared: bool = False) -> socket.socket:
    """shared: with other processes of this user. Raises OSError."""
    found = socket.create_server((host, port), family=family_of(host), backlog=1024, reuse_port=shared)
    # Accepted connections inherit both. The kernel keeps no more than this of what a client does not read,
    # and resets a connection whose client has taken nothing for so long.
    found.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, HTTP_SEND_BYTES)
    unread_ms = int(1000 * (config.slow_reader_seconds + WRITE_SECONDS))
    found.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, unread_ms)
    return found


class _Server(uvicorn.Server):
    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


class _Protocol(H11Protocol):
    """uvicorn's, which waits for headers without end, and says 400 to headers of any size."""

    _header_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._header_timer = self.loop.call_later(HEADER_SECONDS, self.transport.close)

    def connection_lost(self, exc: Exception | None) -> None:
        self._watch(False)
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        # Either headers that have begun, or what still comes after an answer that did not wait for it.
        unasked = self.conn.our_state is h11.DONE and self.conn.their_state is h11.SEND_BODY
        self._watch(self.conn.their_state is h11.IDLE or unasked)

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._watch(False)  # from here to the next byte uvicorn's own timer runs

    def _watch(self, waiting: bool) -> None:
        """The timer is not set anew by a byte now and then."""
        if not waiting and self._header_timer is not None:
            self._header_timer.cancel()
            self._header_timer = None
        elif waiting and self._header_timer is None:
            self._header_timer = self.loop.call_later(HEADER_SECONDS, self.transport.close)

    def send_400_response(self, msg: str) -> None:
        """Called while the error is handled."""
        hint = getattr(sys.exc_info()[1], "error_status_hint", 400)
        error = ApiError(400, "this is no HTTP request", None, "invalid_http")
        if hint == 431:
            error = ApiError(
                431, "the request's headers are larger than allowed here", None, "headers_too_large"
            )
        content = json.dumps(body(error)).encode()
        headers = [
            ("content-type", "application/json"),
            ("content-length", str(len(content))),
            ("connection", "close"),
        ]
        for event in (
            h11.Response(status_code=error.status, headers=headers),
            h11.Data(data=content),
            h11.EndOfMessage(),
        ):
            self.transport.write(self.conn.send(event) or b"")
        self.transport.close()
