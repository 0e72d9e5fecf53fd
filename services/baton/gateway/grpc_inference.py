"""baton.v1.Inference: a client's stream of requests, and calls of one request each."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from contextlib import aclosing, asynccontextmanager
from typing import Any

import grpc

from baton.authentication.api_keys import ApiKey
from baton.authentication.gateway import GatewayAuthentication
from baton.authentication.interceptor import as_mapping
from baton.gateway import admission
from baton.gateway.backpressure import WriteMessage, limited
from baton.gateway.delta_pieces import pieces
from baton.gateway.embeddings import embed
from baton.gateway.gateway import Gateway
from baton.gateway.grpc_single_request import SingleRequest
from baton.gateway.prompts import GatewaySession
from baton.gateway.request import GatewayRequest
from baton.rpc.address import peer_host
from baton.rpc.errors import BatonError, deadline_exceeded, exhausted, invalid, not_found, to_status
from baton.rpc.logs import get_logger
from baton.rpc.message_size import check_embeddings
from baton.v1 import inference_pb2, inference_pb2_grpc

MAX_UNREAD = 1024
"""Most requests and refusals that a client has not read to their end; above it no more of its messages are
read."""
WRITE_SECONDS = 2.0
"""A message that has not left this long after the client's requests failed as slow ends the stream."""
MAX_SESSIONS = 256
"""Per stream."""

_log = get_logger()


class InferenceServicer(inference_pb2_grpc.InferenceServicer):
    def __init__(self, gateway: Gateway, authentication: GatewayAuthentication) -> None:
        self._gateway = gateway
        self._authentication = authentication

    async def Generate(self, requests: AsyncIterator[inference_pb2.GenerateRequest], context: Any) -> None:
        metadata = as_mapping(context.invocation_metadata())
        api_key = self._authentication.api_key(metadata.get("authorization", ""))
        api_key.open_stream()
        try:
            client = peer_host(context.peer())
            stream = _ClientStream(self._gateway, api_key, client, metadata.get("traceparent", ""))
            await self._generate(stream, requests, context)
        finally:
            api_key.close_stream()

    async def Complete(
        self, request: inference_pb2.CompleteRequest, context: Any
    ) -> inference_pb2.CompleteResponse:
        async with self._single(request.start, context) as single:
            return await single.answer()

    async def Stream(self, request: inference_pb2.StreamRequest, context: Any) -> None:
        seconds = self._gateway.config.slow_reader_seconds + WRITE_SECONDS
        async with self._single(request.start, context) as single:
            try:
                async with (
                    limited(context.write, seconds) as write,
                    aclosing(single.responses()) as responses,
                ):
                    async for response in responses:
                        await write(response)
            except TimeoutError:
                raise not_read() from None

    @asynccontextmanager
    async def _single(self, start: inference_pb2.GenerateStart, context: Any) -> AsyncIterator[SingleRequest]:
        """A request that has the call for itself. Ends with the block."""
        metadata = as_mapping(context.invocation_metadata())
        api_key = self._authentication.api_key(metadata.get("authorization", ""))
        api_key.open_stream()
        try:
            single = SingleRequest(self._gateway, start, api_key, metadata.get("traceparent", ""))
            try:
                yield single
            except BatonError as error:
                error.recorded = True  # with the request
                raise
            finally:
                single.leave()
        finally:
            api_key.close_stream()

    async def _generate(
        self, stream: _ClientStream, requests: AsyncIterator[inference_pb2.GenerateRequest], context: Any
    ) -> None:
        reading = asyncio.create_task(stream.read(requests))
        seconds = self._gateway.config.slow_reader_seconds + WRITE_SECONDS
        try:
            async with limited(context.write, seconds) as write:
                await stream.write_all(write)
            await reading
        except BatonError as error:
            error.recorded = True  # nothing was asked
            raise
        except TimeoutError:
            # Its requests have failed or ended; their output is dropped. Nothing of it waits for the status.
            ended = not_read()
            ended.recorded = True
            raise ended from None
        finally:
            reading.cancel()
            stream.leave()

    async def Embed(self, request: inference_pb2.EmbedRequest, context: Any) -> inference_pb2.EmbedResponse:
        metadata = as_mapping(context.invocation_metadata())
        api_key = self._authentication.api_key(metadata.get("authorization", ""))
        if (model := self._gateway.model_or_last()) is not None:
            values = request.dimensions or model.embedding_size
            check_embeddings(len(request.inputs), values, "inputs")
        return await embed(self._gateway, request, api_key)

    async def ListModels(
        self, request: inference_pb2.ListModelsRequest, context: Any
    ) -> inference_pb2.ListModelsResponse:
        return inference_pb2.ListModelsResponse(models=[self._gateway.model()])


def not_read() -> BatonError:
    return exhausted("the client does not read", "SLOW_READER")


