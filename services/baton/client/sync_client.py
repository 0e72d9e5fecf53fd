"""The client for programs that use threads, or neither threads nor asyncio."""

from __future__ import annotations

import queue
import time
from collections.abc import Callable, Iterator, Sequence
from itertools import count
from typing import Any, Unpack

import grpc

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
from baton.rpc.channel import MAX_MESSAGE_BYTES, Metadata, client_options
from baton.rpc.errors import BatonError, from_rpc_error
from baton.v1 import inference_pb2, inference_pb2_grpc

MODELS_SECONDS = 10.0


class Client:
    """A connection to a gateway, or to several; threads may share it. All methods raise BatonError."""

    def __init__(
        self,
        address: str | Sequence[str] = DEFAULT_ADDRESS,
        *,
        api_key: str | None = None,
        tls_ca: str | None = None,
        max_message_bytes: int = MAX_MESSAGE_BYTES,
    ) -> None:
        """address: the gateway's host:port; of several gateways, the first is used while it can be reached.
        Connects with the first call. A request whose gateway is lost goes on at the next one, or at the same
        one when it is back, if its answer has a resume ticket (--cluster-secret-file).

        api_key: None takes BATON_API_KEY, "" sends none. tls_ca: PEM file with the CA of the gateway's
        certificate, or "system" for those that gRPC brings along; None takes BATON_TLS_CA, "" is no TLS.
        """
        self._gateways = Gateways(address)
        access = ClientCredentials.of(api_key, tls_ca)
        self._metadata = access.metadata
        options = client_options(max_message_bytes)
        self._channels = [
            grpc.insecure_channel(each, options=options)
            if access.credentials is None
            else grpc.secure_channel(each, access.credentials, options=options)
            for each in self._gateways.addresses
        ]
        self._stubs: list[inference_pb2_grpc.InferenceStub | Closed] = [
            inference_pb2_grpc.InferenceStub(channel) for channel in self._channels
        ]

    def __enter__(self) -> Client:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Closes the connection; running requests are cancelled."""
        self._stubs = [Closed()] * len(self._stubs)
        for channel in self._channels:
            channel.close()

    @property
    def address(self) -> str:
        """Address of the gateway that new requests go to."""
        return self._gateways.address

    @property
    def _stub(self) -> inference_pb2_grpc.InferenceStub | Closed:
        return self._stubs[self._gateways.used]

    def models(self) -> list[Model]:
        try:
            response = self._stub.ListModels(
                inference_pb2.ListModelsRequest(), timeout=MODELS_SECONDS, metadata=self._metadata
            )
        except grpc.RpcError as error:
            raise from_rpc_error(error) from None
        return [model(each) for each in response.models]

    def generate(self, prompt: str | None = None, **options: Unpack[Arguments]) -> Completion:
        """Answers one of prompt, messages (a str: one user message) and token_ids, as a whole."""
        with self.stream(prompt, **options) as stream:
            return stream.completion()

    def stream(self, prompt: str | None = None, **options: Unpack[Arguments]) -> Stream:
        """Streams the answer piece by piece. Closing the stream before its end cancels the request."""
        collector = Collector("0", options)
        start, timeout = make_start("0", prompt, options), call_timeout(options)
        resuming = Resuming(start, collector, timeout, self._gateways)

        def open_call() -> Any:
            call_options = {"timeout": resuming.timeout, "metadata": self._metadata}
            return self._stubs[resuming.used].Generate(iter([resuming.message]), **call_options)

        call = open_call()
        return Stream(call, collector, call.cancel, resuming, open_call)

    def embed(self, inputs: Sequence[Input], **options: Unpack[EmbedOptions]) -> Embeddings:
        """The embedding of each input, a text or token ids."""
        request = make_embed(inputs, options)
        try:
            answer = self._stub.Embed(request, timeout=call_timeout(options), metadata=self._metadata)
        except grpc.RpcError as error:
            raise from_rpc_error(error) from None
        return embeddings(answer)

    def session(self) -> Session:
        """Turns that continue one token sequence; the gateway and its nodes keep what they need to go on."""
        return Session(self._stub, self._metadata)


class Stream(Iterator[Delta]):
    """One running request. Iterate it, or ask for the whole `completion()`."""

    def __init__(
        self,
        events: Iterator[inference_pb2.GenerateResponse],
        collector: Collector,
        cancel: Callable[[], object],
        resuming: Resuming | None = None,
        reopen: Callable[[], Any] | None = None,
    ) -> None:
        """reopen: returns a call of the gateway that comes next. Without it the stream ends with its
        gateway."""
        self._events = events
        self._collector = collector
        self._cancel = cancel
        self._resuming = resuming
        self._reopen = reopen

    def __enter__(self) -> Stream:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __del__(self) -> None:
        self.close()

    def __next__(self) -> Delta:
        while not self._collector.ended:
            try:
                delta = self._collector.add(self._next())
            except BatonError as error:
                self._go_on(error)
                continue
            if self._resuming is not None:
                self._resuming.progressed()
            if delta is not None:
                return delta
        raise StopIteration

    def _next(self) -> inference_pb2.GenerateResponse:
        try:
            return next(self._events)
        except StopIteration:
            raise self._collector.lost() from None
        except grpc.RpcError as error:
            self._collector.ended = True
            raise from_rpc_error(error) from None

    def _go_on(self, error: BatonError) -> None:
        """At another gateway. Raises the error if that is not possible."""
        if self._resuming is None or self._reopen is None:
            raise error
        time.sleep(self._resuming.again(error))
        if self._collector.ended:
            return  # closed meanwhile
        call = self._reopen()
        self._events, self._cancel = call, call.cancel

    def close(self) -> None:
        """Cancels the request, unless it has ended. Idempotent."""
        if not self._collector.ended:
            self._collector.ended = True
            self._cancel()

    def completion(self) -> Completion:
        """Waits for the end; returns the whole answer, what has been iterated before included."""
        for _ in self:
            pass
        return self._collector.completion

    @property
    def so_far(self) -> Completion:
        """What has been iterated so far."""
        return self._collector.completion


class Session:
    """A conversation, or a text that goes on. One turn at a time; not to be shared by threads.

    What is given to a turn is appended to what the session holds: text or tokens to the token sequence,
    messages to the conversation (without the earlier ones).
    """

    def __init__(self, stub: inference_pb2_grpc.InferenceStub | Closed, metadata: Metadata = ()) -> None:
        self._outgoing = outgoing = queue.SimpleQueue[Any]()
        self._call = stub.Generate(iter(outgoing.get, None), metadata=metadata)
        # A thread of the call's waits for what to send: it ends with the call, however that ends.
        if not self._call.add_callback(lambda: outgoing.put(None)):
            outgoing.put(None)
        self._turns = count()
        self._messages = count()
        self._turn: Collector | None = None
        """The last one."""

    def __del__(self) -> None:
        if hasattr(self, "_call"):
            self.close()

    def __enter__(self) -> Session:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Ends the session; a turn that still runs is cancelled. Idempotent."""
        self._call.cancel()

    def send(self, prompt: str | None = None, **options: Unpack[Arguments]) -> Completion:
        """The next turn, as a whole."""
        with self.stream(prompt, **options) as stream:
            return stream.completion()

    def stream(self, prompt: str | None = None, **options: Unpack[Arguments]) -> Stream:
        """The next turn, piece by piece. A turn that is closed before its end leaves no trace."""
        if self._turn is not None:
            self._turn.check_over()
        id = f"turn-{next(self._turns)}"
        number = self._put(make_start(id, prompt, options, session="session"))
        self._turn = collector = Collector(id, options, number)
        return Stream(self._call, collector, lambda: self._put(make_cancel(id)))

    def _put(self, message: inference_pb2.GenerateRequest) -> int:
        self._outgoing.put(message)
        return next(self._messages)
