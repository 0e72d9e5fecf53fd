"""How commands reach the processes of a deployment: addresses, credentials, and what a refused call says."""

from __future__ import annotations

import dataclasses
import os
from typing import Any

import grpc
import grpc.aio

from baton.authentication.client_credentials import ClientCredentials
from baton.authentication.cluster import ClusterCredentials
from baton.cli import local_secret
from baton.cli.config_fields import fields_of
from baton.config import NodeConfig
from baton.rpc.channel import open_channel

CLUSTER_FIELDS = ("cluster_secret_file", "cluster_cert", "cluster_key", "cluster_ca", "cluster_tls_name")


@dataclasses.dataclass(frozen=True, slots=True)
class Credentials:
    """cluster: the deployment's credentials. access: those of a client of its gateway."""

    cluster: ClusterCredentials
    access: ClientCredentials

    @classmethod
    def to(cls, gateway: str) -> Credentials:
        """For the deployment with this gateway: the secret that `baton up` generated here, else the files
        that the environment names (BATON_CLUSTER_SECRET_FILE and the like). Raises BatonError."""
        variables = {name: fields_of(NodeConfig)[name].variable for name in CLUSTER_FIELDS}
        named: dict[str, Any] = {name: os.environ.get(variable, "") for name, variable in variables.items()}
        secret, spread = local_secret.find(gateway)
        if secret:
            named["cluster_secret_file"] = ""
        asked = os.environ.get("BATON_CLUSTER_SECRET_IN_CLEAR", "").lower() in ("1", "true", "yes", "on")
        cluster = ClusterCredentials.load(NodeConfig(**named, cluster_secret_in_clear=asked or spread))
        return cls(
            dataclasses.replace(cluster, secret=secret or cluster.secret), ClientCredentials.of(None, None)
        )

    def gateway(self, address: str) -> grpc.aio.Channel:
        """A channel to the gateway, with the client's and the deployment's credentials."""
        encrypted = self.access.credentials is not None
        metadata = (*self.access.metadata, *self.cluster.metadata(address, encrypted))
        return open_channel(address, credentials=self.access.credentials, metadata=metadata)

    def node(self, address: str) -> grpc.aio.Channel:
        """A channel to any other process."""
        return self.cluster.dial(address)


def reachable(address: str) -> str:
    """The address at which a client on this machine reaches a bound address."""
    return address.replace("0.0.0.0", "127.0.0.1").replace("[::]", "[::1]")


def brief(error: grpc.aio.AioRpcError) -> str:
    """Message of a failed call, without gRPC's list of the addresses it tried."""
    details: str = error.details() or error.code().name
    return details.rpartition(": ")[2] if error.code() is grpc.StatusCode.UNAVAILABLE else details
