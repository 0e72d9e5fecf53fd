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
            self._check_size(scope)
            scope.setdefault("state", {})["caller"] = self._admit(scope["path"], Headers(scope=scope))
        except BatonError as error:
            await openai_errors.response(openai_errors.from_baton(error))(scope, receive, send)
        except ApiError as error:
            await openai_errors.response(error)(scope, receive, send)
        else:
            await self._app(scope, receive, send)

    def _check_size(self, scope: Scope) -> None:
        size = len(scope["raw_path"]) + len(scope["query_string"])
        size += sum(len(name) + len(value) for name, value in scope["headers"])
        if size > self._max_header_bytes:
            text = f"the request's headers have {size} bytes; {self._max_header_bytes} are allowed here"
            raise ApiError(431, text, None, "headers_too_large")

    def _admit(self, path: str, headers: Headers) -> Caller | None:
        """Raises BatonError."""
        authorization = ",".join(headers.getlist("authorization"))  # see rpc.door.as_mapping
        if path in OPERATOR:
            if self._door.keys is not None:
                self._door.check_operator(bearer(authorization))
            return None
        if path in OPEN:
            return None
        return self._door.caller(authorization)
