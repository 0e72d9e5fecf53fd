"""Who may call the gateway: clients by API key, the deployment's own processes and commands by its secret.

Where there are keys, what concerns the deployment as a whole (`baton.v1.Node`, /metrics) is for the cluster
secret alone: no client's key drains a gateway.
"""

from __future__ import annotations

from collections.abc import Mapping

import grpc

from baton.config import GatewayConfig
from baton.gateway.api_keys import ApiKeys
from baton.gateway.callers import Caller, Limits
from baton.rpc.channel import Options
from baton.rpc.cluster import HEADER, Cluster, same
from baton.rpc.door import bearer
from baton.rpc.errors import BatonError, failed_precondition, unauthenticated
from baton.rpc.private_file import read_private, read_public
from baton.v1 import node_pb2

NODE = node_pb2.DESCRIPTOR.services_by_name["Node"].full_name
NOT_FOR_CLIENTS = "this is not for clients: it takes the deployment's cluster secret"


class PublicDoor:
    """Raises BatonError when made of files that cannot be used."""

    def __init__(self, config: GatewayConfig) -> None:
        self.cluster = Cluster.load(config)
        self._config = config
        self._tls = _read_tls(config)
        limits = Limits(config.max_requests_per_key, config.max_streams_per_key, config.max_prompt_tokens)
        self.keys = ApiKeys(config.api_keys, limits) if config.api_keys else None
        self._anyone = Caller("", Limits(prompt_tokens=config.max_prompt_tokens))

    def caller(self, authorization: str) -> Caller:
        """Who sends this `authorization`. Raises BatonError (UNAUTHENTICATED) for nobody's key."""
        if self.keys is None:
            return self._anyone
        key = bearer(authorization)
        if not key:
            raise unauthenticated("no API key: send `authorization: Bearer KEY`", "MISSING_API_KEY")
        caller = self.keys.find(key)
        if caller is None:
            raise unauthenticated("this API key is not known here", "INVALID_API_KEY")
        return caller

    def check_operator(self, secret: str) -> None:
        """Raises BatonError unless the secret opens what is not for clients."""
        if self.cluster.secret and not same(secret, self.cluster.secret):
            raise unauthenticated(NOT_FOR_CLIENTS, "CLUSTER_SECRET")
        if not self.cluster.secret and self.keys is not None:
            text = f"{NOT_FOR_CLIENTS}, and the gateway was started without --cluster-secret-file"
            raise unauthenticated(text, "CLUSTER_SECRET")

    # Door.

    def refusal(self, service: str, metadata: Mapping[str, str]) -> BatonError | None:
        try:
            if service == NODE:
                self.check_operator(metadata.get(HEADER, ""))
            else:
                self.caller(metadata.get("authorization", ""))
        except BatonError as error:
            return error
        return None

    def credentials(self) -> grpc.ServerCredentials | None:
        return grpc.ssl_server_credentials([self._tls]) if self._tls is not None else None

    def options(self) -> Options:
        config = self._config
        return [
            ("grpc.max_concurrent_streams", config.max_streams_per_connection),
            ("grpc.max_metadata_size", config.max_header_bytes),
            ("grpc.absolute_max_metadata_size", config.max_header_bytes),
            ("grpc.max_connection_idle_ms", int(config.idle_seconds * 1000)),
            ("grpc.so_reuseport", int(bool(config.shared))),
        ]

    def missing(self, reachable: bool) -> str:
        return "" if self.keys is not None else "--api-keys FILE (and --tls-cert, --tls-key)"


def _read_tls(config: GatewayConfig) -> tuple[bytes, bytes] | None:
    """Key and certificate chain."""
    if bool(config.tls_cert) != bool(config.tls_key):
        missing = "--tls-key" if config.tls_cert else "--tls-cert"
        raise failed_precondition(f"TLS needs {missing} too")
    if not config.tls_cert:
        return None
    return read_private(config.tls_key, "--tls-key"), read_public(config.tls_cert, "--tls-cert")
