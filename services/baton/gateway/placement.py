"""Sends a request to decode nodes, one after the other, until one finishes it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from typing import Protocol

from baton.gateway.attempts import Attempts, Wait
from baton.gateway.decode_node import DecodePeer, TokenSink
from baton.gateway.handoff_cost import Split
from baton.gateway.nodes import Nodes
from baton.gateway.routing import RequestRouting
from baton.rpc.errors import BatonError
from baton.rpc.logs import get_logger
from baton.v1 import decode_pb2

_log = get_logger()


class PlacedRequest(TokenSink, Protocol):
    """A request that is sent to decode nodes."""

    def decode_start(self, prefill: Sequence[str], local_tokens: int | None) -> decode_pb2.DecodeStart:
        """The message of the next attempt. prefill: nodes in the order to try. local_tokens: limit of
        tokens that the decode node computes itself."""

    def on_placed(self) -> None:
        """The request was sent to a node."""

    def on_unplaced(self, error: BatonError) -> None:
        """No node can take the request."""


class Placement:
    """Runs on the event loop. `attempts` decides, this class sends."""

    def __init__(
        self,
        nodes: Nodes,
        split: Split,
        name: str,
        number: int,
        attempts: Attempts,
        request: PlacedRequest,
    ) -> None:
        self._nodes = nodes
        self._split = split
        self._fingerprint = ""
        self._routing: RequestRouting | None = None
        self._hand_off: bool | None = None
        self._name = name
        self._number = number
        self._attempts = attempts
        self._request: PlacedRequest | None = request
        """None after the end, so that a request is freed with its last reference and not by the garbage
        collector."""
        self._timer: asyncio.TimerHandle | None = None

    def begin(self, routing: RequestRouting, fingerprint: str, hand_off: bool | None) -> None:
        """fingerprint: of the model that the prompt was encoded for. hand_off: see Split.decide."""
        self._routing, self._fingerprint, self._hand_off = routing, fingerprint, hand_off
        self.place()

    def place(self) -> None:
        """Sends the request now, or as soon as a node can take it."""
        routing, request = self._routing, self._request
        assert routing is not None, "not begun"
        if request is None:
            return
        try:
            while True:
                candidates = self._nodes.candidates(self._number, self._fingerprint)
                place = self._attempts.place(candidates, time.monotonic(), routing.pick_decode)
                if isinstance(place, Wait):
                    self._timer = asyncio.get_running_loop().call_later(place.seconds, self.place)
                    return
                prefill = routing.order_prefill(self._nodes.prefill)
                limit = routing.decide(self._split, place, prefill, self._hand_off)
                if self._nodes.decode[place].send(request.decode_start(prefill, limit), request):
                    break
        except BatonError as error:
            request.on_unplaced(error.with_traceback(None))  # its frames hold the request
            return
        self._attempts.begin(place)
        routing.sent(place, prefill)
        request.on_placed()

    def computed(self) -> None:
        """The prompt of the attempt has been computed."""
        if self._routing is not None:
            self._routing.computed()

    def finished(self, stats: decode_pb2.RequestStats, first_token: float) -> None:
        """The attempt has finished. first_token: time of its first token on the clock."""
        if self._routing is not None and not self._attempts.resumed:
            self._routing.learn(self._split, stats, first_token)

    def predicted(self, stats: decode_pb2.RequestStats) -> int | None:
        """Cached tokens that were counted on, where the first attempt has finished: see RequestRouting."""
        if self._routing is None or self._attempts.resumed:
            return None
        return self._routing.predicted(stats, self._attempts.address)

    def ended(self, error: BatonError, lost: bool) -> bool:
        """The attempt has ended before the request (lost: see Attempts.ended). Returns True if nothing is
        left to compute, False if the request is to be placed again. Raises BatonError, the request's end."""
        address = self._attempts.address
        self._attempts.ended(error, time.monotonic(), lost=lost)
        if not self._attempts.done:
            _log.info("trying another decode node", request=self._name, decode=address, error=error.message)
        return self._attempts.done

    def pause(self, paused: bool) -> None:
        """Pauses or continues the request, as its client stops or resumes reading."""
        node = self._node
        if node is not None:
            node.pause(self._number, self._attempts.number, paused)

    def let_go(self) -> None:
        """The request has ended: cancels it at its node and sends it to no other."""
        self._request = None
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        node = self._node
        if node is not None:
            node.cancel(self._number)
        if self._routing is not None:
            self._routing.ended()

    @property
    def _node(self) -> DecodePeer | None:
        return self._nodes.decode.get(self._attempts.address)
