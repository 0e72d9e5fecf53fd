"""Authenticates the calls of a gRPC server by their metadata."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

import grpc
import grpc.aio

from baton.authentication.cluster import ClusterAuthentication
from baton.rpc.errors import OnRefused, refusing

HEALTH = "grpc.health.v1.Health"
"""Needs no authentication: it only says whether the process serves."""


class AuthenticationInterceptor(grpc.aio.ServerInterceptor):  # type: ignore[misc]
    """Ends refused calls before a message of them is read. Must be the first interceptor."""

    def __init__(self, authentication: ClusterAuthentication, on_refused: OnRefused | None = None) -> None:
        self._authentication = authentication
        self._on_refused = on_refused

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Any]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Any:
        service = handler_call_details.method.rpartition("/")[0].removeprefix("/")
        if service != HEALTH:
            error = self._authentication.refusal(
                service, as_mapping(handler_call_details.invocation_metadata)
            )
            if error is not None:
                return refusing(error, self._on_refused)
        return await continuation(handler_call_details)


def as_mapping(metadata: Any) -> dict[str, str]:
    """Metadata's texts by name; those of one name joined by commas, as HTTP has it (RFC 9110, section 5.3).

    So a right credential beside a wrong one is refused, whichever header is looked at.
    """
    found: dict[str, list[str]] = {}
    for name, value in metadata or ():
        if isinstance(value, str):
            found.setdefault(name, []).append(value)
    return {name: ",".join(values) for name, values in found.items()}


def bearer(authorization: str) -> str:
    """The token of `Bearer TOKEN` (RFC 6750, section 2.1); empty: there is none."""
    scheme, _, token = authorization.partition(" ")
    return token.strip() if scheme.lower() == "bearer" else ""
