"""How commands reach the processes of a deployment: with what secret and which certificates."""

from __future__ import annotations

import dataclasses
import os
from typing import Any

import grpc.aio

from baton.cli import local_secret
from baton.cli.options import fields_of
from baton.client.access import Access
from baton.config import NodeConfig
from baton.rpc.channel import open_channel
from baton.rpc.cluster import HEADER, Cluster

CLUSTER_FIELDS = ("cluster_secret_file", "cluster_cert", "cluster_key", "cluster_ca", "cluster_tls_name")


@dataclasses.dataclass(frozen=True, slots=True)
class Dialing:
    """cluster: of the deployment. access: to its gateway, as any client has it."""

    cluster: Cluster
    access: Access

    @classmethod
    def to(cls, gateway: str) -> Dialing:
        """To the deployment with this gateway: the secret that `baton up` drew for it here, else what the
        environment names (BATON_CLUSTER_SECRET_FILE and the like). Raises BatonError."""
        variables = {name: fields_of(NodeConfig)[name].variable for name in CLUSTER_FIELDS}
        named: dict[str, Any] = {name: os.environ.get(variable, "") for name, variable in variables.items()}
        secret = local_secret.find(gateway)
        if secret:
            named["cluster_secret_file"] = ""
        cluster = Cluster.load(NodeConfig(**named))
        return cls(dataclasses.replace(cluster, secret=secret or cluster.secret), Access.of(None, None))

    def gateway(self, address: str) -> grpc.aio.Channel:
        """To the gateway, as a client that also knows the deployment's secret."""
        secret = ((HEADER, self.cluster.secret),) if self.cluster.secret else ()
        metadata = (*self.access.metadata, *secret)
        return open_channel(address, credentials=self.access.credentials, metadata=metadata)

    def node(self, address: str) -> grpc.aio.Channel:
        """To any other process."""
        return self.cluster.dial(address)
