"""HTTP: uvicorn in a process's event loop, with limits on clients; /metrics and /health."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import ssl
from collections.abc import Callable, Collection, Iterator, Sequence
from functools import partial
from typing import Any, cast

import h11
import uvicorn
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry
from starlette.applications import Starlette
from starlette.datastructures import Headers
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp
from uvicorn.protocols.http.h11_impl import H11Protocol

from baton.authentication.cluster import same
from baton.authentication.interceptor import bearer
from baton.rpc.address import family_of, is_own_host
from baton.rpc.metrics import exposition
from baton.rpc.tasks import wait_at_most

STOP_SECONDS = 2.0
SEND_BYTES = 128 * 2**10
"""Kernel buffer for an answer that a client does not read."""
UNREAD_SECONDS = 20.0
IDLE_SECONDS = 20
"""Time for a request's headers, from the connection's start or the last answer."""
MAX_HEADER_BYTES = 16 * 2**10
UNBUFFERED = {"x-accel-buffering": "no"}
"""Headers of a stream, which nginx then passes on as it comes, rather than in pieces of its buffers' size."""

Health = Callable[[], tuple[bool, list[str]]]
"""Whether the process serves, and its problems."""


class HttpServer:
    """Serves an application from sockets until stop(). Handles no signals."""

    def __init__(
        self,
        app: ASGIApp,
        sockets: Sequence[socket.socket],
        tls: ssl.SSLContext | None = None,
        *,
        max_header_bytes: int = MAX_HEADER_BYTES,
        keep_alive: bool = True,
        on_malformed: Callable[[str], None] | None = None,
    ) -> None:
        """max_header_bytes: the application answers 431 to more; beyond twice as many the answer is 400.
        keep_alive False: a connection is closed after its first answer. on_malformed: called with the
        client's address for what is no HTTP request and never reaches the application."""
        self._sockets = list(sockets)
        self._server = _Server(
            uvicorn.Config(
                app,
                http=cast(type[asyncio.Protocol], partial(_Protocol, on_malformed=on_malformed)),
                ws="none",
                log_config=None,
                log_level="error",  # its warnings are of what clients send: a line for each
                access_log=False,
                lifespan="off",
                proxy_headers=False,
                server_header=False,
                headers=[] if keep_alive else [("connection", "close")],
                timeout_keep_alive=IDLE_SECONDS,
                timeout_graceful_shutdown=int(STOP_SECONDS),
                h11_max_incomplete_event_size=2 * max_header_bytes,
                ssl_context_factory=(lambda _config, _default: tls) if tls is not None else None,
            )
        )
        self._task: asyncio.Task[None] | None = None

    @property
    def port(self) -> int:
        """Port of the first socket."""
        return int(self._sockets[0].getsockname()[1])

    def start(self) -> None:
        self._task = asyncio.create_task(self._server.serve(sockets=self._sockets), name="http")

    async def stop(self) -> None:
        self._server.end()
        if self._task is not None:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._task, STOP_SECONDS + 2.0)
        for each in self._sockets:
            each.close()


def listen(
    host: str, port: int, *, shared: bool = False, unread_seconds: float = UNREAD_SECONDS
) -> socket.socket:
    """shared: other processes of this user may bind it too. unread_seconds: the kernel resets a connection
    whose client has read nothing for this time. Raises OSError."""
    host = host.strip("[]")
    found = socket.create_server((host, port), family=family_of(host), backlog=1024, reuse_port=shared)
    # Accepted connections inherit both options.
    found.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BYTES)
    found.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(1000 * unread_seconds))
    return found


def metrics_app(
    registry: CollectorRegistry,
    health: Health,
    secret: str = "",
    token: str = "",
    model: Callable[[], str] = lambda: "",
    hosts: Collection[str] = ("*",),
) -> Starlette:
    """GET /metrics and GET /health (503 while the process does not serve).

    secret, token: metrics need one of those that are given, as `Authorization: Bearer SECRET`; with a secret
    /health only returns its status. model: name of the model that is served. hosts:
    the names by which it is asked, beside addresses (see `is_own_host`).
    """

    def refusal(request: Request) -> Response | None:
        if is_own_host(request.headers.get("host", ""), hosts):
            return None
        return PlainTextResponse("ask by address, or start the process with --allowed-hosts NAME\n", 403)

    async def metrics(request: Request) -> Response:
        if refused := refusal(request):
            return refused
        if (secret or token) and not opens(bearer(authorization(request.headers)), secret, token):
            text = "send the cluster secret or the metrics token: Authorization: Bearer SECRET\n"
            return PlainTextResponse(text, 401, {"WWW-Authenticate": "Bearer"})
        return Response(exposition(registry, model()), media_type=CONTENT_TYPE_LATEST)

    async def healthy(request: Request) -> Response:
        if refused := refusal(request):
            return refused
        serving, problems = health()
        body = {"status": "serving" if serving else "not serving"}
        return JSONResponse(body if secret else {**body, "problems": problems}, 200 if serving else 503)

    async def elsewhere(request: Request, error: Exception) -> Response:
        return PlainTextResponse("see /metrics and /health\n", 404)

    routes = [Route("/metrics", metrics), Route("/health", healthy)]
    return Starlette(routes=routes, exception_handlers={404: elsewhere})


def opens(header: str, *secrets: str) -> bool:
    """Whether it is one of the secrets that are not empty."""
    return any(same(header, secret) for secret in secrets if secret)


def authorization(headers: Headers) -> str:
    """All `authorization` headers as one value (see authentication.interceptor.as_mapping), so that two
    credentials are refused."""
    return ",".join(headers.getlist("authorization"))


class _Server(uvicorn.Server):
    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self._ending = asyncio.Event()

    def end(self) -> None:
        self.should_exit = True
        self._ending.set()

    async def main_loop(self) -> None:
        """Renews the header Date, as uvicorn's does; that one wakes an idle process ten times a second."""
        while not await self.on_tick(0):
            await wait_at_most(1.0, self._ending)

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


class _Protocol(H11Protocol):
    """Closes connections of clients that send nothing, or their headers byte by byte.

    uvicorn's keep-alive timer begins with the first answer and ends with the next byte. This one begins with
    the connection, and ends when the headers are complete.
    """

    def __init__(self, *args: Any, on_malformed: Callable[[str], None] | None, **settings: Any) -> None:
        super().__init__(*args, **settings)
        self._on_malformed = on_malformed

    def send_400_response(self, msg: str) -> None:
        if self._on_malformed is not None:
            self._on_malformed((self.client or ("",))[0])
        super().send_400_response(msg)

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self.timeout_keep_alive_task = self.loop.call_later(IDLE_SECONDS, self.timeout_keep_alive_handler)

    def _unset_keepalive_if_required(self) -> None:
        if self.conn.our_state is h11.SEND_RESPONSE or self.transport.is_closing():
            super()._unset_keepalive_if_required()
