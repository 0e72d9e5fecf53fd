"""Authentication: the cluster's secret and certificates, and the interceptor that checks them.

The secret travels with each call, as metadata. Without TLS whoever reads the connection, or takes over the
port of a dead process, learns it. So it is sent to other machines only over TLS, unless the configuration
allows it in clear.
"""

from __future__ import annotations

import hmac
import os
import ssl
import stat
import tempfile
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
import grpc.aio

from baton.config import NodeConfig
from baton.rpc.address import is_loopback, is_loopback_address
from baton.rpc.channel import MAX_MESSAGE_BYTES, ChannelOptions, Metadata, open_channel
from baton.rpc.errors import BatonError, OnRefused, failed_precondition, refusing, unauthenticated

MAX_BYTES = 2**20


def read_private(path: str, flag: str) -> bytes:
    """The content of a private file. Raises BatonError naming `flag`, also if every user can read the
    file."""
    return _read(path, flag, private=True)


def read_public(path: str, flag: str) -> bytes:
    """The content of a public file such as a certificate. Raises BatonError naming `flag`."""
    return _read(path, flag, private=False)


def write_private(path: Path, content: bytes) -> int:
    """Creates the file, readable by its user only; it must not exist. Returns it open."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    os.write(descriptor, content)
    return descriptor


def _read(path: str, flag: str, private: bool) -> bytes:
    try:
        with Path(path).open("rb") as file:
            about = os.fstat(file.fileno())
            if private and stat.S_ISREG(about.st_mode) and about.st_mode & stat.S_IRWXO:
                raise _unusable(f"{flag}: every user of this machine can read {path}; chmod 600 {path}")
            content = file.read(MAX_BYTES + 1)
    except OSError as error:
        raise _unusable(f"{flag}: cannot read {path}: {error.strerror}") from None
    if len(content) > MAX_BYTES:
        raise _unusable(f"{flag}: {path} has more than {MAX_BYTES} bytes")
    return content


def _unusable(message: str) -> BatonError:
    return failed_precondition(message, "UNUSABLE_FILE")


HEADER = "baton-cluster-secret"
MIN_SECRET_CHARACTERS = 16
REMEDY = "--cluster-cert, --cluster-key and --cluster-ca (mutual TLS), or --cluster-secret-in-clear"


@dataclass(frozen=True, slots=True)
class ClusterTls:
    """PEM texts: the CA of all processes, this one's chain and key. name: see NodeConfig."""

    ca: bytes
    cert: bytes
    key: bytes = field(repr=False)
    name: str = ""

    def server_credentials(self) -> grpc.ServerCredentials:
        return grpc.ssl_server_credentials([(self.key, self.cert)], self.ca, require_client_auth=True)

    def ssl_context(self, server: bool) -> ssl.SSLContext:
        """For Python's own sockets; the other side must show a certificate of the CA. Raises BatonError."""
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER if server else ssl.PROTOCOL_TLS_CLIENT)
        context.verify_mode = ssl.CERT_REQUIRED
        with tempfile.TemporaryDirectory(prefix="baton-") as folder:  # readable by its user only
            cert, key = Path(folder, "cert"), Path(folder, "key")
            cert.write_bytes(self.cert)
            key.write_bytes(self.key)
            try:
                context.load_verify_locations(cadata=self.ca.decode("latin-1"))
                context.load_cert_chain(cert, key)
            except ssl.SSLError as error:
                raise failed_precondition(f"the cluster's certificate cannot be used: {error}") from error
        return context

    def channel_credentials(self) -> grpc.ChannelCredentials:
        return grpc.ssl_channel_credentials(self.ca, self.key, self.cert)


