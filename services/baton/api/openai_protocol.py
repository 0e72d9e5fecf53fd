"""What requests of the OpenAI API share, /v1/completions, and conversions to baton.v1.Inference.

`openai_chat` has /v1/chat/completions. Fields beyond OpenAI's (top_k, min_p, ...) are named as in
baton.v1.SamplingParams. Ranges are checked by rpc.validate, so that gRPC and HTTP refuse the same values.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, ClassVar, Literal

from pydantic import Field

from baton.api.field_names import OPENAI
from baton.api.openai_errors import invalid_value
from baton.api.openai_fields import Elements, Int32, Int64, Seed, Strict, TokenId, TopK
from baton.rpc.validate import MAX_CHOICES, check_sampling
from baton.v1 import common_pb2, inference_pb2

DEFAULT_COMPLETION_TOKENS = 16
"""Default of `max_tokens` in /v1/completions, as OpenAI documents it. Chat answers may use what the
context still holds."""
MAX_PROMPTS = 256
"""In one request."""


class StreamOptions(Strict):
    FIELD_PATH = "stream_options"
    HINTS: ClassVar[Mapping[str, str]] = {"include_obfuscation": "answers are not padded"}

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None
    """Each chunk has the usage so far."""


class StructuredOutputs(Strict):
    """vLLM's: what the whole answer is, by one of these fields."""

    FIELD_PATH = "structured_outputs"

    json_: dict[str, Any] | bool | str | None = Field(None, alias="json")
    """A JSON schema, or its text."""
    json_object: bool | None = None
    regex: str | None = None
    choice: Elements[str] | None = None
    grammar: str | None = None
    """In Lark's syntax."""


OTHER_SERVERS = {
    "guided_json": "is structured_outputs.json here",
    "guided_regex": "is structured_outputs.regex here",
    "guided_choice": "is structured_outputs.choice here",
    "guided_grammar": "is structured_outputs.grammar here, in Lark's syntax",
    "json_schema": "is structured_outputs.json here",
    "regex": "is structured_outputs.regex here",
    "ebnf": "is structured_outputs.grammar here, in Lark's syntax",
    "bad_words": "is not supported: give logit_bias",
    "include_stop_str_in_output": "is not supported: the text ends before the stop string",
    "no_stop_trim": "is not supported: the text ends before the stop string",
    "truncate_prompt_tokens": "is not supported: a prompt that is too long is refused",
    "use_beam_search": "is not supported: tokens are sampled",
    "return_token_ids": "is not supported: gRPC has include_token_ids",
    "return_tokens_as_token_ids": "is not supported: gRPC has include_token_ids",
}
"""Fields of vLLM and SGLang."""

COMMON_HINTS = {
    "user": "names the caller's own user",
    "safety_identifier": "names the caller's own user",
    "metadata": "is for the caller's own records",
    "store": "answers are not stored",
    "service_tier": "there is one",
    "prompt_cache_key": "every prompt finds what is cached of it",
    "prompt_cache_retention": "pages are kept as long as there is room",
    "spaces_between_special_tokens": "special tokens have no text",
    "length_penalty": "is of beam search",
    "early_stopping": "is of beam search",
}


class CommonRequest(Strict):
    """What both endpoints take."""

    HINTS: ClassVar[Mapping[str, str]] = COMMON_HINTS

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
    top_k: TopK | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    min_tokens: Int64 | None = None
    ignore_eos: bool | None = None
    stop_token_ids: Elements[TokenId] | None = None
    skip_special_tokens: Literal[True] | None = None
    priority: Int32 | None = None
    resume: bool | None = None
    cache_salt: str | None = None
    structured_outputs: StructuredOutputs | None = None

    @property
    def grammar_field(self) -> str:
        """That a grammar of the request comes from."""
        return OPENAI.grammar if self.structured_outputs is None else "structured_outputs"

    @property
    def limit(self) -> str | None:
        """The field that limits the output, if it was given."""
        return "max_tokens" if self.max_tokens is not None else None

    @property
    def usage_in_stream(self) -> bool:
        return self.stream_options is not None and bool(self.stream_options.include_usage)

    @property
    def usage_in_chunks(self) -> bool:
        return self.stream_options is not None and bool(self.stream_options.continuous_usage_stats)


