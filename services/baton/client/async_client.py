"""The client for asyncio. The same as baton.client.sync_client, awaited."""

from __future__ import annotations

import asyncio
import weakref
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass
from itertools import count
from typing import Any, Unpack

import grpc.aio

from baton.authentication.client_credentials import ClientCredentials
from baton.client.closed import Closed
from baton.client.messages import (
    Collector,
    call_timeout,
    embeddings,
    make_cancel,
    make_embed,
    make_start,
    model,
)
from baton.client.resuming import Gateways, Resuming
from baton.client.types import (
    DEFAULT_ADDRESS,
    Arguments,
    Completion,
    Delta,
    Embeddings,
    EmbedOptions,
    Input,
    Model,
)
from baton.rpc.channel import MAX_MESSAGE_BYTES, open_channel
from baton.rpc.client_stream import ClientStream, retrieve
from baton.rpc.errors import BatonError, from_rpc_error
from baton.v1 import inference_pb2, inference_pb2_grpc

GenerateCall = ClientStream[inference_pb2.GenerateRequest, inference_pb2.GenerateResponse]

MODELS_SECONDS = 10.0
CLOSE_SECONDS = 5.0


class AsyncClient:
    """A connection to a gateway, or to several; tasks of one event loop may share it. All methods raise
    BatonError."""

    def __init__(
        self,
        address: str | Sequence[str] = DEFAULT_ADDRESS,
        *,
        api_key: str | None = None,
        tls_ca: str | None = None,
        max_message_bytes: int = MAX_MESSAGE_BYTES,
    ) -> None:
        """address: as of Client. Connects with the first call. Needs a running event loop.

        api_key: None takes BATON_API_KEY, "" sends none. tls_ca: PEM file with the CA of the gateway's
        certificate, or "system" for those that gRPC brings along; None takes BATON_TLS_CA, "" is no TLS.
        """
        self._gateways = Gateways(address)
        access = ClientCredentials.of(api_key, tls_ca)
        self._channels = [
            open_channel(each, max_message_bytes, credentials=access.credentials, metadata=access.metadata)
            for each in self._gateways.addresses
        ]
        self._stubs: list[inference_pb2_grpc.InferenceStub | Closed] = [
            inference_pb2_grpc.InferenceStub(channel) for channel in self._channels
        ]
        self._calls: set[Any] = set()

    async def __aenter__(self) -> AsyncClient:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Closes the connection; running requests are cancelled."""
        self._stubs = [Closed()] * len(self._stubs)
        for call in list(self._calls):  # the channel's own close() misses streams that are being read
            call.cancel()
        for channel in self._channels:
            await channel.close()

    @property
    def address(self) -> str:
        """Address of the gateway that new requests go to."""
        return self._gateways.address

    @property
    def _stub(self) -> inference_pb2_grpc.InferenceStub | Closed:
        return self._stubs[self._gateways.used]

    def _generate(self, used: int, timeout: float | None = None) -> GenerateCall:
        """used: which gateway."""
        call = self._stubs[used].Generate(timeout=timeout)
        self._calls.add(call)
        call.add_done_callback(self._calls.discard)
        return GenerateCall(call)

    async def models(self) -> list[Model]:
        try:
            response = await self._stub.ListModels(inference_pb2.ListModelsRequest(), timeout=MODELS_SECONDS)
        except grpc.aio.AioRpcError as error:
            raise from_rpc_error(error) from None
        return [model(each) for each in response.models]

    async def generate(self, prompt: str | None = None, **options: Unpack[Arguments]) -> Completion:
        """Answers one of prompt, messages (a str: one user message) and token_ids, as a whole.

        Cancelling the awaiting task cancels the request.
        """
        async with self.stream(prompt, **options) as stream:
            return await stream.completion()

    def stream(self, prompt: str | None = None, **options: Unpack[Arguments]) -> AsyncStream:
        """Streams the answer piece by piece; begins with the first read. Closing it before its end
        cancels it."""
        collector = Collector("0", options)
        start, timeout = make_start("0", prompt, options), call_timeout(options)
        resuming = Resuming(start, collector, timeout, self._gateways)

        def open_call() -> CallOfStream:
            call = self._generate(resuming.used, resuming.timeout)

            async def begin() -> None:
                await call.write(resuming.message)
                await call.done_writing()

            return CallOfStream(call.read, begin, call.cancel, call.let_end)

        return AsyncStream(open_call(), collector, resuming, open_call)

    async def embed(self, inputs: Sequence[Input], **options: Unpack[EmbedOptions]) -> Embeddings:
        """The embedding of each input, a text or token ids."""
        request = make_embed(inputs, options)
        try:
            answer = await self._stub.Embed(request, timeout=call_timeout(options))
        except grpc.aio.AioRpcError as error:
            raise from_rpc_error(error) from None
        return embeddings(answer)

    def session(self) -> AsyncSession:
        """Turns that continue one token sequence; the gateway and its nodes keep what they need to go on."""
        return AsyncSession(self._generate(self._gateways.used))


@dataclass(slots=True)
class CallOfStream:
    """What a stream needs of its call."""

    read: Callable[[], Awaitable[Any]]
    begin: Callable[[], Awaitable[None]] | None
    """None once it has been called."""
    cancel: Callable[[], None]
    ended: Callable[[], None] = lambda: None
    """Called after the terminal event."""


class AsyncStream(AsyncIterator[Delta]):
    """One running request. Iterate it, or await the whole `completion()`."""

    def __init__(
        self,
        call: CallOfStream,
        collector: Collector,
        resuming: Resuming | None = None,
        reopen: Callable[[], CallOfStream] | None = None,
    ) -> None:
        """reopen: returns a call of the gateway that comes next. Without it the stream ends with its
        gateway."""
        self._call = call
        self._collector = collector
        self._resuming = resuming
        self._reopen = reopen

    async def __aenter__(self) -> AsyncStream:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()

    async def __anext__(self) -> Delta:
        while not self._collector.ended:
            try:
                delta = self._collector.add(await self._read())
            except BatonError as error:
                await self._go_on(error)
                continue
            if self._collector.ended:
                self._call.ended()
            if self._resuming is not None:
                self._resuming.progressed()
            if delta is not None:
                return delta
        raise StopAsyncIteration

    async def _read(self) -> Any:
        call = self._call
        try:
            if call.begin is not None:
                begin, call.begin = call.begin, None
                await begin()
            event = await call.read()
        except BatonError:
            self._collector.ended = True
            raise
        if event is grpc.aio.EOF:
            raise self._collector.lost()
        return event

    async def _go_on(self, error: BatonError) -> None:
        """At another gateway. Raises the error if that is not possible."""
        if self._resuming is None or self._reopen is None:
            raise error
        await asyncio.sleep(self._resuming.again(error))
        if not self._collector.ended:  # or it has been closed meanwhile
            self._call = self._reopen()

    async def aclose(self) -> None:
        """Cancels the request, unless it has ended. Idempotent."""
        if not self._collector.ended:
            self._collector.ended = True
            if self._call.begin is None:
                self._call.cancel()

    async def completion(self) -> Completion:
        """Waits for the end; returns the whole answer, what has been iterated before included."""
        async for _ in self:
            pass
        return self._collector.completion

    @property
    def so_far(self) -> Completion:
        """What has been iterated so far."""
        return self._collector.completion


class AsyncSession:
    """A conversation, or a text that is continued. One turn at a time.

    What is given to a turn is appended to what the session holds: text or tokens to the token sequence,
    messages to the conversation (without the earlier ones).
    """

    def __init__(self, call: GenerateCall) -> None:
        """call: a separate stream, not written to yet."""
        self._call = call
        self._turns = count()
        self._messages = count()
        self._reading: asyncio.Task[Any] | None = None
        self._writings: set[asyncio.Task[bool]] = set()
        self._turn: weakref.ref[Collector] | None = None
        """The last one, unless nobody can read it any more."""

    def __del__(self) -> None:
        # The running read or write holds the call.
        if hasattr(self, "_writings"):
            self._call.cancel()

    async def __aenter__(self) -> AsyncSession:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Ends the session; a turn that still runs is cancelled. Idempotent."""
        self._call.cancel()
        under_way: set[asyncio.Task[Any]] = {*self._writings}
        if self._reading is not None:
            under_way.add(self._reading)
        if under_way:
            await asyncio.wait(under_way, timeout=CLOSE_SECONDS)

    async def send(self, prompt: str | None = None, **options: Unpack[Arguments]) -> Completion:
        """The next turn, as a whole."""
        async with self.stream(prompt, **options) as stream:
            return await stream.completion()

    def stream(self, prompt: str | None = None, **options: Unpack[Arguments]) -> AsyncStream:
        """The next turn, piece by piece. A turn that is closed before its end leaves no trace."""
        id = f"turn-{next(self._turns)}"
        collector = Collector(id, options)
        start = make_start(id, prompt, options, session="session")

        async def begin() -> None:
            if self._turn is not None and (turn := self._turn()) is not None:
                turn.check_over()
            self._turn = weakref.ref(collector)
            collector.message = next(self._messages)
            await asyncio.shield(self._write(start))

        def cancel() -> None:
            if not self._call.done():
                next(self._messages)
                self._write(make_cancel(id))

        return AsyncStream(CallOfStream(self._read, begin, cancel), collector)

    def _write(self, message: inference_pb2.GenerateRequest) -> asyncio.Task[bool]:
        # As with reads: a write outlives its turn, which would leave the count of messages wrong.
        writing = asyncio.ensure_future(self._call.write(message))
        self._writings.add(writing)
        writing.add_done_callback(self._writings.discard)
        writing.add_done_callback(retrieve)
        return writing

    async def _read(self) -> Any:
        # Cancelling a read would cancel the call, and with it the session: a turn's read outlives its task.
        if self._reading is None:
            self._reading = asyncio.ensure_future(self._call.read())
            self._reading.add_done_callback(retrieve)
        reading = self._reading
        try:
            return await asyncio.shield(reading)
        finally:
            if reading.done() and self._reading is reading:
                self._reading = None
