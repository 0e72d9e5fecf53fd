"""Authentication of the gateway: clients by API key, processes and commands of the deployment by the cluster
secret.

With API keys, `baton.v1.Node`, `baton.v1.Traces`, /traces and, without --open-metrics, /metrics need the
cluster secret: no client's key drains a gateway.
"""

from __future__ import annotations

from collections.abc import Mapping

import grpc

from baton.authentication.api_keys import ApiKey, ApiKeys, Limits
from baton.authentication.cluster import (
    HEADER,
    ClusterAuthentication,
    ClusterCredentials,
    read_metrics_token,
    same,
)
from baton.authentication.interceptor import bearer
from baton.authentication.private_files import read_private, read_public
from baton.config import GatewayConfig
from baton.rpc.address import is_loopback, is_own_host
from baton.rpc.channel import ChannelOptions
from baton.rpc.errors import BatonError, failed_precondition, unauthenticated
from baton.rpc.http_server import opens
from baton.v1 import node_pb2, trace_pb2

OPERATOR_SERVICES = (
    node_pb2.DESCRIPTOR.services_by_name["Node"].full_name,
    trace_pb2.DESCRIPTOR.services_by_name["Traces"].full_name,
)
NOT_FOR_CLIENTS = "this is not for clients: it takes the deployment's cluster secret"


class GatewayAuthentication(ClusterAuthentication):
    """Raises BatonError when made of files that cannot be used."""

    def __init__(self, config: GatewayConfig) -> None:
        super().__init__(ClusterCredentials.load(config))
        self._config = config
        self._local = is_loopback(config.host)
        self._tls = _read_tls(config)
        limits = Limits(config.max_requests_per_key, config.max_streams_per_key, config.max_prompt_tokens)
        self._metrics_token = read_metrics_token(config)
        if self._metrics_token and config.open_metrics:
            raise failed_precondition("--open-metrics asks for no token: leave --metrics-token-file out")
        self.keys = ApiKeys(config.api_keys, limits) if config.api_keys else None
        self._anonymous = ApiKey("", Limits(prompt_tokens=config.max_prompt_tokens))

    def api_key(self, authorization: str) -> ApiKey:
        """The key in this `authorization`. Raises BatonError (UNAUTHENTICATED) for an unknown key."""
        if self.keys is None:
            return self._anonymous
        key = bearer(authorization)
        if not key:
            raise unauthenticated("no API key: send `authorization: Bearer KEY`", "MISSING_API_KEY")
        api_key = self.keys.find(key)
        if api_key is None:
            raise unauthenticated("this API key is not known here", "INVALID_API_KEY")
        return api_key

    def check_host(self, host: str) -> None:
        """Raises BatonError if a gateway without keys, which only this machine can reach, is asked by another
        name. host: the `Host` header."""
        if self.keys is None and self._local and not is_own_host(host, self._config.allowed_hosts):
            text = "ask by address, http://127.0.0.1:PORT/, or start the gateway with --allowed-hosts NAME"
            raise BatonError(grpc.StatusCode.PERMISSION_DENIED, "HOST_NAME", text)

    def check_operator(self, secret: str) -> None:
        """Raises BatonError unless this is the cluster secret."""
        if self.cluster.secret and not same(secret, self.cluster.secret):
            raise unauthenticated(NOT_FOR_CLIENTS, "CLUSTER_SECRET")
        if not self.cluster.secret and self.keys is not None:
            text = f"{NOT_FOR_CLIENTS}, and the gateway was started without --cluster-secret-file"
            raise unauthenticated(text, "CLUSTER_SECRET")

    def check_metrics(self, header: str) -> None:
        """Raises BatonError unless /metrics is open to whoever shows this."""
        if self._config.open_metrics:
            return
        if self._metrics_token:
            if not opens(header, self._metrics_token, self.cluster.secret):
                text = "send the token of --metrics-token-file, or the cluster secret"
                raise unauthenticated(text, "METRICS_TOKEN")
        elif self.keys is not None:
            self.check_operator(header)

    def refusal(self, service: str, metadata: Mapping[str, str]) -> BatonError | None:
        try:
            if service in OPERATOR_SERVICES:
                self.check_operator(metadata.get(HEADER, ""))
            else:
                self.api_key(metadata.get("authorization", ""))
        except BatonError as error:
            return error
        return None

    def credentials(self) -> grpc.ServerCredentials | None:
        return grpc.ssl_server_credentials([self._tls]) if self._tls is not None else None

    def options(self) -> ChannelOptions:
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
