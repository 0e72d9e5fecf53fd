"""The client's end of a bidirectional call: what its server said, to the end, however writes fare.

When a write meets the end of its call, grpc.aio puts a status of its own (INTERNAL) in the place of the
server's, and its read() drops the messages that came before that end (github.com/grpc/grpc/issues/36066).
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from types import AsyncGeneratorType
from typing import Any, Generic, TypeVar

import grpc
import grpc.aio

from baton.rpc.errors import from_rpc_error

Req = TypeVar("Req")
Resp = TypeVar("Resp")

WRITE_FAILED = grpc.StatusCode.INTERNAL, "Internal error from Core"
"""What grpc.aio says of a call with a failed write."""
STATUS_SECONDS = 1.0
"""Between a call's last message and its status: they come together, if the status comes at all."""


class ClientStream(Generic[Req, Resp]):
    """One call. Of its end write() says only that; read() says how, after the messages before it."""

    def __init__(self, call: Any) -> None:
        """call: of a stub, neither written to nor read."""
        self._call = call
        self._messages: AsyncGeneratorType[Resp, None] = aiter(call)
        self._ending = Ending()
        call.add_done_callback(self._ending.keep)

    def __del__(self) -> None:
        # The generator and the call hold one another: the garbage collector need not deal with them.
        if hasattr(self, "_messages") and not self._messages.ag_running:
            _now(self._messages.aclose())

    async def write(self, message: Req) -> bool:
        """False: the call has ended."""
        try:
            await self._call.write(message)
        except (grpc.aio.AioRpcError, asyncio.InvalidStateError):
            return False
        except asyncio.CancelledError:
            if not self._is_of_the_call():
                raise
            return False
        return True

    async def done_writing(self) -> None:
        """Nothing more will be written."""
        try:
            await self._call.done_writing()
        except grpc.aio.InternalError:
            return  # the call has ended
        except asyncio.CancelledError:
            if not self._is_of_the_call():
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
            if not self._is_of_the_call():
                raise
        error = await self._ending.error()
        if error is None:
            return grpc.aio.EOF
        raise from_rpc_error(error)

    def cancel(self) -> None:
        """Ends the call. Idempotent."""
        self._call.cancel()

    def done(self) -> bool:
        """Whether the call has ended; messages of it may still be there to read."""
        return bool(self._call.done())

    def _is_of_the_call(self) -> bool:
        """Of a CancelledError: whether the call was cancelled rather than the task."""
        task = asyncio.current_task()
        return task is not None and not task.cancelling() and bool(self._call.cancelled())


class Ending:
    """A call's status: the server's, or grpc.aio's own where there is no other. Holds no call, no stream."""

    def __init__(self) -> None:
        self._error: grpc.aio.AioRpcError | None = None
        self._known = asyncio.Event()

    def keep(self, call: Any) -> None:
        """Called for each status that a call gets; grpc.aio's own may come before or after the server's."""
        if self._known.is_set():
            return
        code, details = _now(call.code()), _now(call.details())
        self._error = None
        if code is not grpc.StatusCode.OK:
            metadata = _now(call.trailing_metadata())
            self._error = grpc.aio.AioRpcError(code, grpc.aio.Metadata(), metadata, details)
        if (code, details) != WRITE_FAILED:
            self._known.set()

    async def error(self) -> grpc.aio.AioRpcError | None:
        """None: ended without one. Called once all messages have been read."""
        try:
            async with asyncio.timeout(STATUS_SECONDS):
                await self._known.wait()
        except TimeoutError:
            pass  # what there is must do
        return self._error


def _now(coroutine: Coroutine[Any, Any, Any]) -> Any:
    """The result of one that has nothing to wait for."""
    try:
        coroutine.send(None)
    except StopIteration as result:
        return result.value
    coroutine.close()
    raise RuntimeError(f"{coroutine} waits")
