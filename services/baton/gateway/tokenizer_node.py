"""The gateway's side of one tokenizer process: calls that encode, and one stream that detokenizes."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any, Protocol, TypeVar

import grpc.aio

from baton.rpc.channel import Dial, open_channel
from baton.rpc.errors import BatonError, from_rpc_error, unavailable
from baton.rpc.link import Link
from baton.rpc.soon import Soon
from baton.v1 import node_pb2, node_pb2_grpc, tokenizer_pb2, tokenizer_pb2_grpc

_HELLO = 0  # the id of a token stream that is opened and closed at once: its answer says that the link works

_Answer = TypeVar("_Answer")

_GONE = (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED, grpc.StatusCode.CANCELLED)
"""Of a call. CANCELLED is of a tokenizer that stops: a call cancelled on this side raises CancelledError."""


class TextSink(Protocol):
    """Who owns a token stream."""

    def on_text(self, output: tokenizer_pb2.DetokenizeOutput) -> None:
        """The answer to the oldest item not yet answered."""

    def on_tokenizer_changed(self) -> None:
        """The token stream is gone with its tokenizer: it is to be opened anew, with what is unanswered."""

    def on_detokenizer_lost(self, error: BatonError) -> None:
        """No tokenizer could be had for too long: nothing more is answered."""


class TokenizerNode:
    """One tokenizer process. Items pushed in one turn of the event loop leave as one message.

    on_up: it has become usable. on_down: the streams of these sinks are gone.
    """

    def __init__(
        self,
        address: str,
        on_up: Callable[[], None],
        on_down: Callable[[list[TextSink], BatonError], None],
        dial: Dial = open_channel,
    ) -> None:
        self.address = address
        self.info: node_pb2.NodeInfo | None = None
        self.sinks: dict[int, TextSink] = {}
        """Token streams that are open, by their ids."""
        self._up = on_up
        self._down = on_down
        self._batch = tokenizer_pb2.DetokenizeRequest()
        self._flush_soon = Soon(self._flush)
        # Encoding has a connection of its own: a large prompt does not hold up the tokens of others.
        self._channel = dial(address)
        self._stub = tokenizer_pb2_grpc.TokenizerStub(self._channel)
        self._link = Link[tokenizer_pb2.DetokenizeRequest, tokenizer_pb2.DetokenizeResponse](
            address,
            lambda channel: tokenizer_pb2_grpc.TokenizerStub(channel).Detokenize,
            hello=lambda: tokenizer_pb2.DetokenizeRequest(
                items=[tokenizer_pb2.DetokenizeItem(id=_HELLO, finish=True)]
            ),
            on_message=self._on_message,
            on_up=self._on_up,
            on_down=self._on_down,
            join=_join,
            dial=dial,
        )
        self._asking: asyncio.Task[None] | None = None

    @property
    def connected(self) -> bool:
        return self._link.connected and self.info is not None

    @property
    def trouble(self) -> BatonError:
        """That it cannot be reached, and why."""
        return self._gone(self._link.last_error)

    def start(self) -> None:
        self._link.start()

    async def close(self) -> None:
        """Token streams end unanswered."""
        if self._asking is not None:
            self._asking.cancel()
        self.info = None
        await self._link.close()
        await self._channel.close()

    async def encode(self, request: tokenizer_pb2.EncodeRequest, timeout: float) -> Any:
        """Raises BatonError."""
        return await self._call(self._stub.Encode(request, timeout=timeout))

    async def decode(self, request: tokenizer_pb2.DecodeRequest, timeout: float) -> Any:
        """Raises BatonError."""
        return await self._call(self._stub.Decode(request, timeout=timeout))

    def push(self, id: int) -> tokenizer_pb2.DetokenizeItem:
        """An item to be filled in now."""
        self._flush_soon()
        return self._batch.items.add(id=id)

    def close_stream(self, id: int) -> None:
        """The owner wants no more text; the tokenizer frees what it holds."""
        if self.sinks.pop(id, None) is not None:
            self.push(id).finish = True

    def _flush(self) -> None:
        if not self._batch.items:
            return
        request, self._batch = self._batch, tokenizer_pb2.DetokenizeRequest()
        # What cannot be sent has been lost with the link, whose on_down tells the sinks.
        self._link.send(request)

    def lose_streams(self, error: BatonError) -> None:
        """Gives up all token streams; their sinks are told."""
        lost, self.sinks = list(self.sinks.values()), {}
        self._batch = tokenizer_pb2.DetokenizeRequest()
        self._down(lost, error)

    def _on_message(self, response: tokenizer_pb2.DetokenizeResponse) -> None:
        for output in response.outputs:
            sink = self.sinks.get(output.id)
            if sink is None:
                continue  # closed by its owner; the tokenizer had answered before it knew
            if output.finished or output.HasField("error"):
                del self.sinks[output.id]
            sink.on_text(output)

    def _on_up(self, first: tokenizer_pb2.DetokenizeResponse) -> None:
        self._asking = asyncio.get_running_loop().create_task(self._ask())

    async def _ask(self) -> None:
        try:
            self.info = await node_pb2_grpc.NodeStub(self._channel).GetInfo(
                node_pb2.GetInfoRequest(), timeout=10.0, wait_for_ready=True
            )
            self._up()
        except grpc.aio.AioRpcError as error:
            self._link.reset(from_rpc_error(error))

    def _on_down(self, error: BatonError) -> None:
        self.info = None
        if self._asking is not None:
            self._asking.cancel()
        self.lose_streams(self._gone(error))

    def _gone(self, cause: BatonError | None = None) -> BatonError:
        why = f": {cause.message}" if cause is not None else ""
        return unavailable(f"tokenizer {self.address} is not reachable{why}", "TOKENIZER_UNAVAILABLE", 1000)

    async def _call(self, call: Awaitable[_Answer]) -> _Answer:
        try:
            return await call
        except grpc.aio.AioRpcError as failed:
            error = from_rpc_error(failed)
            if error.code in _GONE:
                raise self._gone(error) from failed
            raise error from failed
        except asyncio.CancelledError:
            # Either this task is cancelled, or the call was, by close().
            if _cancelling():
                raise
            raise self._gone() from None


def _cancelling() -> bool:
    """Whether the current task is. In a frame of its own: a task that is cancelled keeps the traceback, and
    would thus keep itself."""
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0


def _join(requests: list[tokenizer_pb2.DetokenizeRequest]) -> tokenizer_pb2.DetokenizeRequest:
    first, *others = requests
    for request in others:
        first.items.extend(request.items)
    return first
