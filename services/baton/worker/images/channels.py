"""Connections to addresses that requests name."""

from __future__ import annotations

from collections import OrderedDict

import grpc.aio

from baton.rpc.channel import Dial

MAX_CHANNELS = 64
"""One more closes the one least recently used."""
CLOSE_SECONDS = 30.0
"""For calls that run on a connection that is closed."""


class Channels:
    def __init__(self, dial: Dial) -> None:
        self._dial = dial
        self._open: OrderedDict[str, grpc.aio.Channel] = OrderedDict()

    async def to(self, address: str) -> grpc.aio.Channel:
        channel = self._open.pop(address, None) or self._dial(address)
        self._open[address] = channel
        if len(self._open) > MAX_CHANNELS:
            await self._open.popitem(last=False)[1].close(CLOSE_SECONDS)
        return channel

    async def close(self) -> None:
        for channel in self._open.values():
            await channel.close()
