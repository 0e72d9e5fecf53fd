"""Calls of gRPC over the simulated network, for clients and services that are written for grpc.aio: a channel
for their stubs, and `serve` for one call at the other end."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from typing import Any

import grpc
import grpc.aio
from grpc_status import rpc_status

from baton.rpc.errors import BatonError, cancelled, deadline_exceeded, to_status, unavailable, without_frames
from baton.sim.event_loop import VirtualLoop
from baton.sim.network import Endpoint, Host, Network

Handler = Callable[[Any, Any], Any]
"""A service's method, called with the request, or an iterator of requests, and the call's context."""


@dataclass(frozen=True, slots=True)
class _Begin:
    """The first message of a call."""

    deadline: float | None
    """In the world's time."""
    request: Any = None
    """None: more than one may come."""


@dataclass(frozen=True, slots=True)
class _End:
    """The server's last message."""

    error: BatonError | None


class CallChannel:
    """grpc.aio.Channel, as far as the stubs of images need it."""

    def __init__(self, network: Network, owner: Host, loop: VirtualLoop, address: str) -> None:
        self._network, self._owner, self._loop, self._address = network, owner, loop, address

    def unary_unary(self, method: str, **_: Any) -> Callable[..., Any]:
        async def only(request: Any, timeout: float | None = None) -> Any:
            call = self._call(method, timeout, request)
            found = [message async for message in call]
            return found[0]

        return only

    def unary_stream(self, method: str, **_: Any) -> Callable[..., SimCall]:
        return lambda request, timeout=None: self._call(method, timeout, request)

    def stream_stream(self, method: str, **_: Any) -> Callable[..., SimCall]:
        return lambda timeout=None: self._call(method, timeout)

    stream_unary = stream_stream

    def _call(self, method: str, timeout: float | None, request: Any = None) -> SimCall:
        endpoint = self._network.connect(self._owner, self._address, method)
        call = SimCall(endpoint, self._loop, timeout)
        if endpoint is not None:
            deadline = None if timeout is None else self._network.world.now + timeout
            endpoint.send(_Begin(deadline, request))
        return call

    async def close(self, grace: float | None = None) -> None:
        """Calls go on."""


class SimCall:
    """One call, as its client sees it: grpc.aio.StreamStreamCall."""

    def __init__(self, endpoint: Endpoint | None, loop: VirtualLoop, timeout: float | None) -> None:
        """`endpoint`: None: nobody answers."""
        self._endpoint, self._messages = endpoint, deque[Any]()
        self._more = asyncio.Event()
        self._error: BatonError | None = None
        self._over = False
        self._watching: list[Callable[[SimCall], object]] = []
        self._late: asyncio.TimerHandle | None = None
        if endpoint is None:
            loop.call_soon(self._end, unavailable("nobody answers"))
            return
        if timeout is not None:
            self._late = loop.call_later(timeout, self._give_up, deadline_exceeded("the call took too long"))
        # What waits for an event is woken by its loop.
        endpoint.on_message = lambda message: loop.call_soon(self._take, message)
        endpoint.on_end = lambda reason: loop.call_soon(self._end, unavailable(reason))

    def _take(self, message: Any) -> None:
        if isinstance(message, _End):
            self._end(message.error)
        elif not self._over:
            self._messages.append(message)
            self._more.set()

    def _give_up(self, error: BatonError) -> None:
        if not self._over and self._endpoint is not None:
            self._endpoint.close(error.message)
        self._end(error)

    def _end(self, error: BatonError | None) -> None:
        if self._over:
            return
        self._over, self._error = True, error
        if self._late is not None:
            self._late.cancel()
        self._more.set()
        watching, self._watching = self._watching, []
        for watcher in watching:
            watcher(self)

    async def __aiter__(self) -> AsyncIterator[Any]:
        while True:
            while self._messages:
                yield self._messages.popleft()
            if self._over:
                break
            self._more.clear()
            await self._more.wait()
        if self._error is not None:
            status = rpc_status.to_status(to_status(self._error))
            raise grpc.aio.AioRpcError(status.code, grpc.aio.Metadata(), self._metadata(), status.details)

    async def write(self, message: Any) -> None:
        if self._over or self._endpoint is None or not self._endpoint.send(message):
            raise grpc.aio.AioRpcError(
                grpc.StatusCode.INTERNAL, grpc.aio.Metadata(), grpc.aio.Metadata(), "the call has ended"
            )

    def cancel(self) -> None:
        self._give_up(cancelled("the client has cancelled the call"))

    def done(self) -> bool:
        return self._over

    def add_done_callback(self, watcher: Callable[[SimCall], object]) -> None:
        self._watching.append(watcher)

    async def code(self) -> grpc.StatusCode:
        return grpc.StatusCode.OK if self._error is None else self._error.code

    async def details(self) -> str:
        return "" if self._error is None else self._error.message

    async def trailing_metadata(self) -> grpc.aio.Metadata:
        return self._metadata()

    def _metadata(self) -> grpc.aio.Metadata:
        if self._error is None:
            return grpc.aio.Metadata()
        return grpc.aio.Metadata(*rpc_status.to_status(to_status(self._error)).trailing_metadata)


class _Context:
    """grpc.aio.ServicerContext."""

    def __init__(self, network: Network, deadline: float | None) -> None:
        self._network, self._deadline = network, deadline

    def time_remaining(self) -> float | None:
        return None if self._deadline is None else self._deadline - self._network.world.now


def serve(network: Network, loop: VirtualLoop, endpoint: Endpoint, handler: Handler) -> None:
    """Answers the call at whose server's end `endpoint` is. The handler is cancelled if the client leaves."""
    waiting, more = deque[Any](), asyncio.Event()
    over = False

    def take(message: Any) -> None:
        if isinstance(message, _Begin):
            task = loop.spawn(answer(message), endpoint.method)
            endpoint.on_end = lambda reason: loop.call_soon(end, task)
        else:
            waiting.append(message)
            more.set()

    def end(task: asyncio.Task[Any]) -> None:
        nonlocal over
        over = True
        more.set()
        task.cancel()

    async def requests() -> AsyncIterator[Any]:
        while waiting or not over:
            while waiting:
                yield waiting.popleft()
            more.clear()
            if not over:
                await more.wait()

    async def answer(begin: _Begin) -> None:
        request = requests() if begin.request is None else begin.request
        error = None
        try:
            answers = handler(request, _Context(network, begin.deadline))
            if hasattr(answers, "__aiter__"):
                async for message in answers:
                    endpoint.send(message)
            else:
                endpoint.send(await answers)
        except BatonError as raised:
            error = without_frames(raised)
        if endpoint.open:
            endpoint.send(_End(error))
            endpoint.close("the call has ended")

    endpoint.on_message = lambda message: loop.call_soon(take, message)
