"""Checks of requests before any work starts."""

from __future__ import annotations

import re
import secrets
from collections.abc import Sequence

import grpc

from baton.config import GatewayConfig
from baton.gateway.prompt_images import MANY_MESSAGES, check_images, image_parts
from baton.rpc.errors import BatonError, invalid, invalid_field
from baton.rpc.validate import (
    check_choices,
    check_enums,
    check_generates,
    check_sampling,
    check_token_ids,
    require_grammars,
)
from baton.v1 import common_pb2, inference_pb2, node_pb2, tokenizer_pb2

MAX_ID_CHARACTERS = 128
MAX_NAME_CHARACTERS = 256
MAX_PRIORITY = 100
MAX_INPUTS = 2048
"""Inputs of a request for embeddings."""
MAX_TOKEN_BYTES = 256
"""Longest token of any vocabulary. A text with more bytes than this for each token of the context is
refused without encoding, which would take seconds."""


def check_id(id: str) -> None:
    if not 1 <= len(id) <= MAX_ID_CHARACTERS:
        raise invalid("start.id", f"id must have 1 to {MAX_ID_CHARACTERS} characters, not {len(id)}")


def check_start(
    start: inference_pb2.GenerateStart, config: GatewayConfig, model: node_pb2.ModelInfo | None
) -> None:
    """Raises BatonError naming the field for everything that can be refused without encoding the prompt.

    model None: no decode node has been reached yet, so names and token ids are not checked.
    """
    check_model(start.model, model)
    if model is not None:
        check_generates(model)
    check_enums(start)
    _check_prompt(start, _max_prompt_bytes(config, model), model)
    check_sampling(start.sampling, model.vocab_size if model is not None else None)
    if model is not None:
        require_grammars(start.sampling, model.grammars)
    if start.HasField("n"):
        check_choices(start.n)
    _check_options(start, config)
    if len(start.session) > MAX_NAME_CHARACTERS:
        raise invalid_field("session", f"must have at most {MAX_NAME_CHARACTERS} characters")
    if start.session and start.chat.continue_final_message:
        text = ": not in a session, which keeps its messages as they are"
        raise invalid_field("chat.continue_final_message", text)
    if start.raw_output and _bounds_calls(start.chat):
        text = ": calls are not recognized in it, so none can be required, strict, or the only one"
        raise invalid_field("raw_output", text)


def _bounds_calls(chat: tokenizer_pb2.ChatPrompt) -> bool:
    if not chat.tools or chat.tool_choice.mode == tokenizer_pb2.ToolChoice.MODE_NONE:
        return False
    required = chat.tool_choice.mode == tokenizer_pb2.ToolChoice.MODE_REQUIRED
    single = chat.HasField("parallel_tool_calls") and not chat.parallel_tool_calls
    return required or single or any(tool.strict for tool in chat.tools)


def check_embed(
    request: inference_pb2.EmbedRequest, config: GatewayConfig, model: node_pb2.ModelInfo | None
) -> None:
    """Checks a request for embeddings before any work starts, for everything but `dimensions`, which the
    node knows that computes them."""
    check_model(request.model, model)
    check_enums(request)
    if not 1 <= len(request.inputs) <= MAX_INPUTS:
        raise invalid("inputs", f"1 to {MAX_INPUTS} inputs a request, not {len(request.inputs)}")
    max_bytes = _max_prompt_bytes(config, model)
    for index, each in enumerate(request.inputs):
        kind, field = each.WhichOneof("kind"), f"inputs[{index}]"
        if kind is None or not (each.text or each.tokens.token_ids):
            raise invalid_field(field, "is empty: give text or tokens")
        if kind == "text" and _utf8_bytes(each.text, max_bytes) > max_bytes:
            raise invalid_field(field, f"has more than the {max_bytes} bytes allowed here")
        if kind == "tokens":
            check_embedded(each.tokens.token_ids, model, field)
    _check_options(request, config)


