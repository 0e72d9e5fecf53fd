"""gRPC connections: options, the same in all processes, and metadata for all calls of a connection."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import grpc
import grpc.aio

MAX_MESSAGE_BYTES = 64 * 2**20
MAX_STREAMS = 128
"""Calls on one connection. Without a limit, a client that opens calls and resets them at once
(CVE-2023-44487) takes gigabytes of a server, whatever interceptors refuse. gRPC has no other limit on what
headers take that name one entry of HPACK's table 16,000 times: 0.7 MB a call, though it is refused."""
MAX_METADATA_BYTES = 16 * 2**10
KEEPALIVE_SECONDS = 10.0
KEEPALIVE_TIMEOUT_SECONDS = 5.0
CONNECT_SECONDS = 10.0
"""Longest time of one attempt to connect."""
HANDSHAKE_SECONDS = 20.0
"""Time for a new connection's handshake."""
MAX_PING_STRIKES = 100
"""Early pings after which a connection is closed. More than gRPC's default of 2: a server that was stalled
reads all pings of that time at once."""

ChannelOptions = list[tuple[str, int | str]]


class Dial(Protocol):
    """Opens a connection to host:port. The caller closes it."""

    def __call__(self, address: str, max_message_bytes: int = ..., /) -> grpc.aio.Channel: ...


def open_channel(
    address: str,
    max_message_bytes: int = MAX_MESSAGE_BYTES,
    *,
    credentials: grpc.ChannelCredentials | None = None,
    tls_name: str = "",
    metadata: Metadata = (),
) -> grpc.aio.Channel:
    """A connection of its own to host:port: not shared with other channels, never through a proxy.

    A peer that vanished without closing (a host lost, a process stopped) is noticed by keepalive.
    credentials: TLS; None: none. tls_name: the name in the peer's certificate; empty: the host. metadata:
    sent with every call.
    """
    options = client_options(max_message_bytes)
    if tls_name:
        options.append(("grpc.ssl_target_name_override", tls_name))
    if credentials is None:
        channel = grpc.aio.insecure_channel(address, options=options)
    else:
        channel = grpc.aio.secure_channel(address, credentials, options=options)
    if metadata:
        _add_metadata(channel, metadata)
    return channel


def client_options(max_message_bytes: int = MAX_MESSAGE_BYTES) -> ChannelOptions:
    return [
        *_common(max_message_bytes),
        ("grpc.use_local_subchannel_pool", 1),
        ("grpc.enable_http_proxy", 0),
        ("grpc.enable_retries", 0),
        ("grpc.service_config_disable_resolution", 1),
        ("grpc.initial_reconnect_backoff_ms", 50),
        # Despite its name this is the time that an attempt may take, not a pause (subchannel.cc in gRPC).
        ("grpc.min_reconnect_backoff_ms", int(CONNECT_SECONDS * 1000)),
        ("grpc.max_reconnect_backoff_ms", 2000),
    ]


def server_options(max_message_bytes: int = MAX_MESSAGE_BYTES) -> ChannelOptions:
    return [
        *_common(max_message_bytes),
        ("grpc.max_concurrent_streams", MAX_STREAMS),
        ("grpc.max_metadata_size", MAX_METADATA_BYTES),
        ("grpc.absolute_max_metadata_size", MAX_METADATA_BYTES),
        # Otherwise two servers could share a port, and a port in use would go unnoticed.
        ("grpc.so_reuseport", 0),
        # Clients may ping as often as client_options says, at most twice as often.
        ("grpc.http2.min_ping_interval_without_data_ms", int(KEEPALIVE_SECONDS * 500)),
        ("grpc.http2.max_ping_strikes", MAX_PING_STRIKES),
        ("grpc.server_handshake_timeout_ms", int(HANDSHAKE_SECONDS * 1000)),
    ]


def _common(max_message_bytes: int) -> ChannelOptions:
    return [
        ("grpc.max_receive_message_length", max_message_bytes),
        ("grpc.max_send_message_length", max_message_bytes),
        ("grpc.keepalive_time_ms", int(KEEPALIVE_SECONDS * 1000)),
        ("grpc.keepalive_timeout_ms", int(KEEPALIVE_TIMEOUT_SECONDS * 1000)),
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.http2.max_pings_without_data", 0),
    ]


Metadata = tuple[tuple[str, str], ...]


def _add_metadata(channel: grpc.aio.Channel, metadata: Metadata) -> None:
    """To all calls of the channel. An interceptor of grpc.aio would do it too, but it puts a task and a queue
    between a stream and its reader."""

    def adding(make: Callable[..., Any]) -> Callable[..., Any]:
        def make_method(*arguments: Any, **options: Any) -> Callable[..., Any]:
            method = make(*arguments, **options)

            def call(*arguments: Any, metadata: Metadata | None = None, **options: Any) -> Any:
                return method(*arguments, metadata=(*(metadata or ()), *added), **options)

            return call

        return make_method

    added = metadata
    for kind in ("unary_unary", "unary_stream", "stream_unary", "stream_stream"):
        setattr(channel, kind, adding(getattr(channel, kind)))
