"""The streams of a worker's callers: what prefill and decode nodes do alike, from `hello` to the end."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator
from typing import Any, Generic, Protocol, TypeVar

import grpc.aio

from baton.rpc.errors import BatonError, abort, exhausted, internal, invalid
from baton.rpc.outbox import STREAM_ENDED, Outbox, OutboxFull, first_message
from baton.rpc.tasks import Tasks


class CallerStream:
    """One stream. Used on the event loop; its identity names it to the core."""

    def __init__(self, incarnation: int, outbox: Outbox[Any]) -> None:
        self.incarnation = incarnation
        """Incarnation of the caller."""
        self.outbox = outbox
        self.error: BatonError | None = None
        self.writing = False
        """gRPC has taken a message and not yet written it."""

    def close(self, error: BatonError | None = None) -> None:
        """Unsent messages are still written; then the stream ends, with the error if there is one."""
        self.error = error or self.error
        self.outbox.close()

    def put(self, message: Any) -> bool:
        """Returns False if the caller does not read. Its stream then ends, and its requests are to be
        cancelled."""
        try:
            return self.outbox.put(message)
        except OutboxFull as full:
            self.close(exhausted(f"the caller does not read: {full}", "SLOW_READER"))
            return False

    def due(self, now: float) -> float:
        """From when on what is unsent may leave."""
        return now

    def leaving(self, message: Any, now: float) -> Any:
        """What leaves of a message that has been taken out of the outbox; the rest goes back."""
        return message

    def messages(self) -> AsyncIterator[Any]:
        """Yields the messages to write, until the outbox is closed and empty."""
        return aiter(self.outbox)


S = TypeVar("S", bound=CallerStream)


class Service(Protocol[S]):
    """What a role does with its streams."""

    def open(self, hello: Any) -> S:
        """Accepts a stream. Raises BatonError."""

    def welcome(self) -> list[Any]:
        """The first messages to the caller."""

    def several(self, message: Any) -> Any:
        """The commands of a message with `several`."""

    def handle_command(self, command: Any, stream: S) -> None:
        """Raises BatonError when the stream is to end for it."""

    def half_closed(self, stream: S) -> None:
        """The caller sends no more."""

    def drop(self, stream: S) -> None:
        """The stream has ended, or its caller does not read: cancels its requests."""


class CallerStreams(Generic[S]):
    """All streams of a node, each from its first message to its end."""

    def __init__(self, service: Service[S], tasks: Tasks) -> None:
        self._service = service
        self._tasks = tasks
        self.open: set[S] = set()

    @property
    def unsent(self) -> bool:
        """Whether a message waits to be written. May be asked from another thread."""
        return any(len(stream.outbox) or stream.writing for stream in list(self.open))

    def close(self, error: BatonError) -> None:
        """Ends all with the error."""
        for stream in list(self.open):
            stream.close(error)

    async def serve(
        self, requests: Any, context: grpc.aio.ServicerContext, method: str
    ) -> AsyncGenerator[Any, None]:
        """Answers one call, whose first message is `hello`."""
        service = self._service
        try:
            first = await first_message(requests, method)
            if first.WhichOneof("kind") != "hello" or not first.hello.incarnation:
                text = f"the first message on {method} must be `hello` with a non-zero incarnation"
                raise invalid("hello.incarnation", text)
            stream = service.open(first.hello)
        except BatonError as error:
            await abort(context, error)
        self.open.add(stream)
        reader = self._tasks.spawn(self._read(requests, stream), f"reader of {method}")
        try:
            for message in service.welcome():
                yield message
            async for message in stream.messages():
                stream.writing = True
                yield message  # returns when gRPC has written it
                stream.writing = False
        finally:
            reader.cancel()
            self.open.discard(stream)
            service.drop(stream)
        if stream.error is not None:
            await abort(context, stream.error)

    async def _read(self, requests: Any, stream: S) -> None:
        """Awaits only the next message."""
        service = self._service
        try:
            async for message in requests:
                if stream.outbox.closed:
                    return  # what it asks for now would outlive it
                if not message.HasField("several"):
                    service.handle_command(message, stream)
                    continue
                for command in service.several(message):
                    service.handle_command(command, stream)
            service.half_closed(stream)
        except BatonError as error:
            stream.close(error)
        except STREAM_ENDED:
            pass  # the writer's end of the call informs the core
        except Exception as error:
            # A stream that nobody reads would answer none of the caller's heartbeats.
            stream.close(internal(f"{type(error).__name__} while handling a message"))
            raise
