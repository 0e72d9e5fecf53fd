"""Server interceptors: they refuse calls while the process loads, and turn malformed messages into errors.

gRPC parses before the servicer is called, on the event loop. If that fails, it ends the call with UNKNOWN
and logs a traceback. Here a thread scans and parses large messages, and a failure becomes a BatonError that
names the field. A stream's iterator raises it and can be read further; another call is answered with it.
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any

import grpc
import grpc.aio
from google.protobuf.descriptor import Descriptor, FieldDescriptor
from google.protobuf.empty_pb2 import Empty
from google.protobuf.message import DecodeError, Message
from google.protobuf.unknown_fields import UnknownFieldSet

from baton.rpc.errors import (
    BatonError,
    OnRefused,
    abort,
    internal,
    invalid,
    invalid_field,
    refusing,
    unavailable,
    without_frames,
)
from baton.rpc.logs import get_logger
from baton.rpc.message_scan import MessageScan

INLINE_BYTES = 2**14
"""A larger message is scanned and parsed by a thread: handing over a small one would take longer. If it is
malformed, the field is not named: the search takes a microsecond and a hundred bytes for each field."""
MAX_DEPTH = 16
_LENGTH_DELIMITED = 2
_PYTHONS_OWN = (Exception, asyncio.CancelledError, GeneratorExit, KeyboardInterrupt, SystemExit)
_log = get_logger()
_STREAMS = {False: "unary", True: "stream"}


class ReadinessInterceptor(grpc.aio.ServerInterceptor):  # type: ignore[misc]
    """Closed until open(): calls to guarded services end with UNAVAILABLE (NOT_READY)."""

    def __init__(self, on_refused: OnRefused | None = None) -> None:
        self._on_refused = on_refused
        self._guarded: frozenset[str] = frozenset()
        self._open = False

    def guard(self, services: Iterable[str]) -> None:
        self._guarded = frozenset(services)

    def open(self) -> None:
        self._open = True

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Any]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Any:
        service = handler_call_details.method.rpartition("/")[0].removeprefix("/")
        if self._open or service not in self._guarded:
            return await continuation(handler_call_details)
        error = unavailable("still loading; try again in a second", "NOT_READY", 1000)
        return refusing(error, self._on_refused)


class MalformedMessages(grpc.aio.ServerInterceptor):  # type: ignore[misc]
    """Applies to every service of a server. Must be the last interceptor. A BatonError that a servicer
    raises ends the call."""

    def __init__(self, on_refused: OnRefused | None = None) -> None:
        self._on_refused = on_refused
        self._parsers: dict[Any, _Parser] = {}
        self._thread = ThreadPoolExecutor(1, "grpc-messages")
        """One: each computing thread delays the event loop by milliseconds."""

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Any]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Any:
        handler = await continuation(handler_call_details)
        if handler is None:
            return refusing(_unknown_method(handler_call_details.method), self._on_refused)
        if handler.request_deserializer is None:
            return handler
        kind = f"{_STREAMS[handler.request_streaming]}_{_STREAMS[handler.response_streaming]}"
        behaviour = getattr(handler, kind)
        if not (inspect.isasyncgenfunction(behaviour) or inspect.iscoroutinefunction(behaviour)):
            return handler  # runs in a thread: gRPC's own reflection
        parse = handler.request_deserializer
        parser = self._parsers.get(parse)
        if parser is None:
            parser = self._parsers[parse] = _Parser(parse, self._thread)
        checked = _checked(behaviour, handler.request_streaming, self._on_refused)
        return handler._replace(request_deserializer=parser.deserialize, **{kind: checked})


class _Parser:
    """Parses the requests of one type. `parse`: a message class's FromString."""

    def __init__(self, parse: Callable[[bytes], Message], thread: ThreadPoolExecutor) -> None:
        self._parse = parse
        self._thread = thread
        self._descriptor: Descriptor | None = getattr(getattr(parse, "__self__", None), "DESCRIPTOR", None)
        self._scan = MessageScan(self._descriptor)

    def deserialize(self, data: bytes) -> Message | BatonError | _Unparsed:
        """Returns an error instead of raising it: an exception in the deserializer cannot be caught."""
        if len(data) > INLINE_BYTES:
            return _Unparsed(data, self)
        try:
            return self._parse(data)
        except DecodeError:
            return error_of(data, self._descriptor)

    async def in_thread(self, data: bytes) -> Message:
        """Raises BatonError."""
        return await asyncio.get_running_loop().run_in_executor(self._thread, self._large, data)

    def _large(self, data: bytes) -> Message:
        self._scan.check(data)
        try:
            return self._parse(data)
        except DecodeError:
            raise error_of(data, self._descriptor) from None