class CompletionRequest(CommonRequest):
    """POST /v1/completions."""

    REFUSED: ClassVar[Mapping[str, str]] = {
        **OTHER_SERVERS,
        "suffix": "is not supported: no model here fills in the middle",
        "response_format": "is structured_outputs here",
    }

    prompt: str | Elements[str] | Elements[TokenId] | Elements[Elements[TokenId]]
    echo: bool | None = None
    logprobs: Int32 | None = None
    best_of: Int32 | None = None

    @property
    def drops_output(self) -> bool:
        """max_tokens is 0: one token is computed, and not given out."""
        return self.max_tokens == 0


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
    sampling = common_sampling(request)
    tokens = request.max_tokens
    sampling.max_tokens = DEFAULT_COMPLETION_TOKENS if tokens is None else 1 if tokens == 0 else tokens
    if request.logprobs is not None:
        sampling.logprobs = request.logprobs
        if request.echo:
            sampling.prompt_logprobs = request.logprobs
    if request.best_of is not None:
        _check_best_of(request)
        if request.best_of > (request.n or 1) and not sampling.HasField("logprobs"):
            sampling.logprobs = 0
    check_sampling(sampling, None)  # before it is copied for each prompt
    starts = []
    for prompt in _prompts(request):
        start = common_start(request, sampling)
        if tokens is None:
            start.clamp_max_tokens = True
        if request.best_of is not None:
            start.n = request.best_of
        starts.append(start)
        if isinstance(prompt, str):
            start.text = prompt
        else:
            start.tokens.CopyFrom(inference_pb2.TokenPrompt(token_ids=prompt))
    return starts


def _check_best_of(request: CompletionRequest) -> None:
    if request.best_of is None or request.best_of < (request.n or 1):
        raise invalid_value("best_of", f"best_of must be at least n, not {request.best_of}")
    if request.best_of > MAX_CHOICES:
        raise invalid_value("best_of", f"best_of must be at most {MAX_CHOICES}, not {request.best_of}")
    if request.best_of > (request.n or 1) and request.stream:
        raise invalid_value("best_of", "best_of needs stream to be false: the best is known at the end")


def _prompts(request: CompletionRequest) -> list[str | list[int]]:
    prompt = request.prompt
    if isinstance(prompt, str):
        return [prompt]
    if prompt and isinstance(prompt[0], int):
        return [[token for token in prompt if isinstance(token, int)]]
    if not 1 <= len(prompt) <= MAX_PROMPTS:
        raise invalid_value("prompt", f"give 1 to {MAX_PROMPTS} prompts, not {len(prompt)}")
    return [each for each in prompt if not isinstance(each, int)]


def common_start(request: CommonRequest, sampling: common_pb2.SamplingParams) -> inference_pb2.GenerateStart:
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
    if request.cache_salt is not None:
        start.namespace = request.cache_salt
    if request.usage_in_chunks:
        start.include_token_ids = True  # they are counted
    return start


def common_sampling(request: CommonRequest) -> common_pb2.SamplingParams:
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
        if int(key) in sampling.logit_bias:
            raise invalid_value("logit_bias", f"logit_bias: token {int(key)} is given twice, once as {key!r}")
        sampling.logit_bias[int(key)] = bias
    if request.structured_outputs is not None:
        _constrain(request.structured_outputs, sampling.grammar)
    return sampling


def _constrain(structured: StructuredOutputs, grammar: common_pb2.Grammar) -> None:
    chosen = [value for name, value in structured if value is not None and (name != "json_object" or value)]
    if len(chosen) != 1:
        kinds = "json, json_object, regex, choice and grammar"
        raise invalid_value("structured_outputs", f"structured_outputs needs one of {kinds}")
    if structured.json_ is not None:
        schema = structured.json_
        grammar.json_schema = schema if isinstance(schema, str) else json.dumps(schema, ensure_ascii=False)
    elif structured.json_object:
        grammar.json_object.SetInParent()
    elif structured.regex is not None:
        grammar.regex = structured.regex
    elif structured.choice is not None:
        grammar.choice.SetInParent()
        grammar.choice.strings.extend(structured.choice)
    elif structured.grammar is not None:
        grammar.lark = structured.grammar
