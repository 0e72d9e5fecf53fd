"""The OpenAI API's requests, as far as they are served here, and their conversion to baton.v1.Inference.

Strict: an unknown field, a wrong JSON type or an unsupported value is an error that names the field; nothing
is ignored in silence. Fields beyond OpenAI's (top_k, min_p, ...) are named as in baton.v1.SamplingParams.
Ranges are checked by rpc.validate, so that gRPC and HTTP refuse the same values.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable
from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from baton.gateway.openai_errors import ApiError, from_validation, invalid_value, unsupported
from baton.rpc.validate import check_sampling
from baton.v1 import common_pb2, inference_pb2, tokenizer_pb2

MAX_VALUES = 3 * 2**17
"""JSON values in a body, such as token ids. Parsing and checking so many takes less than 100 ms."""
MAX_KEYS = 2048
"""In one object; logit_bias may have 1,024."""
MAX_FIELDS = 2**16
"""Objects, arrays and the keys of objects in a body. They take more time and memory than other values."""
MAX_ESCAPES = 2**21
"""Backslashes in a body. The parser holds the interpreter while it copies a string escape by escape."""
DEFAULT_COMPLETION_TOKENS = 16
"""Of /v1/completions, as OpenAI documents it. Chat answers may use what the context still holds."""
MAX_PROMPTS = 256
"""In one request."""
_SCAN_BYTES = 2**16
_Body = TypeVar("_Body", bound=BaseModel)
_Start = TypeVar("_Start")

Int32 = Annotated[int, Field(ge=-(2**31), lt=2**31)]
Int64 = Annotated[int, Field(ge=-(2**63), lt=2**63)]
TokenId = Annotated[int, Field(ge=0, lt=2**32)]
T = TypeVar("T")
Elements = Annotated[list[T], Field(fail_fast=True)]
"""A list whose validation stops at the first wrong element."""
Seed = Annotated[int, Field(ge=-(2**63), lt=2**64)]
"""Negative seeds, which OpenAI allows, count modulo 2**64."""


class Strict(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid", protected_namespaces=())


class StreamOptions(Strict):
    include_usage: bool | None = None
    include_obfuscation: Literal[False] | None = None


class ResponseFormat(Strict):
    type: Literal["text"]


class CommonRequest(Strict):
    """What both endpoints take."""

    model: str
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    n: Int32 | None = None
    stop: str | Elements[str] | None = None
    seed: Seed | None = None
    max_tokens: Int64 | None = None
    temperature: float | None = None
    top_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    # Beyond OpenAI's.
    top_k: Int32 | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    min_tokens: Int64 | None = None
    ignore_eos: bool | None = None
    stop_token_ids: Elements[TokenId] | None = None
    priority: Int32 | None = None
    resume: bool | None = None
    # Accepted, and without effect here.
    user: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None


class CompletionRequest(CommonRequest):
    """POST /v1/completions."""

    prompt: str | Elements[str] | Elements[TokenId] | Elements[Elements[TokenId]]
    echo: bool | None = None
    logprobs: Int32 | None = None
    best_of: Int32 | None = None
    suffix: None = None


class TextPart(Strict):
    type: Literal["text"]
    text: str


class Message(Strict):
    role: str
    content: str | Elements[TextPart]
    # What the API itself returns with an assistant's message, so that it can be sent back as it came.
    refusal: None = None
    annotations: Annotated[list[Any], Field(max_length=0)] | None = None
    audio: None = None
    function_call: None = None
    tool_calls: Annotated[list[Any], Field(max_length=0)] | None = None

    @property
    def text(self) -> str:
        return self.content if isinstance(self.content, str) else "".join(part.text for part in self.content)


class ChatRequest(CommonRequest):
    """POST /v1/chat/completions."""

    messages: Elements[Message]
    max_completion_tokens: Int64 | None = None
    logprobs: bool | None = None
    top_logprobs: Int32 | None = None
    response_format: ResponseFormat | None = None
    tools: Annotated[list[Any], Field(max_length=0)] | None = None
    tool_choice: Literal["none", "auto"] | None = None
    modalities: Elements[Literal["text"]] | None = None
    # Accepted, and without effect here.
    metadata: dict[str, str] | None = None
    store: Literal[False] | None = None
    service_tier: Literal["auto", "default"] | None = None


def parse_body(
    body: bytearray, kind: type[_Body], convert: Callable[[_Body], _Start]
) -> tuple[_Body, _Start]:
    """The checked request of an HTTP body, and its conversion to baton.v1.

    How much there is in it is counted before anything is made of it: JSON of a few bytes a value takes up to
    thirty times its size as Python objects. Raises ApiError (400), naming the field, and what
    `convert` raises.
    """
    try:
        text = body.decode()
    except UnicodeDecodeError as error:
        text = f"the body is not valid UTF-8 at byte {error.start}"
        raise ApiError(400, text, None, "invalid_utf8") from None
    _check_amount(body)
    try:
        request = kind.model_validate(json.loads(text, object_pairs_hook=_object))
        return request, convert(request)
    except RecursionError:
        raise _invalid_json("it is nested too deeply") from None
    except ValidationError as error:  # a ValueError as well
        raise from_validation(error) from None
    except UnicodeEncodeError:
        raise _invalid_json("a string has a lone surrogate") from None
    except ValueError as error:
        raise _invalid_json(str(error)) from None


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    if len(pairs) > MAX_KEYS:
        raise _too_complex(f"an object has {len(pairs)} keys; {MAX_KEYS} are allowed")
    found = dict(pairs)
    if len(found) < len(pairs):
        twice = Counter(key for key, _ in pairs).most_common(1)[0][0][:80]
        raise ApiError(400, f"{twice!r} is given twice in one object", twice, "duplicate_parameter")
    "".join(found).encode()  # Raises UnicodeEncodeError for a lone surrogate, as `convert` does for values.
    return found


def _check_amount(body: bytearray) -> None:
    """Counts what is outside of strings; may take seconds, but never holds the interpreter for long."""
    if body.count(b"\\") > MAX_ESCAPES:
        raise _too_complex(f"the body has more than {MAX_ESCAPES} backslashes")
    values = fields = start = 0
    while start < len(body):
        quote = body.find(b'"', start)
        end = quote if quote >= 0 else len(body)
        for begin in range(start, end, _SCAN_BYTES):
            part = body[begin : min(end, begin + _SCAN_BYTES)]
            values += part.count(b",")
            fields += part.count(b"[") + part.count(b"{") + part.count(b":")
            if values > MAX_VALUES or fields > MAX_FIELDS:
                limits = f"{MAX_VALUES} values, or more than {MAX_FIELDS} objects, arrays and keys"
                raise _too_complex(f"the body has more than {limits}")
        start = _string_end(body, quote) if quote >= 0 else end


def _string_end(body: bytearray, quote: int) -> int:
    """The index behind the string that begins at `quote`."""
    closing = quote
    while True:
        opened, closing = closing + 1, body.find(b'"', closing + 1)
        if closing < 0:
            return len(body)
        last = closing - 1
        while last >= opened and body[last] == ord("\\"):
            last -= 1
        if (closing - last) % 2 == 1:  # an even number of backslashes before the quote
            return closing + 1


def _too_complex(message: str) -> ApiError:
    return ApiError(400, message, None, "body_too_complex")


def _invalid_json(why: str) -> ApiError:
    return ApiError(400, f"the body is not valid JSON: {why}", None, "invalid_json")


_SAME_NAME = (
    "temperature",
    "top_p",
    "presence_penalty",
    "frequency_penalty",
    "top_k",
    "min_p",
    "repetition_penalty",
    "min_tokens",
    "ignore_eos",
)


def completion_starts(request: CompletionRequest) -> list[inference_pb2.GenerateStart]:
    """One start for each prompt, in order. Raises ApiError for what is not supported, BatonError for
    sampling parameters that are wrong."""
    if request.best_of is not None and request.best_of != (request.n or 1):
        raise unsupported("best_of", "best_of is not supported, unless it equals n")
    if request.echo and request.logprobs is not None:
        raise unsupported("echo", "echo together with logprobs is not supported")
    sampling = _sampling(request)
    tokens = request.max_tokens
    sampling.max_tokens = DEFAULT_COMPLETION_TOKENS if tokens is None else tokens
    if request.logprobs is not None:
        sampling.logprobs = request.logprobs
    check_sampling(sampling, None)  # before it is copied for each prompt
    starts = []
    for prompt in _prompts(request):
        start = _start(request, sampling)
        starts.append(start)
        if isinstance(prompt, str):
            start.text = prompt
        else:
            start.tokens.CopyFrom(inference_pb2.TokenPrompt(token_ids=prompt))
    return starts


def chat_start(request: ChatRequest) -> inference_pb2.GenerateStart:
    """Raises ApiError for what is not supported."""
    sampling = _sampling(request)
    if request.max_tokens is not None and request.max_completion_tokens is not None:
        raise invalid_value("max_tokens", "give max_completion_tokens or max_tokens, not both")
    tokens = request.max_tokens if request.max_completion_tokens is None else request.max_completion_tokens
    if tokens is not None:
        sampling.max_tokens = tokens
    if request.top_logprobs is not None and not request.logprobs:
        raise invalid_value("top_logprobs", "top_logprobs needs logprobs to be true")
    if request.logprobs:
        sampling.logprobs = request.top_logprobs or 0
    start = _start(request, sampling)
    start.chat.SetInParent()
    for message in request.messages:
        start.chat.messages.append(tokenizer_pb2.ChatMessage(role=message.role, content=message.text))
    return start


def _prompts(request: CompletionRequest) -> list[str | list[int]]:
    prompt = request.prompt
    if isinstance(prompt, str):
        return [prompt]
    if prompt and isinstance(prompt[0], int):
        return [[token for token in prompt if isinstance(token, int)]]
    if not 1 <= len(prompt) <= MAX_PROMPTS:
        raise invalid_value("prompt", f"give 1 to {MAX_PROMPTS} prompts, not {len(prompt)}")
    return [each for each in prompt if not isinstance(each, int)]


def _start(request: CommonRequest, sampling: common_pb2.SamplingParams) -> inference_pb2.GenerateStart:
    if request.stream_options is not None and not request.stream:
        raise invalid_value("stream_options", "stream_options needs stream to be true")
    if not request.model:
        raise invalid_value("model", "model is empty: name one of /v1/models")
    start = inference_pb2.GenerateStart(
        id="http", model=request.model, sampling=sampling, include_token_ids=False
    )
    if request.n is not None:
        if request.n < 1:
            raise invalid_value("n", f"n must be at least 1, not {request.n}")
        start.n = request.n
    if request.priority is not None:
        start.priority = request.priority
    if request.resume is not None:
        start.resume = request.resume
    return start


def _sampling(request: CommonRequest) -> common_pb2.SamplingParams:
    sampling = common_pb2.SamplingParams()
    for name in _SAME_NAME:
        value = getattr(request, name)
        if value is not None:
            setattr(sampling, name, value)
    if request.seed is not None:
        sampling.seed = request.seed % 2**64
    stop = request.stop
    sampling.stop.extend([stop] if isinstance(stop, str) else stop or [])
    sampling.stop_token_ids.extend(request.stop_token_ids or [])
    for key, bias in (request.logit_bias or {}).items():
        # The length first: int() refuses very long numbers.
        if not (key.isascii() and key.isdigit() and len(key) <= 10 and int(key) < 2**32):
            raise invalid_value("logit_bias", f"logit_bias: {key[:40]!r} is no token id")
        sampling.logit_bias[int(key)] = bias
    return sampling