@dataclass(frozen=True, slots=True)
class _Unparsed:
    """A message that a thread is to parse."""

    data: bytes
    parser: _Parser


def _unknown_method(method: str) -> BatonError:
    text = f"{method[:200]} is not served here"
    return BatonError(grpc.StatusCode.UNIMPLEMENTED, "UNKNOWN_METHOD", text)


def _checked(behaviour: Any, streaming: bool, on_refused: OnRefused | None) -> Any:
    """Wraps `behaviour` in a function of the same kind, from which gRPC decides how to call it. streaming:
    a stream of requests."""

    async def request_of(request: Any, context: grpc.aio.ServicerContext) -> Any:
        return _Requests(context) if streaming else await _message(request)

    async def refuse(error: BatonError, context: grpc.aio.ServicerContext) -> None:
        if on_refused is not None and not error.recorded:
            on_refused(error, context)
        # The status may wait for as long as its client takes nothing: no request waits with it.
        await abort(context, without_frames(error))

    async def fail(error: BaseException, context: grpc.aio.ServicerContext) -> None:
        """Ends the call where a library of Rust has panicked: gRPC would never answer it."""
        if isinstance(
            error, (Exception, asyncio.CancelledError, GeneratorExit, KeyboardInterrupt, SystemExit)
        ):
            raise error
        _log.error("panic", error=f"{type(error).__name__}: {error}"[:1000])
        await refuse(internal(f"{type(error).__name__} while answering the call"), context)

    async def generate(request: Any, context: grpc.aio.ServicerContext) -> AsyncIterator[Any]:
        try:
            async with aclosing(behaviour(await request_of(request, context), context)) as responses:
                async for response in responses:
                    yield response
        except BatonError as error:
            await refuse(error, context)
        except _PYTHONS_OWN:
            raise
        except BaseException as error:
            await fail(error, context)

    async def run(request: Any, context: grpc.aio.ServicerContext) -> Any:
        try:
            return await behaviour(await request_of(request, context), context)
        except BatonError as error:
            await refuse(error, context)
        except _PYTHONS_OWN:
            raise
        except BaseException as error:
            await fail(error, context)

    return generate if inspect.isasyncgenfunction(behaviour) else run


async def _message(request: Message | BatonError | _Unparsed) -> Message:
    if isinstance(request, _Unparsed):
        return await request.parser.in_thread(request.data)
    if isinstance(request, BatonError):
        raise request
    return request


class _Requests:
    """A stream of requests. What cannot be parsed is raised in its turn; the next can be read after it.

    Reads from the call itself: gRPC's own iterator is an asynchronous generator, and a servicer that ends
    early would leave it, with all that the call held, to a finalizer of the garbage collector.
    """

    def __init__(self, context: grpc.aio.ServicerContext) -> None:
        self._context = context

    def __aiter__(self) -> _Requests:
        return self

    async def __anext__(self) -> Any:
        request = await self._context.read()
        if request is grpc.aio.EOF:
            raise StopAsyncIteration
        return await _message(request)


def error_of(data: bytes, descriptor: Descriptor | None) -> BatonError:
    """The error of bytes that are no message of this type."""
    name = descriptor.full_name if descriptor is not None else "message"
    field = _not_utf8(data, descriptor) if len(data) <= INLINE_BYTES else ""
    if field:
        return invalid_field(field, "is not valid UTF-8", "INVALID_UTF8")
    return invalid(
        "message",
        f"the message cannot be parsed as {name}, or a string in it is not UTF-8",
        "MALFORMED_MESSAGE",
    )


def _not_utf8(data: bytes, descriptor: Descriptor | None, depth: int = 0) -> str:
    """Path of the first string that is not UTF-8; empty: there is none, or the bytes are malformed
    otherwise."""
    if descriptor is None:
        return ""
    try:
        fields = UnknownFieldSet(Empty.FromString(data))
    except DecodeError:
        return ""
    counts: dict[int, int] = {}
    for each in map(fields.__getitem__, range(len(fields))):
        field = descriptor.fields_by_number.get(each.field_number)
        if field is None or each.wire_type != _LENGTH_DELIMITED:
            continue
        index = counts[field.number] = counts.get(field.number, -1) + 1
        name = f"{field.name}[{index}]" if field.is_repeated else field.name
        if field.type == FieldDescriptor.TYPE_STRING:
            try:
                each.data.decode()
            except UnicodeDecodeError:
                return name
        elif field.type == FieldDescriptor.TYPE_MESSAGE and depth < MAX_DEPTH:
            inner = _not_utf8(each.data, field.message_type, depth + 1)
            if inner:
                return f"{name}.{inner}"
    return ""
