"""What proves one process of a deployment to another: a secret that all know, certificates, or both.

The secret travels with each call, as metadata. Without TLS whoever reads the connection, or takes the port
of a process that is gone, learns it. So it goes to other machines only over TLS, unless the configuration
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

from baton.config import NodeConfig
from baton.rpc.address import is_loopback_address
from baton.rpc.channel import MAX_MESSAGE_BYTES, open_channel
from baton.rpc.errors import BatonError, failed_precondition, unauthenticated
from baton.rpc.logs import get_logger
from baton.rpc.metadata_channel import Metadata
from baton.rpc.private_file import read_private, read_public

HEADER = "baton-cluster-secret"
MIN_SECRET_CHARACTERS = 16
REMEDY = "--cluster-cert, --cluster-key and --cluster-ca (mutual TLS), or --cluster-secret-in-clear"

_log = get_logger()


@dataclass(frozen=True, slots=True)
class ClusterTls:
    """PEM texts: the CA of all processes, this one's chain and key. name: see NodeConfig."""

    ca: bytes
    cert: bytes
    key: bytes = field(repr=False)
    name: str = ""

    def server_credentials(self) -> grpc.ServerCredentials:
        return grpc.ssl_server_credentials([(self.key, self.cert)], self.ca, require_client_auth=True)

    def http_context(self) -> ssl.SSLContext:
        """Of an HTTP server whose clients must show a certificate of the CA. Raises BatonError."""
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
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
class Cluster:
    """Neither: a process that whoever reaches it may call."""

    secret: str = field(default="", repr=False)
    tls: ClusterTls | None = None
    secret_in_clear: bool = False
    """Whether the secret may leave this machine without TLS."""

    @classmethod
    def load(cls, config: NodeConfig) -> Cluster:
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
        """A connection to another process of the deployment, which proves who calls. See open_channel."""
        return open_channel(
            address,
            max_message_bytes,
            credentials=self.tls.channel_credentials() if self.tls is not None else None,
            tls_name=self.tls.name if self.tls is not None else "",
            metadata=self.metadata(address, encrypted=self.tls is not None),
        )

    def metadata(self, address: str, encrypted: bool) -> Metadata:
        """What proves to the process at host:port who calls. Empty, with a line in the log, where the secret
        would leave this machine in clear; the process then refuses the call."""
        if not self.secret:
            return ()
        if not (encrypted or self.secret_in_clear or is_loopback_address(address)):
            _log.warning("cluster secret not sent in clear", address=address, give=REMEDY)
            return ()
        return ((HEADER, self.secret),)

    def refusal(self, metadata: Mapping[str, str]) -> BatonError | None:
        """Why a call with this metadata is none of the deployment's; None: it is."""
        if not self.secret or same(metadata.get(HEADER, ""), self.secret):
            return None
        told = (
            "is another one"
            if HEADER in metadata
            else "is missing (without TLS it is not sent to other machines)"
        )
        return unauthenticated(
            f"this service is for processes of the same deployment, and the caller's cluster secret {told}: "
            "give both the same --cluster-secret-file",
            "CLUSTER_SECRET",
        )


def read_secret(path: str, flag: str = "--cluster-secret-file") -> str:
    """Raises BatonError for what cannot be read, is open to everybody or is no secret."""
    secret = read_private(path, flag).decode("latin-1").strip()
    if len(secret) < MIN_SECRET_CHARACTERS or not (secret.isascii() and secret.isprintable()):
        raise failed_precondition(
            f"{flag}: {path} must hold one line of {MIN_SECRET_CHARACTERS} or more printable ASCII "
            f"characters; openssl rand -hex 32 > {path}",
            "UNUSABLE_FILE",
        )
    return secret


def same(one: str, other: str) -> bool:
    """Takes a time that tells nothing of where they differ."""
    return hmac.compare_digest(one.encode("utf-8", "replace"), other.encode("utf-8", "replace"))
