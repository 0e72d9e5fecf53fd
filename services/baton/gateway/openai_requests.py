"""From the OpenAI API's requests to those of baton.v1.Inference."""

from __future__ import annotations

from baton.gateway.openai_errors import ApiError, unsupported
from baton.gateway.openai_types import ChatRequest, CommonRequest, CompletionRequest
from baton.rpc.validate import check_sampling
from baton.v1 import common_pb2, inference_pb2, tokenizer_pb2

DEFAULT_COMPLETION_TOKENS = 16
"""Of /v1/completions, as OpenAI documents it. Chat answers may use what the context still holds."""
MAX_PROMPTS = 256
"""In one request."""

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
        raise ApiError(
            400, "give max_completion_tokens or max_tokens, not both", "max_tokens", "invalid_value"
        )
    tokens = request.max_tokens if request.max_completion_tokens is None else request.max_completion_tokens
    if tokens is not None:
        sampling.max_tokens = tokens
    if request.top_logprobs is not None and not request.logprobs:
        raise ApiError(400, "top_logprobs needs logprobs to be true", "top_logprobs", "invalid_value")
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
        raise ApiError(400, f"give 1 to {MAX_PROMPTS} prompts, not {len(prompt)}", "prompt", "invalid_value")
    return [each for each in prompt if not isinstance(each, int)]


def _start(request: CommonRequest, sampling: common_pb2.SamplingParams) -> inference_pb2.GenerateStart:
    if request.stream_options is not None and not request.stream:
        raise ApiError(400, "stream_options needs stream to be true", "stream_options", "invalid_value")
    if not request.model:
        raise ApiError(400, "model is empty: name one of /v1/models", "model", "invalid_value")
    start = inference_pb2.GenerateStart(
        id="http", model=request.model, sampling=sampling, include_token_ids=False
    )
    if request.n is not None:
        if request.n < 1:
            raise ApiError(400, f"n must be at least 1, not {request.n}", "n", "invalid_value")
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
            raise ApiError(400, f"logit_bias: {key[:40]!r} is no token id", "logit_bias", "invalid_value")
        sampling.logit_bias[int(key)] = bias
    return sampling
