"""The client side of a bidirectional call. It reads all messages and the server's status, even if writes
fail.

When a write meets the end of its call, grpc.aio puts a status of its own (INTERNAL) in the place of the
server's, and its read() drops the messages that came before that end (github.com/grpc/grpc/issues/36066).
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Coroutine
from types import AsyncGeneratorType
from typing import Any, Generic, TypeVar

import grpc
import grpc.aio

from baton.rpc.errors import from_rpc_error
from baton.rpc.tasks import task_is_cancelled

Req = TypeVar("Req")
Resp = TypeVar("Resp")

WRITE_FAILED = grpc.StatusCode.INTERNAL, "Internal error from Core"
"""grpc.aio's own status of a call with a failed write."""
STATUS_SECONDS = 1.0
"""Wait for a call's status after its last message: they come together, if the status comes at all."""
POLL_SECONDS = 2e-3
"""From 1.84 on grpc.aio reports only a call's first status; another one is polled for at this interval."""


class ClientStream(Generic[Req, Resp]):
    """One call. write() only reports that the call has ended; read() raises its status, after the messages
    before it. A call without references is cancelled, unless let_end() was called."""

    def __init__(self, call: Any) -> None:
        """call: a stub's call that has been neither written to nor read."""
        self._call = call
        self._messages: AsyncGeneratorType[Resp, None] = aiter(call)
        self._ending = Ending()
        self._connected = self._ends_by_itself = False
        self._writing = asyncio.Lock()
        call.add_done_callback(self._ending.keep)

    def __del__(self) -> None:
        # The call's own cancellation would come too late, or never: the callback above holds it.
        if hasattr(self, "_writing"):
            if not self._ends_by_itself and not self._call.done():
                self._call.cancel()
            if not self._messages.ag_running:
                _now(self._messages.aclose())

    async def write(self, message: Req) -> bool:
        """False: the call has ended. Several tasks may write: one waits for the other. Where the writing task
        is cancelled the message has not left, or the call is cancelled with it. Raises InvalidStateError
        after done_writing()."""
        async with self._writing:
            try:
                if self._connected:
                    await self._call.write(message)
                else:
                    await self._first_write(message)
                    self._connected = True
            except grpc.aio.AioRpcError:
                return False
            except asyncio.InvalidStateError:
                if not self._call.done():
                    raise
                return False
            except asyncio.CancelledError:
                if task_is_cancelled():
                    raise
                return False
        return True

    async def done_writing(self) -> None:
        """Closes the sending side."""
        async with self._writing:
            try:
                await self._call.done_writing()
            except grpc.aio.InternalError:
                return  # the call has ended
            except asyncio.CancelledError:
                if task_is_cancelled():
                    raise

    async def read(self) -> Resp | Any:
        """The next message, or grpc.aio.EOF once the server has ended the call without an error. Raises
        BatonError: the one that the server ended it with, or CANCELLED after cancel(). Cancelling the reading
        task cancels the call."""
        try:
            return await anext(self._messages)
        except (StopAsyncIteration, grpc.aio.AioRpcError):
            pass
        except asyncio.CancelledError:
            if task_is_cancelled():
                raise
        error = await self._ending.error(self._call)
        if error is None:
            return grpc.aio.EOF
        raise from_rpc_error(error)

    def cancel(self) -> None:
        """Ends the call. Idempotent."""
        self._call.cancel()

    def let_end(self) -> None:
        """The server is about to end the call; its status will not be read."""
        self._ends_by_itself = True

    def done(self) -> bool:
        """Whether the call has ended; messages of it may still be there to read."""
        return bool(self._call.done())

    async def _first_write(self, message: Req) -> None:
        """Like call.write(), but ends with the call; that one would go on waiting for a connection."""
        writing = asyncio.ensure_future(self._call.write(message))
        writing.add_done_callback(retrieve)
        over = asyncio.ensure_future(self._ending.begun.wait())
        try:
            await asyncio.wait({writing, over}, return_when=asyncio.FIRST_COMPLETED)
        except asyncio.CancelledError:
            if writing.done():
                self._call.cancel()
            raise
        finally:
            over.cancel()
            writing.cancel()
        await writing


class Ending:
    """A call's status: the server's, or grpc.aio's own if there is no other. Holds no reference to the
    call."""

    def __init__(self) -> None:
        self.begun = asyncio.Event()
        """Set once there is any status."""
        self._error: grpc.aio.AioRpcError | None = _no_status()
        self._known = asyncio.Event()

    def keep(self, call: Any) -> None:
        """Called for each status of a call; grpc.aio's own may come before or after the server's."""
        if self._known.is_set():
            return
        code, details = _now(call.code()), _now(call.details())
        self._error = None
        if code is not grpc.StatusCode.OK:
            metadata = _now(call.trailing_metadata())
            self._error = grpc.aio.AioRpcError(code, grpc.aio.Metadata(), metadata, details)
        self.begun.set()
        if (code, details) != WRITE_FAILED:
            self._known.set()

    async def error(self, call: Any) -> grpc.aio.AioRpcError | None:
        """The call's error; None: it ended without one. Called once all messages have been read."""
        with contextlib.suppress(TimeoutError):  # then the status so far must do
            async with asyncio.timeout(STATUS_SECONDS):
                while not self._known.is_set():
                    if call.done():
                        self.keep(call)
                    with contextlib.suppress(TimeoutError):
                        async with asyncio.timeout(POLL_SECONDS):
                            await self._known.wait()
        if call.done():
            self.keep(call)
        return self._error


def retrieve(task: asyncio.Task[Any]) -> None:
    """Retrieves the exception of a task that nothing awaits any more."""
    if not task.cancelled():
        task.exception()


def _no_status() -> grpc.aio.AioRpcError:
    none = grpc.aio.Metadata()
    return grpc.aio.AioRpcError(grpc.StatusCode.UNKNOWN, none, none, "the call has ended without a status")


def _now(coroutine: Coroutine[Any, Any, Any]) -> Any:
    """The result of a coroutine that does not wait."""
    try:
        coroutine.send(None)
    except StopIteration as result:
        return result.value
    coroutine.close()
    raise RuntimeError(f"{coroutine} waits")
