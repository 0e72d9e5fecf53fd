"""Checks of what callers send, before any work starts. Ranges are those of proto/baton/v1/common.proto."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from contextlib import suppress
from functools import cache

import numpy as np
from google.protobuf.descriptor import Descriptor, FieldDescriptor
from google.protobuf.message import Message

from baton.rpc.errors import failed_precondition, invalid_field
from baton.v1 import common_pb2, node_pb2

MAX_TEMPERATURE = 100.0
MAX_REPETITION_PENALTY = 10.0
MAX_PENALTY = 2.0
MAX_LOGIT_BIAS = 100.0
MAX_LOGIT_BIAS_ENTRIES = 1024
MAX_STOP_STRINGS = 16
MAX_STOP_CHARACTERS = 1024
MAX_STOP_TOKENS = 64
MAX_LOGPROBS = 20
MAX_CHOICES = 16
MAX_OUTPUT_TOKENS = 2**24
"""Larger than any model's context: a larger value is a mistake."""
MAX_TOP_K = 2**31 - 1
MAX_GRAMMAR_BYTES = 2**19
"""Most bytes of a grammar's text. That of the deepest chain of rules needs less stack than
grammar.compiler gives it."""
MAX_LARK_RULES = 8192
MAX_LARK_TERMINALS = 512
"""Nested terminals take time that grows with the third power of their number: 512 take half a second."""
MAX_GRAMMAR_CHOICES = 4096


def check_enums(message: Message, field: str = "") -> None:
    """Raises BatonError for the first enum's value that baton.v1 does not have. A parser keeps such values,
    and code would take them for the default. field: the message's own path; empty: it is a request."""
    for path in enum_paths(message.DESCRIPTOR):
        _check_enum(message, path, field)


def check_sampling(
    params: common_pb2.SamplingParams,
    vocab_size: int | None,
    field: str = "sampling",
    allow_stop: bool = True,
) -> None:
    """Raises BatonError (INVALID_ARGUMENT, naming the field) for the first value out of range.

    vocab_size None: token ids are not checked against it. allow_stop False: stop strings are refused, as by
    services that know no text.
    """

    def check(name: str, low: float, high: float, what: str) -> None:
        # `not low <= x <= high` rather than `x < low or x > high`: NaN compares false with everything.
        if params.HasField(name) and not low <= getattr(params, name) <= high:
            raise invalid_field(f"{field}.{name}", f"must be {what}, not {getattr(params, name):g}")

    check("temperature", 0.0, MAX_TEMPERATURE, f"in [0, {MAX_TEMPERATURE:g}]")
    check("top_k", 0, MAX_TOP_K, "at least 1 (0 or absent: all tokens)")
    check("top_p", _ABOVE_ZERO, 1.0, "in (0, 1]")
    check("min_p", 0.0, 1.0, "in [0, 1]")
    check("repetition_penalty", _ABOVE_ZERO, MAX_REPETITION_PENALTY, f"in (0, {MAX_REPETITION_PENALTY:g}]")
    check("presence_penalty", -MAX_PENALTY, MAX_PENALTY, f"in [-{MAX_PENALTY:g}, {MAX_PENALTY:g}]")
    check("frequency_penalty", -MAX_PENALTY, MAX_PENALTY, f"in [-{MAX_PENALTY:g}, {MAX_PENALTY:g}]")
    check("max_tokens", 1, MAX_OUTPUT_TOKENS, f"in [1, {MAX_OUTPUT_TOKENS}]")
    check("min_tokens", 0, MAX_OUTPUT_TOKENS, f"in [0, {MAX_OUTPUT_TOKENS}]")
    check("logprobs", 0, MAX_LOGPROBS, f"in [0, {MAX_LOGPROBS}]")
    check("prompt_logprobs", 0, MAX_LOGPROBS, f"in [0, {MAX_LOGPROBS}]")
    if params.HasField("max_tokens") and params.min_tokens > params.max_tokens:
        raise invalid_field(
            f"{field}.min_tokens",
            f"({params.min_tokens}) must not exceed max_tokens ({params.max_tokens})",
        )
    _check_logit_bias(params, vocab_size, f"{field}.logit_bias")
    _check_stop(params, f"{field}.stop", allow_stop)
    if len(params.stop_token_ids) > MAX_STOP_TOKENS:
        raise invalid_field(f"{field}.stop_token_ids", f": at most {MAX_STOP_TOKENS} entries")
    check_token_ids(params.stop_token_ids, vocab_size, f"{field}.stop_token_ids")
    if params.HasField("grammar"):
        _check_grammar(params.grammar, f"{field}.grammar")
        if params.ignore_eos:
            text = "cannot be true beside a grammar: its end is an end of sequence"
            raise invalid_field(f"{field}.ignore_eos", text)


def require_grammars(params: common_pb2.SamplingParams, supported: bool) -> None:
    """Raises BatonError for a grammar where output cannot be constrained."""
    if params.HasField("grammar") and not supported:
        raise invalid_field("sampling.grammar", ": output cannot be constrained here")


def check_generates(model: node_pb2.ModelInfo) -> None:
    """Raises BatonError for a checkpoint without a head."""
    if model.embeds_only:
        raise failed_precondition(
            f"{model.name!r} computes embeddings alone (its checkpoint has no head): ask /v1/embeddings or "
            "Inference.Embed",
            "EMBEDS_ONLY",
        )


