"""Who may call a process, over what, and on which addresses it may wait for calls."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from typing import Any, Protocol

import grpc
import grpc.aio

from baton.rpc.address import is_loopback
from baton.rpc.channel import Options
from baton.rpc.cluster import REMEDY, Cluster
from baton.rpc.errors import BatonError, abort, failed_precondition

HEALTH = "grpc.health.v1.Health"
"""Open to everybody who can connect: it says whether the process serves, and nothing else."""


class Door(Protocol):
    """Of one process's gRPC server."""

    cluster: Cluster

    def refusal(self, service: str, metadata: Mapping[str, str]) -> BatonError | None:
        """Why a call to the service is refused; None: it may come in. Asked for all services but HEALTH."""
        ...

    def credentials(self) -> grpc.ServerCredentials | None:
        """TLS; None: none."""
        ...

    def options(self) -> Options:
        """More options for the server."""
        ...

    def missing(self, reachable: bool) -> str:
        """What must be given, for people; empty: nothing. reachable: other machines can connect."""
        ...


class ClusterDoor:
    """Of a process that only other processes of the deployment call."""

    def __init__(self, cluster: Cluster) -> None:
        self.cluster = cluster

    def refusal(self, service: str, metadata: Mapping[str, str]) -> BatonError | None:
        return self.cluster.refusal(metadata)

    def credentials(self) -> grpc.ServerCredentials | None:
        return self.cluster.tls.server_credentials() if self.cluster.tls is not None else None

    def options(self) -> Options:
        return []

    def missing(self, reachable: bool) -> str:
        cluster = self.cluster
        if cluster.tls is not None or (cluster.secret and (cluster.secret_in_clear or not reachable)):
            return ""
        if cluster.secret:
            return f"{REMEDY}: callers would send the secret in clear"
        return "--cluster-secret-file FILE (or --cluster-cert, --cluster-key and --cluster-ca)"


class DoorKeeper(grpc.aio.ServerInterceptor):  # type: ignore[misc]
    """Ends calls that the door refuses before a message of them is read. To be the first interceptor."""

    def __init__(self, door: Door) -> None:
        self._door = door

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Any]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Any:
        service = handler_call_details.method.rpartition("/")[0].removeprefix("/")
        if service != HEALTH:
            error = self._door.refusal(service, as_mapping(handler_call_details.invocation_metadata))
            if error is not None:
                return grpc.stream_stream_rpc_method_handler(_ending(error))
        return await continuation(handler_call_details)


def as_mapping(metadata: Any) -> dict[str, str]:
    """Metadata's texts by name; those of one name joined by commas, as HTTP has it (RFC 9110, section 5.3).

    So a right credential beside a wrong one opens nothing, and does not depend on who looks for which.
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


def check_address(host: str, door: Door, insecure: bool) -> None:
    """Raises BatonError when strangers could reach `host` and nothing would keep them out."""
    if insecure or is_loopback(host):
        return
    if missing := door.missing(reachable=True):
        raise failed_precondition(
            f"{host or 'any address'} can be reached by strangers: give {missing}, or --insecure where only "
            "friends can connect",
            "INSECURE",
        )


def _ending(error: BatonError) -> Callable[..., Awaitable[None]]:
    async def end(_requests: Any, context: grpc.aio.ServicerContext) -> None:
        await abort(context, error)

    return end
