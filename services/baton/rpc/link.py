"""Client side of a long-lived stream between two processes. It reconnects until it is closed."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable
from typing import Any, Generic, TypeVar

import grpc.aio

from baton.rpc.channel import MAX_MESSAGE_BYTES, Dial, open_channel
from baton.rpc.client_stream import ClientStream
from baton.rpc.errors import BatonError, deadline_exceeded, internal, unavailable
from baton.rpc.logs import get_logger
from baton.rpc.outbox import Outbox, OutboxFull, byte_size
from baton.rpc.tasks import Tasks, keep_connected

Req = TypeVar("Req")
Resp = TypeVar("Resp")

MAX_QUEUED_BYTES = 256 * 2**20
"""Limit of unsent commands; a peer that leaves more unread counts as stalled."""
JOINED_BYTES = 2**16
"""Most bytes of unsent requests joined into one message: less than message_scan.MAX_FIELDS fields."""

_log = get_logger()


class Link(Generic[Req, Resp]):
    """One bidirectional stream to one address, opened again after every loss until close().

    open_stream: from a channel to the stub's stream method, e.g. `lambda c: DecodeStub(c).Generate`.
    hello: makes the first message of each session.
    on_up: gets the first message received, when the link has become usable; may send().
    on_message: gets every later message.
    on_down: called once for every session that ended and for every attempt to connect that failed (so it may
        come without on_up before it); what was sent in that session and is not answered is lost.
    join: makes one message of several requests that are unsent, in order; it may change the first of them.
        None: each is a message of its own.
    dial: opens the connection of each session.

    Callbacks run on the event loop and must not block; one that raises is logged and takes the link down. The
    reader awaits nothing but the next message. After close() no callback is called.
    """

    def __init__(
        self,
        address: str,
        open_stream: Callable[[grpc.aio.Channel], Callable[[], Any]],
        hello: Callable[[], Req],
        on_message: Callable[[Resp], None],
        on_up: Callable[[Resp], None],
        on_down: Callable[[BatonError], None],
        join: Callable[[list[Req]], Req] | None = None,
        *,
        dial: Dial = open_channel,
        max_message_bytes: int = MAX_MESSAGE_BYTES,
        connect_seconds: float = 10.0,
    ) -> None:
        self.address = address
        self.last_error: BatonError | None = None
        """Why the link is down or was last down."""
        self._open_stream = open_stream
        self._hello = hello
        self._on_message = on_message
        self._on_up = on_up
        self._on_down = on_down
        self._join = join
        self._dial = dial
        self._max_message_bytes = max_message_bytes
        self._connect_seconds = connect_seconds
        self._outbox: Outbox[Req] | None = None
        self._connected = False
        self._closed = False
        self._call: ClientStream[Req, Resp] | None = None
        self._failure: BatonError | None = None
        self._tasks = Tasks()

    @property
    def connected(self) -> bool:
        """Whether send() can be used: from on_up to on_down."""
        return self._connected

    def start(self) -> None:
        """Begins to connect. Called once, on the running event loop."""
        self._tasks.spawn(keep_connected(self._connect), f"link {self.address}")

    def send(self, request: Req) -> bool:
        """Returns False if the link is down and nothing was sent. True does not promise arrival: see
        on_down. Never waits."""
        if not self._connected or self._outbox is None:
            return False
        try:
            return self._outbox.put(request)
        except OutboxFull as error:
            self.reset(unavailable(f"{self.address} does not read: {error}", "PEER_STALLED"))
            return False

    def reset(self, error: BatonError) -> None:
        """Ends the session with `error`; a new one is opened after the backoff."""
        if self._call is not None and self._failure is None:
            self._failure = error
            self._connected = False
            self._call.cancel()

    async def close(self) -> None:
        """Ends the session and does not reconnect. Idempotent."""
        self._closed = True
        self._connected = False
        await self._tasks.close()

    async def _connect(self) -> bool:
        was_up, error = await self._session()
        if self._closed:
            return False
        self.last_error = error
        level = logging.WARNING if was_up else logging.DEBUG
        _log.log(level, "link down", address=self.address, reason=error.reason, error=error.message)
        try:
            self._on_down(error)
        except Exception:
            _log.exception("on_down failed", address=self.address)
        # A peer that answers but cannot be used is retried with a growing pause too.
        return was_up and error.code is not grpc.StatusCode.FAILED_PRECONDITION

    async def _session(self) -> tuple[bool, BatonError]:
        """Connects and serves one stream to its end. Returns whether it was up, and why it ended."""
        self._failure = None
        was_up = False
        outbox = self._outbox = Outbox[Req](None, size_of=byte_size, max_bytes=MAX_QUEUED_BYTES)
        channel = self._dial(self.address, self._max_message_bytes)
        writer: asyncio.Task[None] | None = None
        try:
            call = self._call = ClientStream[Req, Resp](self._open_stream(channel)())
            async with asyncio.timeout(self._connect_seconds):
                await call.write(self._hello())
                first = await call.read()
            if first is grpc.aio.EOF:
                raise self._closed_by_peer()
            writer = self._tasks.spawn(self._write(call, outbox), f"link {self.address} writer")
            self._connected = was_up = True
            _log.info("link up", address=self.address)
            self._callback(self._on_up, first)
            while self._failure is None:
                message = await call.read()
                if message is grpc.aio.EOF:
                    raise self._closed_by_peer()
                self._callback(self._on_message, message)
            error = self._failure
        except TimeoutError:
            error = deadline_exceeded(
                f"{self.address} did not answer within {self._connect_seconds:g} s", "CONNECT_TIMEOUT"
            )
        except BatonError as ending:
            error = self._failure or ending
        except Exception as unexpected:
            _log.exception("link failed", address=self.address)
            error = internal(f"{type(unexpected).__name__} on the link to {self.address}")
        finally:
            self._connected = False
            self._call = None
            outbox.close()
            if writer is not None:
                writer.cancel()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(5.0):
                    await channel.close()
        return was_up, error

    def _callback(self, callback: Callable[[Resp], None], message: Resp) -> None:
        try:
            callback(message)
        except Exception as error:
            _log.exception("callback failed", address=self.address)
            self.reset(internal(f"{type(error).__name__} while handling a message of {self.address}"))

    async def _write(self, call: ClientStream[Req, Resp], outbox: Outbox[Req]) -> None:
        async for request in outbox:
            if self._join is not None and (more := outbox.take(JOINED_BYTES)):
                request = self._join([request, *more])
            if not await call.write(request):
                return

    def _closed_by_peer(self) -> BatonError:
        return unavailable(f"{self.address} closed the stream", "STREAM_CLOSED")