def check_token_ids(ids: Sequence[int], vocab_size: int | None, field: str) -> None:
    """Raises BatonError for the first id that is not in [0, vocab_size)."""
    if vocab_size is None or not ids:
        return
    with suppress(OverflowError):
        # Of 30,000 ids in a message 0.7 ms; min and max take 2.1 ms, three times on a prompt's way.
        if np.frombuffer(array("I", ids[:]), np.uint32).max() < vocab_size:
            return
    for index, token in enumerate(ids):
        if not 0 <= token < vocab_size:
            raise invalid_field(
                f"{field}[{index}]",
                f"is {token}, outside the model's vocabulary of {vocab_size} tokens",
            )


def check_choices(n: int) -> None:
    """Raises BatonError unless 1 <= n <= 16."""
    if not 1 <= n <= MAX_CHOICES:
        raise invalid_field("n", f"must be in [1, {MAX_CHOICES}], not {n}")


_Path = tuple[FieldDescriptor, ...]


@cache
def enum_paths(descriptor: Descriptor, around: tuple[Descriptor, ...] = ()) -> tuple[_Path, ...]:
    """The fields that lead to each enum of a message. around: the messages that it is in."""
    if descriptor in around or descriptor.full_name.startswith("google."):
        return ()
    paths: list[_Path] = []
    for field in descriptor.fields:
        if field.enum_type is not None:
            paths.append((field,))
        elif field.message_type is not None:
            inner = enum_paths(field.message_type, (*around, descriptor))
            paths.extend((field, *path) for path in inner)
    return tuple(paths)


def _check_enum(message: Message, path: _Path, name: str) -> None:
    field, rest = path[0], path[1:]
    name = f"{name}.{field.name}" if name else field.name
    value = getattr(message, field.name)
    if field.is_repeated:
        entries = [(f"{name}[{index}]", each) for index, each in enumerate(value)]
    elif rest and not message.HasField(field.name):
        return
    else:
        entries = [(name, value)]
    for name, each in entries:
        if rest:
            _check_enum(each, rest, name)
        elif (kind := field.enum_type) is not None and each not in kind.values_by_number:
            raise invalid_field(name, f"is {each}: {kind.full_name} has no such value")


_ABOVE_ZERO = 2.0**-149  # the smallest positive float32


def _check_grammar(grammar: common_pb2.Grammar, field: str) -> None:
    """Amounts only: what is wrong within a grammar, its compiler finds."""
    kind = grammar.WhichOneof("kind")
    if kind is None:
        kinds = "json_schema, json_object, regex, lark or choice"
        raise invalid_field(field, f"is empty: give one of {kinds}")
    texts = [] if kind == "json_object" else [getattr(grammar, kind)]
    if kind == "choice":
        texts = list(grammar.choice.strings)
        if not 1 <= len(texts) <= MAX_GRAMMAR_CHOICES or not all(texts):
            most = f"1 to {MAX_GRAMMAR_CHOICES} strings, none of them empty"
            raise invalid_field(f"{field}.choice", f"has {len(texts)} strings; give {most}")
    size = sum(len(text.encode()) for text in texts)
    if size > MAX_GRAMMAR_BYTES or (kind != "json_object" and not size):
        text = f"has {size} bytes; give 1 to {MAX_GRAMMAR_BYTES}"
        raise invalid_field(f"{field}.{kind}", text)
    if kind == "lark":
        # A definition has its name and its colon on a line of its own; terminals are in capitals.
        heads = [line.partition(":") for line in grammar.lark.split("\n")]
        initials = [name.lstrip(" \t?!_")[:1] for name, colon, _ in heads if colon]
        terminals = sum(initial.isupper() for initial in initials)
        rules = sum(initial.islower() for initial in initials)
        if rules > MAX_LARK_RULES or terminals > MAX_LARK_TERMINALS:
            most = f"at most {MAX_LARK_RULES} and {MAX_LARK_TERMINALS} are allowed"
            raise invalid_field(f"{field}.lark", f"has {rules} rules and {terminals} terminals; {most}")


def _check_logit_bias(params: common_pb2.SamplingParams, vocab_size: int | None, field: str) -> None:
    if len(params.logit_bias) > MAX_LOGIT_BIAS_ENTRIES:
        raise invalid_field(field, f": at most {MAX_LOGIT_BIAS_ENTRIES} entries")
    for token, bias in sorted(params.logit_bias.items()):
        name = f"{field}[{token}]"
        if vocab_size is not None and token >= vocab_size:
            raise invalid_field(name, f": the model's vocabulary has {vocab_size} tokens")
        if not -MAX_LOGIT_BIAS <= bias <= MAX_LOGIT_BIAS:
            raise invalid_field(name, f"must be in [-{MAX_LOGIT_BIAS:g}, {MAX_LOGIT_BIAS:g}], not {bias:g}")


def _check_stop(params: common_pb2.SamplingParams, field: str, allowed: bool) -> None:
    if params.stop and not allowed:
        raise invalid_field(field, ": stop strings are the gateway's; use stop_token_ids here")
    if len(params.stop) > MAX_STOP_STRINGS:
        raise invalid_field(field, f": at most {MAX_STOP_STRINGS} strings")
    for index, text in enumerate(params.stop):
        if not text:
            raise invalid_field(f"{field}[{index}]", "must not be empty")
        if len(text) > MAX_STOP_CHARACTERS:
            raise invalid_field(f"{field}[{index}]", f"must have at most {MAX_STOP_CHARACTERS} characters")
