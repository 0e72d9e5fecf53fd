"""The page over HTTP: who may see it, its files, its stream of frames."""

from __future__ import annotations

import base64
import binascii
import hashlib
from collections.abc import AsyncIterator
from contextlib import aclosing
from pathlib import Path

from starlette.datastructures import Headers
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route, Router
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from baton.api.http_record import client_of
from baton.api.page.feed import Feed
from baton.authentication.gateway import GatewayAuthentication
from baton.authentication.interceptor import bearer
from baton.gateway.gateway import Gateway
from baton.rpc.errors import BatonError
from baton.rpc.http_server import UNBUFFERED, authorization

STATIC = Path(__file__).parent / "static"
TYPES = {".html": "text/html", ".css": "text/css", ".js": "text/javascript", ".svg": "image/svg+xml"}
HEADERS = {
    # Nothing but the page's own files; no text becomes markup or code, wherever it comes from.
    "content-security-policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'; "
    "require-trusted-types-for 'script'; trusted-types 'none'",
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
}
REALM = 'Basic realm="Baton: any name, and the cluster secret as the password", charset="UTF-8"'


class PageApp:
    """ASGI: `/` and `/page/...` are the page's, all else is the API's."""

    def __init__(
        self, api: ASGIApp, gateway: Gateway, authentication: GatewayAuthentication, address: str
    ) -> None:
        """address: host:port of the gateway's gRPC server."""
        self.feed = Feed(gateway, address, authentication.keys is not None)
        self._api = api
        self._gateway = gateway
        self._authentication = authentication
        files = {path.name: path.read_bytes() for path in STATIC.iterdir() if path.suffix in TYPES}
        self._files = {name: (data, hashlib.sha256(data).hexdigest()[:16]) for name, data in files.items()}
        self._router = Router(
            [
                Route("/", self._index),
                Route("/page/events", self._events),
                Route("/page/requests/{id}", self._request),
                Route("/page/{name}", self._file),
            ]
        )

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or not (scope["path"] == "/" or scope["path"].startswith("/page/")):
            await self._api(scope, receive, send)
            return

        async def send_safely(message: Message) -> None:
            if message["type"] == "http.response.start":
                extra = [(name.encode(), value.encode()) for name, value in HEADERS.items()]
                message["headers"] = [*message["headers"], *extra]
            await send(message)

        headers = Headers(scope=scope)
        answer = self._refusal(headers)
        if answer is not None:
            self._gateway.refused("http", "PAGE_CLOSED", None, client_of(scope), status=answer.status_code)
        await (answer or self._router)(scope, receive, send_safely)

    def _refusal(self, headers: Headers) -> Response | None:
        """For callers that may not see the page."""
        if self._authentication.keys is None:
            try:
                self._authentication.check_host(headers.get("host", ""))
            except BatonError as error:
                return PlainTextResponse(f"{error.message}\n", 403)
            return None
        try:
            self._authentication.check_operator(_secret(authorization(headers)))
        except BatonError as error:
            if not self._authentication.cluster.secret:
                return PlainTextResponse(f"{error.message}\n", 403)
            return PlainTextResponse(f"{error.message}\n", 401, {"www-authenticate": REALM})
        return None

    async def _index(self, request: Request) -> Response:
        return self._answer("index.html", request)

    async def _file(self, request: Request) -> Response:
        return self._answer(request.path_params["name"], request)

    def _answer(self, name: str, request: Request) -> Response:
        if name not in self._files:
            return PlainTextResponse("there is no such file\n", 404)
        data, version = self._files[name]
        headers = {"cache-control": "no-cache", "etag": f'"{version}"'}
        if request.headers.get("if-none-match") == headers["etag"]:
            return Response(status_code=304, headers=headers)
        return Response(data, headers=headers, media_type=TYPES[Path(name).suffix])

    async def _request(self, request: Request) -> Response:
        life = await self.feed.requests.life(request.path_params["id"])
        if life is None:
            return PlainTextResponse("this request is no longer remembered\n", 404)
        return JSONResponse(life, headers={"cache-control": "no-store"})

    async def _events(self, request: Request) -> Response:
        headers = {"cache-control": "no-store", **UNBUFFERED}
        if request.method == "HEAD":  # whose answer ends
            return Response(media_type="text/event-stream", headers=headers)
        return StreamingResponse(self._stream(), media_type="text/event-stream", headers=headers)

    async def _stream(self) -> AsyncIterator[bytes]:
        try:
            async with aclosing(self.feed.follow()) as frames:
                yield b"retry: 1000\n\n"
                async for frame in frames:
                    yield b"data: %b\n\n" % frame
        except BatonError as error:
            yield f"event: refused\ndata: {error.message}\n\n".encode()


def _secret(credentials: str) -> str:
    """The token of `Bearer TOKEN`, or the password of `Basic ...` (RFC 7617), which browsers ask for."""
    scheme, _, rest = credentials.partition(" ")
    if scheme.lower() != "basic":
        return bearer(credentials)
    try:
        return base64.b64decode(rest.strip(), validate=True).decode().partition(":")[2]
    except (binascii.Error, UnicodeDecodeError):
        return ""
