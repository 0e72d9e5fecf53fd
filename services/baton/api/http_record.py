"""ASGI middleware: counts HTTP requests by route and status, and logs those that were refused before they
became a request of the gateway."""

from __future__ import annotations

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from baton.gateway.gateway import Gateway

REFUSAL = "refusal"
"""Key of the scope's `state`: (reason, field, message) of the error that was answered."""
BEGUN = "begun"
"""Key of the scope's `state`: requests of the gateway were begun, which log their own ends."""


class HttpRecord:
    def __init__(self, app: ASGIApp, gateway: Gateway) -> None:
        self._app = app
        self._gateway = gateway

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        state = scope.setdefault("state", {})
        status = 500

        async def send_seen(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        try:
            await self._app(scope, receive, send_seen)
        finally:
            route = getattr(scope.get("route"), "path", "") or "other"
            self._gateway.metrics.http_requests.labels(route, str(status)).inc()
            if status >= 400 and not state.get(BEGUN):
                reason, field, told = state.get(REFUSAL, ("", None, ""))
                self._gateway.refused(
                    "http",
                    reason.upper() or f"STATUS_{status}",
                    field,
                    client_of(scope),
                    getattr(state.get("api_key"), "name", ""),
                    message=told,
                    status=status,
                    route=route,
                )


def client_of(scope: Scope) -> str:
    """The address of the client, or of the proxy in front."""
    return str((scope.get("client") or ("",))[0])
