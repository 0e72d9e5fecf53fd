"""When and how a client's stream goes on after its gateway was lost. No I/O."""

from __future__ import annotations

import time
from collections.abc import Sequence

import grpc

from baton.client.messages import Collector
from baton.rpc.errors import BatonError, invalid
from baton.v1 import inference_pb2

GIVE_UP_SECONDS = 30.0
"""Time without any event after which no further gateway is tried."""
FIRST_PAUSE_SECONDS, MAX_PAUSE_SECONDS = 0.05, 1.0
_LEAVING = ("STOPPING", "DRAINING")
"""Reasons of a gateway that stops."""


class Gateways:
    """The gateways of a client, and which of them new requests go to."""

    def __init__(self, address: str | Sequence[str]) -> None:
        self.addresses = (address,) if isinstance(address, str) else tuple(address)
        if not self.addresses:
            raise invalid("address", "give the address of one gateway, or of several")
        self.used = 0

    @property
    def address(self) -> str:
        return self.addresses[self.used]

    def lost(self, used: int) -> int:
        """The one that comes after a lost one; another stream may have found out before."""
        if self.used == used:
            self.used = (used + 1) % len(self.addresses)
        return self.used


class Resuming:
    """One request. After an error `again` says whether it goes on; then `message` goes to another gateway."""

    def __init__(
        self,
        start: inference_pb2.GenerateRequest,
        collector: Collector,
        timeout: float | None,
        gateways: Gateways,
    ) -> None:
        """timeout: seconds of the whole request."""
        self.message = start
        self.used = gateways.used
        """Which of the gateways has the request."""
        self._start = start.start
        self._collector = collector
        self._ends = time.monotonic() + timeout if timeout is not None else None
        self._gateways = gateways
        self._tries = 0  # since the last event
        self._since = 0.0  # the first of them

    @property
    def timeout(self) -> float | None:
        """Seconds that are left."""
        return max(0.001, self._ends - time.monotonic()) if self._ends is not None else None

    def progressed(self) -> None:
        """There was an event."""
        self._tries = 0

    def again(self, error: BatonError) -> float:
        """Seconds to wait before the next gateway gets `message`. Raises the error if it is the request's
        end: no gateway is left, or none was lost."""
        collector, now = self._collector, time.monotonic()
        if not self._tries:
            self._since = now
        retry = _gateway_lost(error) or (
            self._tries and (error.code is grpc.StatusCode.UNAVAILABLE or error.retry_after_ms is not None)
        )
        if collector.ticket:
            left = now - self._since < GIVE_UP_SECONDS
        else:  # begun anew, while there is no output
            left = not collector.has_output and self._tries + 1 < len(self._gateways.addresses)
        if not retry or not left or (self._ends is not None and now >= self._ends):
            raise error
        pause = FIRST_PAUSE_SECONDS * 2 ** (self._tries - 1) if self._tries else 0.0
        self._tries += 1
        self.used = self._gateways.lost(self.used)
        collector.ended = False
        if collector.ticket:
            self.message = collector.resume(self._start)
        return min(pause, MAX_PAUSE_SECONDS)


def _gateway_lost(error: BatonError) -> bool:
    """The connection broke, or the gateway stops. A status of a gateway has a reason of its own."""
    if error.code is grpc.StatusCode.UNAVAILABLE:
        return error.reason in ("UNAVAILABLE", *_LEAVING)
    return error.reason == "STREAM_ENDED" or (
        error.reason == error.code.name and "RST_STREAM" in error.message
    )
