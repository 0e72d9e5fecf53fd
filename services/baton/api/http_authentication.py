"""What is done with an HTTP request before it is handled: checks of headers and credentials, and its name."""

from __future__ import annotations

import re
import uuid

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from baton.api import http_errors
from baton.api.http_record import REFUSAL
from baton.api.openai_errors import ApiError, from_baton
from baton.api.traces_http import TRACES_PATH
from baton.authentication.api_keys import ApiKey
from baton.authentication.gateway import GatewayAuthentication
from baton.authentication.interceptor import bearer
from baton.rpc.errors import BatonError
from baton.rpc.http_server import authorization

PUBLIC_PATHS = ("/health", "/ping")
"""With API keys, they only say whether requests are served."""
METRICS_PATH = "/metrics"
OPERATOR_PATHS = (TRACES_PATH,)


class HttpAuthentication:
    """ASGI middleware: checks headers and credentials. Sets the request's `state.api_key`."""

    def __init__(self, app: ASGIApp, authentication: GatewayAuthentication, max_header_bytes: int) -> None:
        self._app = app
        self._authentication = authentication
        self._max_header_bytes = max_header_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        scope.setdefault("state", {})
        try:
            headers = Headers(scope=scope)
            self._check_headers(scope, headers)
            scope["state"]["api_key"] = self._admit(scope["path"], headers)
        except BatonError as error:
            scope["state"][REFUSAL] = (error.reason.lower(), error.field, error.message)
            await http_errors.response(from_baton(error), scope["path"])(scope, receive, send)
        except ApiError as error:
            scope["state"][REFUSAL] = (error.code or "", error.param, error.message)
            answer = http_errors.response(error, scope["path"])
            answer.headers["connection"] = "close"
            await answer(scope, receive, send)
        else:
            await self._app(scope, receive, send)

    def _check_headers(self, scope: Scope, headers: Headers) -> None:
        if "content-length" in headers and "transfer-encoding" in headers:
            # Request smuggling (RFC 9112, section 6.3): a proxy in front may use the other of the two.
            text = "the request has both Content-Length and Transfer-Encoding: send one of them"
            raise ApiError(400, text, None, "invalid_http")
        size = len(scope["raw_path"]) + len(scope["query_string"])
        size += sum(len(name) + len(value) for name, value in scope["headers"])
        if size > self._max_header_bytes:
            text = f"the request's headers have {size} bytes; {self._max_header_bytes} are allowed here"
            raise ApiError(431, text, None, "headers_too_large")

    def _admit(self, path: str, headers: Headers) -> ApiKey | None:
        """Raises BatonError."""
        self._authentication.check_host(headers.get("host", ""))
        if path == METRICS_PATH:
            self._authentication.check_metrics(bearer(_credentials(headers)))
            return None
        if path in OPERATOR_PATHS:
            if self._authentication.keys is not None:
                self._authentication.check_operator(bearer(_credentials(headers)))
            return None
        if path in PUBLIC_PATHS:
            return None
        return self._authentication.api_key(_credentials(headers))


def _credentials(headers: Headers) -> str:
    """What the request's `authorization` header says; x-api-key is another way to say `Bearer KEY`."""
    header = authorization(headers)
    keys = {f"Bearer {key}" for key in headers.getlist("x-api-key")} - {header}
    return ",".join([*([header] if header else []), *sorted(keys)])


class RequestIds:
    """ASGI middleware: every answer has the header x-request-id, the client's own or a random one."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        header = Headers(scope=scope).get("x-request-id", "")
        id = header if re.fullmatch(r"[\x21-\x7e]{1,128}", header) else uuid.uuid4().hex

        async def send_named(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message)["x-request-id"] = id
            await send(message)

        await self._app(scope, receive, send_named)