class _ClientStream:
    """One call of Generate. The reader starts and cancels requests. The writer takes what has accumulated in
    their token logs since its last write, so that a slow client delays nobody and costs no memory.
    """

    def __init__(self, gateway: Gateway, api_key: ApiKey, client: str, traceparent: str = "") -> None:
        """client: its address, for the log."""
        self._gateway = gateway
        self._api_key = api_key
        self._client = client
        self._traceparent = traceparent
        self._open: dict[
            str, GatewayRequest
        ] = {}  # by the client's id, until the terminal event has been taken
        self._changed: dict[str, None] = {}  # ids whose logs may have something new, oldest first
        self._rejected: list[inference_pb2.GenerateResponse] = []
        self._sessions: dict[str, GatewaySession] = {}
        self._wake = asyncio.Event()
        self._room = asyncio.Event()
        self._half_closed = False

    async def read(self, requests: AsyncIterator[inference_pb2.GenerateRequest]) -> None:
        """Handles the client's messages until it closes its side or disconnects."""
        messages = aiter(requests)
        number = 0
        try:
            while True:
                try:
                    self._handle(await anext(messages))
                except StopAsyncIteration:
                    return
                except BatonError as error:
                    rejected = inference_pb2.Rejected(message=number, status=to_status(error))
                    self._rejected.append(inference_pb2.GenerateResponse(rejected=rejected))
                    key = self._api_key.name
                    told = error.message
                    self._gateway.refused("grpc", error.reason, error.field, self._client, key, message=told)
                    self._wake.set()
                number += 1
                while len(self._open) + len(self._rejected) >= MAX_UNREAD:
                    self._room.clear()
                    await self._room.wait()
        finally:
            self._half_closed = True
            self._wake.set()

    async def write_all(self, write: WriteMessage) -> None:
        """Writes all events, until the client has closed its side and all its requests have ended."""
        while True:
            self._wake.clear()
            while self._rejected:
                await write(self._rejected.pop(0))
            while self._changed:
                # Round-robin: a request that always has new output does not starve the others.
                id = next(iter(self._changed))
                del self._changed[id]
                request = self._open[id]
                events = request.take()
                if request.log.drained:
                    del self._open[id]  # free for reuse before the client can have read the terminal event
                elif events and request.log.more:
                    self._changed[id] = None
                for event in events:
                    try:
                        for piece in pieces(event):
                            await write(piece)
                    except BatonError as error:
                        await write(self._give_up(id, request, error))
                        break
            self._room.set()
            if self._half_closed and not self._open and not self._rejected:
                return
            if not self._wake.is_set():
                await self._sleep()

    def _give_up(self, id: str, request: GatewayRequest, error: BatonError) -> inference_pb2.GenerateResponse:
        """The terminal event of a request whose output cannot be written."""
        request.fail(error)
        self._open.pop(id, None)
        self._changed.pop(id, None)
        return inference_pb2.GenerateResponse(id=id, failed=to_status(error))

    async def _sleep(self) -> None:
        """Waits until there may be something to write. Raises BatonError after a long time without
        requests."""
        if self._open:
            await self._wake.wait()
            return
        seconds = self._gateway.config.idle_seconds
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._wake.wait()
                return
        if not self._open:
            raise deadline_exceeded(f"nothing was asked on this stream for {seconds:g} s", "IDLE")

    def leave(self) -> None:
        """The client has disconnected or has everything: cancels what has not ended."""
        for request in list(self._open.values()):
            request.cancel("the client has gone")

    def _handle(self, message: inference_pb2.GenerateRequest) -> None:
        kind = message.WhichOneof("kind")
        if kind == "start":
            self._start(message.start)
        elif kind == "resume":
            self._start(message.resume.start, message.resume)
        elif kind == "cancel":
            request = self._open.get(message.cancel.id)
            if request is None:
                raise not_found(f"no request {message.cancel.id[:128]!r} runs on this stream", "UNKNOWN_ID")
            request.cancel("cancelled by the client")
        else:
            raise invalid("kind", "an empty message: send start, resume or cancel", "EMPTY_MESSAGE")

    def _start(
        self, start: inference_pb2.GenerateStart, resume: inference_pb2.GenerateResume | None = None
    ) -> None:
        admission.check_id(start.id)
        if start.id in self._open:
            raise BatonError(
                grpc.StatusCode.ALREADY_EXISTS,
                "ID_IN_USE",
                f"a request {start.id!r} is running on this stream: choose another id",
                field="start.id",
            )
        id = start.id  # not `start`: a closure over it would keep the prompt alive
        request = GatewayRequest(
            self._gateway,
            start,
            lambda: self._mark(id, request),
            self._api_key,
            "grpc",
            self._traceparent,
            resume,
        )
        self._open[id] = request
        try:
            session = self._session(start.session) if start.session else None
        except BatonError as error:
            request.fail(error)
            return
        request.begin(session)

    def _session(self, name: str) -> GatewaySession:
        session = self._sessions.get(name)
        if session is None:
            if len(self._sessions) >= MAX_SESSIONS:
                raise exhausted(f"the stream holds {MAX_SESSIONS} sessions already", "TOO_MANY_SESSIONS")
            session = self._sessions[name] = GatewaySession()
        return session

    def _mark(self, id: str, request: GatewayRequest) -> None:
        if self._open.get(id) is request:
            self._changed[id] = None
            self._wake.set()