def check_embedded(token_ids: Sequence[int], model: node_pb2.ModelInfo | None, field: str) -> None:
    """A prompt whose embedding is wanted. Raises BatonError."""
    if not token_ids:
        raise invalid_field(field, "has no tokens")
    if model is not None and len(token_ids) > model.context_length:
        text = f"has {len(token_ids)} tokens; the context holds {model.context_length}"
        raise invalid_field(field, text, "PROMPT_TOO_LONG")
    if model is not None:
        check_token_ids(token_ids, model.vocab_size, field)


def check_model(name: str, model: node_pb2.ModelInfo | None) -> None:
    if model is not None and name not in ("", model.name) and not _is_alias(name, model):
        raise BatonError(
            grpc.StatusCode.NOT_FOUND,
            "MODEL_NOT_FOUND",
            f"model {name[:MAX_NAME_CHARACTERS]!r} is not served here; {model.name!r} is",
            field="model",
        )


def _is_alias(name: str, model: node_pb2.ModelInfo) -> bool:
    if len(name) > MAX_NAME_CHARACTERS:
        return False
    patterns = (".*".join(map(re.escape, alias.split("*"))) for alias in model.aliases)
    return any(re.fullmatch(pattern, name, re.DOTALL) for pattern in patterns)


def _check_options(
    request: inference_pb2.GenerateStart | inference_pb2.EmbedRequest, config: GatewayConfig
) -> None:
    longest = int(config.request_seconds * 1000)
    if request.HasField("timeout_ms") and not 1 <= request.timeout_ms <= longest:
        raise invalid_field("timeout_ms", f"must be in [1, {longest}], not {request.timeout_ms}")
    if not -MAX_PRIORITY <= request.priority <= MAX_PRIORITY:
        raise invalid_field("priority", f"must be in [-100, 100], not {request.priority}")
    if len(request.namespace) > MAX_NAME_CHARACTERS:
        raise invalid_field("namespace", f"must have at most {MAX_NAME_CHARACTERS} characters")


def _max_prompt_bytes(config: GatewayConfig, model: node_pb2.ModelInfo | None) -> int:
    if model is None:
        return config.max_prompt_bytes
    return min(config.max_prompt_bytes, MAX_TOKEN_BYTES * model.context_length)


