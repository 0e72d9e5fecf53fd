"""The exception of all errors that callers see, and its form on the wire.

On the wire an error is a google.rpc.Status: ErrorInfo (domain "baton.v1", the machine-readable reason),
BadRequest where one field is wrong, RetryInfo where trying again makes sense. It travels in messages where
many requests share a stream, and in a call's trailing metadata (grpcio-status) where the call itself fails.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn

import grpc
import grpc.aio
from google.rpc import code_pb2, error_details_pb2, status_pb2
from grpc_status import rpc_status

DOMAIN = "baton.v1"
MAX_TEXT_BYTES = 1024
"""Longer messages and field names are cut: trailing metadata holds 8 KiB in all."""

_CODES = {code.value[0]: code for code in grpc.StatusCode}


class BatonError(Exception):
    """An error that a caller sees.

    code: the gRPC code. reason: upper-case word, stable, for programs. text: one line for people, saying
    what to do. field: path of the field that is wrong, such as "inputs[0].text". named: `text` follows the
    field's name in the message; who names the field otherwise changes `field` alone. retry_after_ms: when
    trying again makes sense.
    """

    def __init__(
        self,
        code: grpc.StatusCode,
        reason: str,
        text: str,
        *,
        field: str | None = None,
        named: bool = False,
        retry_after_ms: int | None = None,
    ) -> None:
        super().__init__(text)
        self.code = code
        self.reason = reason
        self.text = text
        self.field = field
        self.named = named
        self.retry_after_ms = retry_after_ms
        self.metadata: dict[str, str] = {}
        """Figures of the error, for programs: ErrorInfo.metadata."""
        self.recorded = False
        """A request that failed with it has been logged and counted already."""

    @property
    def message(self) -> str:
        return named_text(self.field, self.text) if self.named and self.field else self.text

    def __str__(self) -> str:
        return self.message

    def __repr__(self) -> str:
        return f"BatonError({self.code.name}, {self.reason}, {self.message!r}, field={self.field!r})"


OnRefused = Callable[[BatonError, grpc.aio.ServicerContext], None]
"""Called for a call that ends with an error, before that is sent, unless the error is `recorded`."""


def named_text(field: str, text: str) -> str:
    """A message that begins with the field's name."""
    return f"{field}{text}" if text[:1] in (":", ",") else f"{field} {text}"


def invalid_field(field: str, text: str, reason: str = "INVALID_FIELD") -> BatonError:
    """The value of `field` cannot be used. text: follows its name, such as "must be at least 1" or
    ": at most 4 entries"."""
    return BatonError(grpc.StatusCode.INVALID_ARGUMENT, reason, text, field=field, named=True)


def invalid(field: str, message: str, reason: str = "INVALID_FIELD") -> BatonError:
    """The value of `field` cannot be used, which `message` says without its name."""
    return BatonError(grpc.StatusCode.INVALID_ARGUMENT, reason, message, field=field)


def not_found(message: str, reason: str = "NOT_FOUND") -> BatonError:
    return BatonError(grpc.StatusCode.NOT_FOUND, reason, message)


def unavailable(message: str, reason: str = "UNAVAILABLE", retry_after_ms: int | None = None) -> BatonError:
    return BatonError(grpc.StatusCode.UNAVAILABLE, reason, message, retry_after_ms=retry_after_ms)


def exhausted(
    message: str, reason: str = "RESOURCE_EXHAUSTED", retry_after_ms: int | None = None
) -> BatonError:
    return BatonError(grpc.StatusCode.RESOURCE_EXHAUSTED, reason, message, retry_after_ms=retry_after_ms)


def deadline_exceeded(message: str, reason: str = "DEADLINE_EXCEEDED") -> BatonError:
    return BatonError(grpc.StatusCode.DEADLINE_EXCEEDED, reason, message)


def cancelled(message: str, reason: str = "CANCELLED") -> BatonError:
    return BatonError(grpc.StatusCode.CANCELLED, reason, message)


def unauthenticated(message: str, reason: str = "UNAUTHENTICATED") -> BatonError:
    return BatonError(grpc.StatusCode.UNAUTHENTICATED, reason, message)