@dataclass(frozen=True, slots=True)
class ClusterCredentials:
    """A process's secret and certificates. With neither, anyone who reaches the process may call it."""

    secret: str = field(default="", repr=False)
    tls: ClusterTls | None = None
    secret_in_clear: bool = False
    """Whether the secret may leave this machine without TLS."""

    @classmethod
    def load(cls, config: NodeConfig) -> ClusterCredentials:
        """Reads the files that the configuration names. Raises BatonError."""
        parts = {
            "--cluster-cert": config.cluster_cert,
            "--cluster-key": config.cluster_key,
            "--cluster-ca": config.cluster_ca,
        }
        tls = None
        if any(parts.values()):
            if missing := [flag for flag, path in parts.items() if not path]:
                raise failed_precondition(f"mutual TLS needs {' and '.join(missing)} too")
            tls = ClusterTls(
                ca=read_public(config.cluster_ca, "--cluster-ca"),
                cert=read_public(config.cluster_cert, "--cluster-cert"),
                key=read_private(config.cluster_key, "--cluster-key"),
                name=config.cluster_tls_name,
            )
        secret = read_secret(config.cluster_secret_file) if config.cluster_secret_file else ""
        return cls(secret, tls, config.cluster_secret_in_clear)

    def dial(self, address: str, max_message_bytes: int = MAX_MESSAGE_BYTES, /) -> grpc.aio.Channel:
        """Opens an authenticated connection to another process of the deployment. See open_channel."""
        return open_channel(
            address,
            max_message_bytes,
            credentials=self.tls.channel_credentials() if self.tls is not None else None,
            tls_name=self.tls.name if self.tls is not None else "",
            metadata=self.metadata(address, encrypted=self.tls is not None),
        )

    def metadata(self, address: str, encrypted: bool) -> Metadata:
        """Credentials for the process at host:port. Empty, with a log line, if the secret would leave this
        machine in clear; the process then refuses the call."""
        if not self.secret:
            return ()
        if not (encrypted or self.secret_in_clear or is_loopback_address(address)):
            from baton.rpc.logs import get_logger  # here: `baton health`, which logs nothing, starts sooner

            get_logger().warning("cluster secret not sent in clear", address=address, give=REMEDY)
            return ()
        return ((HEADER, self.secret),)

    def refusal(self, metadata: Mapping[str, str]) -> BatonError | None:
        """Why a call with this metadata is not authenticated; None: it is."""
        if not self.secret or same(metadata.get(HEADER, ""), self.secret):
            return None
        problem = (
            "is another one"
            if HEADER in metadata
            else "is missing (without TLS it is not sent to other machines)"
        )
        return unauthenticated(
            "this service is for processes of the same deployment, and the caller's cluster secret "
            f"{problem}: give both the same --cluster-secret-file",
            "CLUSTER_SECRET",
        )


def read_secret(path: str, flag: str = "--cluster-secret-file") -> str:
    """Raises BatonError if the file cannot be read, is readable by all users, or holds no secret."""
    secret = read_private(path, flag).decode("latin-1").strip()
    if len(secret) < MIN_SECRET_CHARACTERS or not (secret.isascii() and secret.isprintable()):
        raise failed_precondition(
            f"{flag}: {path} must hold one line of {MIN_SECRET_CHARACTERS} or more printable ASCII "
            f"characters; openssl rand -hex 32 > {path}",
            "UNUSABLE_FILE",
        )
    return secret


def read_metrics_token(config: NodeConfig) -> str:
    """Empty: there is none. Raises BatonError."""
    path = config.metrics_token_file
    return read_secret(path, "--metrics-token-file") if path else ""


def same(one: str, other: str) -> bool:
    """Compares in constant time."""
    return hmac.compare_digest(one.encode("utf-8", "replace"), other.encode("utf-8", "replace"))


HEALTH = "grpc.health.v1.Health"
"""Needs no authentication: it only says whether the process serves."""


class ClusterAuthentication:
    """Authentication of the gRPC server of a process that only processes of the deployment call."""

    def __init__(self, cluster: ClusterCredentials) -> None:
        self.cluster = cluster

    def refusal(self, service: str, metadata: Mapping[str, str]) -> BatonError | None:
        """Why a call to the service is refused; None: it is accepted. Called for all services but HEALTH."""
        return self.cluster.refusal(metadata)

    def credentials(self) -> grpc.ServerCredentials | None:
        """TLS; None: none."""
        return self.cluster.tls.server_credentials() if self.cluster.tls is not None else None

    def options(self) -> ChannelOptions:
        """Additional options of the server."""
        return []

    def missing(self, reachable: bool) -> str:
        """Missing options, as a message; empty: none. reachable: other machines can connect."""
        cluster = self.cluster
        if cluster.tls is not None or (cluster.secret and (cluster.secret_in_clear or not reachable)):
            return ""
        if cluster.secret:
            return f"{REMEDY}: callers would send the secret in clear"
        return "--cluster-secret-file FILE (or --cluster-cert, --cluster-key and --cluster-ca)"


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


def check_address(host: str, authentication: ClusterAuthentication, insecure: bool) -> None:
    """Raises BatonError if other machines can reach `host` and there is no authentication."""
    if insecure or is_loopback(host):
        return
    if missing := authentication.missing(reachable=True):
        raise failed_precondition(
            f"other machines can reach {host or 'all addresses'}: give {missing}, or --insecure on a network "
            "that you trust",
            "INSECURE",
        )
