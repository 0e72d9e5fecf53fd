"""Who may use the HTTP API, and how large a request's headers may be: asked before a body is read."""

from __future__ import annotations

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from baton.gateway import openai_errors
from baton.gateway.callers import Caller
from baton.gateway.door import PublicDoor
from baton.gateway.openai_errors import ApiError
from baton.rpc.door import bearer
from baton.rpc.errors import BatonError
from baton.rpc.http_server import authorization

OPEN = ("/health",)
"""It says whether requests are served, and where there are keys nothing else."""
OPERATOR = ("/metrics",)


class HttpDoor:
    """ASGI middleware. Behind it the request's `state.caller` says who asks."""

    def __init__(self, app: ASGIApp, door: PublicDoor, max_header_bytes: int) -> None:
        self._app = app
        self._door = door
        self._max_header_bytes = max_header_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        try:
            headers = Headers(scope=scope)
            self._check_headers(scope, headers)
            scope.setdefault("state", {})["caller"] = self._admit(scope["path"], headers)
        except BatonError as error:
            await openai_errors.response(openai_errors.from_baton(error))(scope, receive, send)
        except ApiError as error:
            answer = openai_errors.response(error)
            answer.headers["connection"] = "close"
            await answer(scope, receive, send)
        else:
            await self._app(scope, receive, send)

    def _check_headers(self, scope: Scope, headers: Headers) -> None:
        if "content-length" in headers and "transfer-encoding" in headers:
            # Where a proxy goes by the one and this server by the other, they see different requests
            # (request smuggling; RFC 9112, section 6.3).
            text = "the request has both Content-Length and Transfer-Encoding: send one of them"
            raise ApiError(400, text, None, "invalid_http")
        size = len(scope["raw_path"]) + len(scope["query_string"])
        size += sum(len(name) + len(value) for name, value in scope["headers"])
        if size > self._max_header_bytes:
            text = f"the request's headers have {size} bytes; {self._max_header_bytes} are allowed here"
            raise ApiError(431, text, None, "headers_too_large")

    def _admit(self, path: str, headers: Headers) -> Caller | None:
        """Raises BatonError."""
        if path in OPERATOR:
            if self._door.keys is not None:
                self._door.check_operator(bearer(authorization(headers)))
            return None
        if path in OPEN:
            return None
        return self._door.caller(authorization(headers))