def failed_precondition(message: str, reason: str = "FAILED_PRECONDITION") -> BatonError:
    return BatonError(grpc.StatusCode.FAILED_PRECONDITION, reason, message)


def internal(message: str, reason: str = "INTERNAL") -> BatonError:
    return BatonError(grpc.StatusCode.INTERNAL, reason, message)


def to_status(error: BatonError) -> status_pb2.Status:
    """The error as a google.rpc.Status."""
    message = cut(error.message)
    status = status_pb2.Status(code=error.code.value[0], message=message)
    info = error_details_pb2.ErrorInfo(reason=error.reason, domain=DOMAIN, metadata=error.metadata)
    status.details.add().Pack(info)
    if error.field is not None:
        violation = error_details_pb2.BadRequest.FieldViolation(
            field=cut(error.field), description=cut(error.text), reason=error.reason
        )
        status.details.add().Pack(error_details_pb2.BadRequest(field_violations=[violation]))
    if error.retry_after_ms is not None:
        retry = error_details_pb2.RetryInfo()
        retry.retry_delay.FromMilliseconds(error.retry_after_ms)
        status.details.add().Pack(retry)
    return status


def from_status(status: status_pb2.Status) -> BatonError:
    """The error of a Status. Without ErrorInfo its reason is the code's name."""
    code = _CODES.get(status.code, grpc.StatusCode.UNKNOWN)
    error = BatonError(code, code.name, status.message or code.name.lower().replace("_", " "))
    info = error_details_pb2.ErrorInfo()
    bad = error_details_pb2.BadRequest()
    retry = error_details_pb2.RetryInfo()
    for detail in status.details:
        if detail.Is(info.DESCRIPTOR) and detail.Unpack(info):
            error.reason, error.metadata = info.reason or error.reason, dict(info.metadata)
        elif detail.Is(bad.DESCRIPTOR) and detail.Unpack(bad) and bad.field_violations:
            wrong = bad.field_violations[0]
            error.field = wrong.field
            if status.message == cut(named_text(wrong.field, wrong.description)):
                error.text, error.named = wrong.description, True
        elif detail.Is(retry.DESCRIPTOR) and detail.Unpack(retry):
            error.retry_after_ms = retry.retry_delay.ToMilliseconds()
    return error


def from_rpc_error(error: grpc.RpcError) -> BatonError:
    """The error of a failed call of either kind of stub, from its trailing Status if there is one."""
    try:
        status = rpc_status.from_call(error)
    except ValueError:  # the Status contradicts the call's own code
        status = None
    if status is None:
        code: grpc.StatusCode = error.code()
        status = status_pb2.Status(code=code.value[0], message=error.details() or "")
    return from_status(status)


def without_frames(error: BatonError) -> BatonError:
    """Removes the tracebacks of the error and its causes. Their frames may refer to the error and its
    request, which would stay until a garbage collection."""
    each: BaseException | None = error
    while each is not None:
        each.__traceback__ = None
        each = each.__context__
    return error


async def abort(context: grpc.aio.ServicerContext, error: BatonError) -> NoReturn:
    """Ends the call with the error, its Status in the trailing metadata."""
    status = rpc_status.to_status(to_status(error))
    await context.abort(status.code, status.details, status.trailing_metadata)
    raise AssertionError("context.abort returned")


def refusing(error: BatonError, on_refused: OnRefused | None) -> Any:
    """A handler for any call, which ends with the error before a message is read."""

    async def end(_requests: Any, context: grpc.aio.ServicerContext) -> None:
        if on_refused is not None:
            on_refused(error, context)
        await abort(context, error)

    return grpc.stream_stream_rpc_method_handler(end)


def cut(text: str) -> str:
    """At most MAX_TEXT_BYTES of it, at little cost whatever its length."""
    raw = text[: MAX_TEXT_BYTES + 1].encode("utf-8", "replace")
    if len(raw) <= MAX_TEXT_BYTES:
        return raw.decode()
    return raw[: MAX_TEXT_BYTES - 3].decode("utf-8", "ignore") + "..."


assert set(_CODES) <= set(code_pb2.Code.values())
