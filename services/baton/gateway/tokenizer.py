"""The gateway's side of the Tokenizer service: encoding, and one stream that detokenizes for all requests."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Sequence
from itertools import count
from typing import Protocol, TypeVar

import grpc.aio

from baton.rpc.channel import Dial, open_channel
from baton.rpc.errors import BatonError, from_rpc_error, from_status, internal, unavailable
from baton.rpc.link import Link
from baton.v1 import node_pb2, node_pb2_grpc, tokenizer_pb2, tokenizer_pb2_grpc

_HELLO = 0  # the id of a token stream that is opened and closed at once: its answer says that the link works

_Answer = TypeVar("_Answer")


class TextSink(Protocol):
    """Who owns a token stream."""

    def on_text(self, output: tokenizer_pb2.DetokenizeOutput) -> None:
        """The answer to the oldest item not yet answered."""

    def on_detokenizer_lost(self, error: BatonError) -> None:
        """The token stream is gone; nothing more is answered."""


class Tokenizer:
    """One tokenizer service. Items pushed while handling a step leave as one message, at flush()."""

    def __init__(self, address: str, dial: Dial = open_channel) -> None:
        self.address = address
        self.info: node_pb2.NodeInfo | None = None
        self._ids = count(1)
        self._sinks: dict[int, TextSink] = {}
        self._batch: list[tokenizer_pb2.DetokenizeItem] = []
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
            merge=_merge,
            dial=dial,
        )
        self._asking: asyncio.Task[None] | None = None

    @property
    def connected(self) -> bool:
        return self._link.connected and self.info is not None

    @property
    def chat(self) -> bool:
        return self.info is not None and self.info.model.chat

    @property
    def streams(self) -> int:
        """Token streams that are open."""
        return len(self._sinks)

    def check(self) -> None:
        """Raises BatonError while the tokenizer cannot be reached."""
        if not self.connected:
            raise self._gone()

    def start(self) -> None:
        self._link.start()

    async def close(self) -> None:
        if self._asking is not None:
            self._asking.cancel()
        await self._link.close()
        await self._channel.close()

    async def encode(
        self, inputs: Sequence[tokenizer_pb2.EncodeInput], timeout: float
    ) -> list[tokenizer_pb2.EncodeResult]:
        """Encodes; raises the BatonError of the first input that cannot be."""
        request = tokenizer_pb2.EncodeRequest(inputs=inputs)
        call: Awaitable[tokenizer_pb2.EncodeResponse] = self._stub.Encode(request, timeout=timeout)
        response = await self._call(call)
        for result in response.results:
            if result.HasField("error"):
                error = from_status(result.error)
                if error.field is not None:  # "inputs[0].chat.messages[1].role" to "chat.messages[1].role"
                    _, _, field = error.field.partition(".")
                    error.message = error.message.replace(error.field, field)
                    error.field = field
                raise error
        if len(response.results) != len(inputs):
            raise internal(
                f"tokenizer {self.address} answered {len(response.results)} of {len(inputs)} inputs"
            )
        return list(response.results)

    async def decode(self, token_ids: Sequence[int], timeout: float) -> str:
        """The text of a whole token sequence, special tokens left out."""
        sequence = tokenizer_pb2.TokenSequence(token_ids=token_ids)
        request = tokenizer_pb2.DecodeRequest(sequences=[sequence])
        call: Awaitable[tokenizer_pb2.DecodeResponse] = self._stub.Decode(request, timeout=timeout)
        return (await self._call(call)).texts[0]

    def open(self, sink: TextSink) -> int:
        """A new token stream, opened by its first item."""
        id = next(self._ids)
        self._sinks[id] = sink
        return id

    def push(self, item: tokenizer_pb2.DetokenizeItem) -> None:
        self._batch.append(item)

    def close_stream(self, id: int) -> None:
        """The owner wants no more text; the tokenizer frees what it holds."""
        if self._sinks.pop(id, None) is not None:
            self._batch.append(tokenizer_pb2.DetokenizeItem(id=id, finish=True))

    def flush(self) -> None:
        if not self._batch:
            return
        request = tokenizer_pb2.DetokenizeRequest(items=self._batch)
        self._batch = []
        if not self._link.send(request):
            self._lose(self._gone())

    def _on_message(self, response: tokenizer_pb2.DetokenizeResponse) -> None:
        for output in response.outputs:
            sink = self._sinks.get(output.id)
            if sink is None:
                continue  # closed by its owner; the tokenizer had answered before it knew
            if output.finished or output.HasField("error"):
                del self._sinks[output.id]
            sink.on_text(output)
        self.flush()

    def _on_up(self, first: tokenizer_pb2.DetokenizeResponse) -> None:
        self._asking = asyncio.get_running_loop().create_task(self._ask())

    async def _ask(self) -> None:
        try:
            self.info = await node_pb2_grpc.NodeStub(self._channel).GetInfo(
                node_pb2.GetInfoRequest(), timeout=10.0
            )
        except grpc.aio.AioRpcError as error:
            self._link.reset(from_rpc_error(error))

    def _on_down(self, error: BatonError) -> None:
        self.info = None
        self._lose(self._gone(error))

    def _lose(self, error: BatonError) -> None:
        lost, self._sinks, self._batch = self._sinks, {}, []
        for sink in lost.values():
            sink.on_detokenizer_lost(error)

    def _gone(self, cause: BatonError | None = None) -> BatonError:
        why = f": {cause.message}" if cause is not None else ""
        return unavailable(f"tokenizer {self.address} is not reachable{why}", "TOKENIZER_UNAVAILABLE", 1000)

    async def _call(self, call: Awaitable[_Answer]) -> _Answer:
        try:
            return await call
        except grpc.aio.AioRpcError as failed:
            error = from_rpc_error(failed)
            if error.code in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED):
                raise self._gone(error) from failed
            raise error from failed


def _merge(
    unsent: tokenizer_pb2.DetokenizeRequest, new: tokenizer_pb2.DetokenizeRequest
) -> tokenizer_pb2.DetokenizeRequest:
    unsent.items.extend(new.items)
    return unsent
