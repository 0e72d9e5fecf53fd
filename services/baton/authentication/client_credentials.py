"""Credentials of a client of the gateway, and the CA of the gateway's certificate."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from pathlib import Path

import grpc

from baton.rpc.channel import Metadata
from baton.rpc.errors import invalid

KEY_VARIABLE = "BATON_API_KEY"
CA_VARIABLE = "BATON_TLS_CA"
SYSTEM = "system"


@dataclass(frozen=True, slots=True)
class ClientCredentials:
    """metadata: of every call. credentials: TLS; None: none."""

    metadata: Metadata = field(repr=False)
    credentials: grpc.ChannelCredentials | None

    @classmethod
    def of(cls, api_key: str | None, tls_ca: str | None) -> ClientCredentials:
        """From a client's arguments; None takes the environment's value. Raises BatonError."""
        key = os.environ.get(KEY_VARIABLE, "") if api_key is None else api_key
        if not (key.isascii() and (key.isprintable() or not key)):
            raise invalid("api_key", "an API key is one line of printable ASCII characters")
        ca = os.environ.get(CA_VARIABLE, "") if tls_ca is None else tls_ca
        metadata = (("authorization", f"Bearer {key}"),) if key else ()
        return cls(metadata, _credentials(ca) if ca else None)


def _credentials(ca: str) -> grpc.ChannelCredentials:
    if ca == SYSTEM:
        return grpc.ssl_channel_credentials()
    try:
        return grpc.ssl_channel_credentials(Path(ca).read_bytes())
    except OSError as error:
        raise invalid("tls_ca", f"cannot read the CA file {ca}: {error.strerror}") from None
