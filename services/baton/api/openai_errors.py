"""Errors in the OpenAI API's form: {"error": {"message", "type", "param", "code"}} with an HTTP status."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import grpc
from pydantic import ValidationError

from baton.api.field_names import OPENAI, FieldNames
from baton.rpc.errors import BatonError, cut, named_text

_STATUS = {
    grpc.StatusCode.INVALID_ARGUMENT: 400,
    grpc.StatusCode.OUT_OF_RANGE: 400,
    grpc.StatusCode.FAILED_PRECONDITION: 400,
    grpc.StatusCode.UNAUTHENTICATED: 401,
    grpc.StatusCode.PERMISSION_DENIED: 403,
    grpc.StatusCode.NOT_FOUND: 404,
    grpc.StatusCode.ALREADY_EXISTS: 409,
    grpc.StatusCode.DATA_LOSS: 410,
    grpc.StatusCode.RESOURCE_EXHAUSTED: 429,
    grpc.StatusCode.CANCELLED: 499,
    grpc.StatusCode.UNIMPLEMENTED: 501,
    grpc.StatusCode.UNAVAILABLE: 503,
    grpc.StatusCode.ABORTED: 503,
    grpc.StatusCode.DEADLINE_EXCEEDED: 504,
}
_CONTEXT_REASONS = ("CONTEXT_LENGTH_EXCEEDED", "PROMPT_TOO_LONG", "TOO_MANY_TOKENS")
"""The prompt, or the prompt and what is asked for, are too long: for the model, a node's pool or a key."""
CONTEXT_CODE = "context_length_exceeded"
"""OpenAI's code for these."""


class ApiError(Exception):
    """An error that exists only in HTTP, or of a field that only HTTP has."""

    def __init__(self, status: int, message: str, param: str | None = None, code: str | None = None) -> None:
        """message, param: cut to a length at which they quote a client's text for people."""
        super().__init__(cut(message))
        self.status = status
        self.message = cut(message)
        self.param = cut(param) if param is not None else None
        self.code = code
        self.retry_after_ms: int | None = None
        self.metadata: Mapping[str, str] = {}
        """See BatonError."""


def invalid_value(param: str, message: str) -> ApiError:
    return ApiError(400, message, param, "invalid_value")


def from_baton(error: BatonError, names: FieldNames = OPENAI, prompt: int | None = None) -> ApiError:
    """Converts a BatonError to an HTTP error. prompt: the number of the prompt that it is of, in a request of
    several."""
    param = names.name(error.field) if error.field is not None else None
    if prompt is not None and param is not None and (param == "prompt" or param.startswith("prompt[")):
        param = f"prompt[{prompt}]{param.removeprefix('prompt')}"
    message = named_text(param, error.text) if error.named and param else error.text
    code = CONTEXT_CODE if error.reason in _CONTEXT_REASONS else error.reason.lower()
    api = ApiError(_STATUS.get(error.code, 500), message, param, code)
    api.retry_after_ms, api.metadata = error.retry_after_ms, error.metadata
    return api


def from_validation(error: ValidationError, names: FieldNames = OPENAI) -> ApiError:
    """The first error of a body, by the path of the field. For a field of several possible forms, the
    error of the form that fits best."""
    errors = error.errors(include_url=False, include_input=False)
    forms = [each for each in errors if each["loc"][:1] == errors[0]["loc"][:1]]
    # The form that fits best: the deepest path, then the highest index.
    first = max(
        forms, key=lambda each: (len(each["loc"]), _indices(each["loc"]), "_type" not in each["type"])
    )
    path = [part for part in first["loc"] if not _names_a_type(part)]
    if first["type"] == "refused":
        path.append(first["ctx"]["field"])
    param = names.without_tags(_path(path))
    if first["type"] == "extra_forbidden":
        return ApiError(400, f"unknown parameter: {param}", param, "unknown_parameter")
    if first["type"] == "missing":
        return ApiError(400, f"missing parameter: {param}", param, "missing_parameter")
    if first["type"] == "refused":
        return ApiError(400, f"{param} {first['ctx']['why']}", param, "unsupported_parameter")
    return ApiError(400, f"{param or 'the body'} {_words(first)}", param or None, "invalid_type")


_WORDS = {
    "string_type": "must be a string",
    "int_type": "must be an integer",
    "int_from_float": "must be an integer",
    "int_parsing_size": "is too large",
    "float_type": "must be a number",
    "bool_type": "must be true or false",
    "list_type": "must be a list",
    "dict_type": "must be an object",
    "model_type": "must be an object",
    "literal_error": "must be {expected}",
    "union_tag_invalid": "is of a type that is not supported: give one of {expected_tags}",
    "greater_than_equal": "must be at least {ge}",
    "less_than": "must be less than {lt}",
    "less_than_equal": "must be at most {le}",
    "finite_number": "must be a finite number",
}
"""What is wrong with a field, by pydantic's name for it."""


def _words(error: Any) -> str:
    """In words that follow the field's name."""
    text = _WORDS.get(error["type"])
    return text.format(**error.get("ctx", {})) if text is not None else f"is wrong: {error['msg']}"


def body(error: ApiError) -> dict[str, Any]:
    kinds = {401: "authentication_error", 403: "permission_error", 429: "rate_limit_error"}
    kind = kinds.get(error.status, "invalid_request_error" if error.status < 499 else "server_error")
    return {"error": {"message": said(error), "type": kind, "param": error.param, "code": error.code}}


def said(error: ApiError) -> str:
    """The error's message. That of a full context ends with its code: LangChain looks for it there alone."""
    return f"{error.message} ({CONTEXT_CODE})" if error.code == CONTEXT_CODE else error.message


_BRANCHES = ("str", "int", "none", "nullable", "NamedTool", "AllowedTools")


def _names_a_type(part: str | int) -> bool:
    """Parts of a location that name the branch of a union (such as "list[str]") rather than a field."""
    return isinstance(part, str) and (part in _BRANCHES or "[" in part)


def _indices(parts: tuple[str | int, ...]) -> list[int]:
    return [part for part in parts if isinstance(part, int)]


def _path(parts: list[str | int]) -> str:
    path = ""
    for part in parts:
        path += f"[{part}]" if isinstance(part, int) else f".{part}" if path else part
    return path