def _check_prompt(
    start: inference_pb2.GenerateStart, max_bytes: int, model: node_pb2.ModelInfo | None
) -> None:
    """Checks amounts first: looking at each of millions of elements would stop the event loop."""
    kind = start.WhichOneof("prompt")
    if kind is None:
        raise invalid("prompt", "a prompt is missing: give text, chat or tokens")
    if kind == "tokens":
        if not start.tokens.token_ids:
            raise invalid("tokens.token_ids", "the prompt is empty: give at least one token id")
        if model is not None:
            count = len(start.tokens.token_ids)
            output_tokens = _output_tokens(start.sampling, start.clamp_max_tokens)
            check_room(count, model.context_length, "tokens.token_ids", output_tokens)
            check_token_ids(start.tokens.token_ids, model.vocab_size, "tokens.token_ids")
        return
    if kind == "text":
        size = _utf8_bytes(start.text, max_bytes)
    else:
        if not start.chat.messages:
            raise invalid("chat.messages", "the conversation is empty: give at least one message")
        # Of many messages all bytes, if they are few enough: counting is left to the library, which copies
        # images.
        many = len(start.chat.messages) > MANY_MESSAGES
        size = start.chat.ByteSize() if many else max_bytes + 1
        if size > max_bytes:
            size = _chat_bytes(start.chat, max_bytes)
    field = "text" if kind == "text" else "chat.messages"
    if model is not None and size > MAX_TOKEN_BYTES * model.context_length:
        least = -(-size // MAX_TOKEN_BYTES)
        output_tokens = _output_tokens(start.sampling, start.clamp_max_tokens) or 1
        error = context_exceeded(least, output_tokens, model.context_length, field)
        error.text += f" The prompt has {size} bytes, and so at least these tokens."
        raise error
    if size > max_bytes:
        raise invalid(field, f"the prompt has at least {size} bytes, more than the {max_bytes} allowed here")
    if kind == "chat":
        check_images(image_parts(start.chat), model)


def _chat_bytes(chat: tokenizer_pb2.ChatPrompt, limit: int) -> int:
    """Bytes of what is rendered, or so many of them that they exceed `limit`."""
    size = chat.template_arguments.ByteSize()
    for message in chat.messages:
        if size > limit:
            return size
        size += len(message.role) + _utf8_bytes(message.content, limit)
        if parts := message.parts:
            size += sum(_utf8_bytes(part.text, limit) for part in parts)
        size += len(message.name) + _utf8_bytes(message.reasoning, limit)
        for call in message.tool_calls:
            size += len(call.name) + _utf8_bytes(call.arguments, limit)
    for tool in chat.tools:
        size += _utf8_bytes(tool.description, limit) + _utf8_bytes(tool.parameters, limit)
    return size


def _utf8_bytes(text: str, limit: int) -> int:
    """Bytes of `text` in UTF-8; its characters, without a copy, where they already exceed `limit`."""
    return len(text) if len(text) > limit else len(text.encode())


def _output_tokens(sampling: common_pb2.SamplingParams, clamp: bool) -> int:
    """max_tokens that cannot be reduced; 0: it can be, or is not given."""
    return 0 if clamp and sampling.max_tokens > 1 else sampling.max_tokens


def context_exceeded(prompt_tokens: int, max_tokens: int, context_length: int, field: str) -> BatonError:
    """In OpenAI's words, by which agents know that they have to shorten their conversation. field: that is to
    be changed."""
    error = invalid(
        field,
        f"This model's maximum context length is {context_length} tokens. However, you requested "
        f"{prompt_tokens + max_tokens} tokens ({prompt_tokens} in the messages, {max_tokens} in the "
        f"completion). Please reduce the length of the messages or completion.",
        "CONTEXT_LENGTH_EXCEEDED",
    )
    figures = {"prompt_tokens": prompt_tokens, "max_tokens": max_tokens, "context_length": context_length}
    error.metadata = {name: str(figure) for name, figure in figures.items()}
    return error


def check_room(prompt_tokens: int, context_length: int, prompt_field: str, max_tokens: int = 0) -> int:
    """Number of tokens of output that there is room for. Raises BatonError if there is none.

    max_tokens: that are asked for; 0: not given. A prompt may fill the context if it is 1: that token is
    sampled and never computed on.
    """
    room = context_length - prompt_tokens
    if room < 0 or (room == 0 and max_tokens != 1):
        raise context_exceeded(prompt_tokens, max_tokens or 1, context_length, prompt_field)
    return max(1, room)


def fit(
    sampling: common_pb2.SamplingParams,
    prompt_tokens: int,
    context_length: int,
    prompt_field: str,
    defaults: common_pb2.SamplingParams | None = None,
    *,
    clamp: bool = False,
) -> common_pb2.SamplingParams:
    """The parameters for the decode node: without stop strings, with a seed and max_tokens. `defaults` hold
    where `sampling` says nothing. clamp: a max_tokens beyond the room is reduced.

    Raises BatonError if the prompt, or the prompt and max_tokens together, exceed the context.
    """
    if prompt_tokens == 0:
        raise invalid(prompt_field, "the prompt has no tokens")
    output_tokens = _output_tokens(sampling, clamp)
    room = check_room(prompt_tokens, context_length, prompt_field, output_tokens)
    if sampling.max_tokens > room and not clamp:
        field = "sampling.max_tokens"
        raise context_exceeded(prompt_tokens, output_tokens, context_length, field)
    if sampling.min_tokens > room:
        raise invalid_field("sampling.min_tokens", f"is {sampling.min_tokens}; {room} fit at most")
    fitted = common_pb2.SamplingParams()
    if defaults is not None:
        fitted.CopyFrom(defaults)
    fitted.MergeFrom(sampling)
    fitted.ClearField("stop")
    fitted.max_tokens = min(fitted.max_tokens or room, room)
    if not fitted.HasField("seed"):
        fitted.seed = secrets.randbits(63)
    return fitted
