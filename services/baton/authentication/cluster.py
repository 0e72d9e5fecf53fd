"""The cluster's secret and certificates, which the processes of a deployment show each other.

The secret travels with each call, as metadata. Without TLS whoever reads the connection, or takes over the
port of a dead process, learns it. So it is sent to other machines only over TLS, unless the configuration
allows it in clear.
"""

from __future__ import annotations

import hmac
import ssl
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import grpc
import grpc.aio

from baton.authentication.private_files import read_private, read_public, read_secret
from baton.config import NodeConfig
from baton.rpc.address import is_loopback, is_loopback_address
from baton.rpc.channel import MAX_MESSAGE_BYTES, ChannelOptions, Metadata, open_channel
from baton.rpc.errors import BatonError, failed_precondition, unauthenticated

HEADER = "baton-cluster-secret"
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


def read_metrics_token(config: NodeConfig) -> str:
    """Empty: there is none. Raises BatonError."""
    path = config.metrics_token_file
    return read_secret(path, "--metrics-token-file") if path else ""


def same(one: str, other: str) -> bool:
    """Compares in constant time."""
    return hmac.compare_digest(one.encode("utf-8", "replace"), other.encode("utf-8", "replace"))


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
