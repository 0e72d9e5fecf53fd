"""The streams of a simulated worker's callers, as worker.caller_stream has them over gRPC."""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection
from typing import Any

from baton.rpc.errors import BatonError
from baton.sim.network import Endpoint
from baton.sim.world import Actor, World
from baton.worker.caller_stream import CallerStream, Service
from baton.worker.decode.stream import DecodeStream
from baton.worker.lease_stream import LeaseStream

WriteEvent = Callable[[Any], object]


class VirtualStream(CallerStream):
    """A stream whose messages leave in virtual time. `attach` before the first one."""

    def attach(
        self, world: World, actor: Actor, write: WriteEvent, end: Callable[[str], None] = lambda reason: None
    ) -> None:
        """write: called with each message as it leaves. end: when the stream has ended here."""
        self._world, self._actor, self._write, self._end_here = world, actor, write, end
        self._wakes = False

    def put(self, message: Any) -> bool:
        taken = super().put(message)
        self._pump()
        return taken

    def close(self, error: BatonError | None = None) -> None:
        super().close(error)
        self._pump()
        self._end_here(str(self.error) if self.error is not None else "closed")

    def _pump(self) -> None:
        """Writes what may leave now, and wakes up when the rest may."""
        while len(self.outbox):
            now = self._world.now
            if self.due(now) > now:
                if not self._wakes:
                    self._wakes = True
                    self._world.at(self.due(now) - now, self._actor, self._wake)
                return
            (message,) = self.outbox.take(sys.maxsize)
            self._write(self.leaving(message, now))

    def _wake(self) -> None:
        self._wakes = False
        self._pump()


class VirtualDecodeStream(VirtualStream, DecodeStream):
    pass


class VirtualPrefillStream(VirtualStream, LeaseStream):
    pass


class SimStreams:
    """Like CallerStreams: all streams of a node, each from its first message to its end."""

    def __init__(self, service: Service[Any], world: World, actor: Actor) -> None:
        self._service = service
        self._world = world
        self._actor = actor
        self.endpoints: dict[Any, Endpoint] = {}
        """Endpoints of the open streams, in the order in which they came."""

    @property
    def open(self) -> Collection[Any]:
        return list(self.endpoints)

    def accept(self, endpoint: Endpoint) -> None:
        endpoint.on_message = lambda message: self._hello(endpoint, message)

    def _hello(self, endpoint: Endpoint, first: Any) -> None:
        service = self._service
        try:
            stream = service.open(first.hello)
        except BatonError as error:
            endpoint.close(str(error))
            return
        self.endpoints[stream] = endpoint
        endpoint.on_message = lambda message: self._read(stream, message)
        endpoint.on_end = lambda reason: self._ended(stream)
        for message in service.welcome():
            endpoint.send(message)
        stream.attach(self._world, self._actor, endpoint.send, lambda reason: self._close(stream, reason))

    def _read(self, stream: Any, message: Any) -> None:
        try:
            self._service.handle_command(message, stream)
        except BatonError as error:
            stream.close(error)

    def _close(self, stream: Any, reason: str) -> None:
        if stream in self.endpoints:
            self.endpoints[stream].close(reason)
            self._ended(stream)

    def _ended(self, stream: Any) -> None:
        if stream in self.endpoints:
            del self.endpoints[stream]
            self._service.drop(stream)
