"""A channel whose calls all carry the same metadata.

The interceptors of grpc.aio would do it too, but put a task and a queue between a stream and its reader.
"""

from __future__ import annotations

from collections.abc import Callable
from types import TracebackType
from typing import Any

import grpc
import grpc.aio

Metadata = tuple[tuple[str, str], ...]


class MetadataChannel(grpc.aio.Channel):  # type: ignore[misc]
    """Otherwise the channel that it is made of."""

    def __init__(self, channel: grpc.aio.Channel, metadata: Metadata) -> None:
        self._channel = channel
        self._metadata = metadata

    async def __aenter__(self) -> MetadataChannel:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self, grace: float | None = None) -> None:
        await self._channel.close(grace)

    def get_state(self, try_to_connect: bool = False) -> grpc.ChannelConnectivity:
        return self._channel.get_state(try_to_connect)

    async def wait_for_state_change(self, last_observed_state: grpc.ChannelConnectivity) -> None:
        await self._channel.wait_for_state_change(last_observed_state)

    async def channel_ready(self) -> None:
        await self._channel.channel_ready()

    def unary_unary(self, *arguments: Any, **options: Any) -> Callable[..., Any]:
        return self._saying(self._channel.unary_unary(*arguments, **options))

    def unary_stream(self, *arguments: Any, **options: Any) -> Callable[..., Any]:
        return self._saying(self._channel.unary_stream(*arguments, **options))

    def stream_unary(self, *arguments: Any, **options: Any) -> Callable[..., Any]:
        return self._saying(self._channel.stream_unary(*arguments, **options))

    def stream_stream(self, *arguments: Any, **options: Any) -> Callable[..., Any]:
        return self._saying(self._channel.stream_stream(*arguments, **options))

    def _saying(self, method: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, metadata: Metadata | None = None, **options: Any) -> Any:
            return method(*arguments, metadata=(*(metadata or ()), *self._metadata), **options)

        return call
