"""The OpenAI API's requests, as far as they are served here.

Strict: an unknown field, a wrong JSON type or an unsupported value is an error that names the field; nothing
is ignored in silence. Fields beyond OpenAI's (top_k, min_p, ...) are named as in baton.v1.SamplingParams.
Ranges are checked with the request itself (rpc.validate), so that gRPC and HTTP refuse the same.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

Int32 = Annotated[int, Field(ge=-(2**31), lt=2**31)]
Int64 = Annotated[int, Field(ge=-(2**63), lt=2**63)]
TokenId = Annotated[int, Field(ge=0, lt=2**32)]
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
    stop: str | list[str] | None = None
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
    stop_token_ids: list[TokenId] | None = None
    priority: Int32 | None = None
    resume: bool | None = None
    # Accepted, and without effect here.
    user: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None


class CompletionRequest(CommonRequest):
    """POST /v1/completions."""

    prompt: str | list[str] | list[TokenId] | list[list[TokenId]]
    echo: bool | None = None
    logprobs: Int32 | None = None
    best_of: Int32 | None = None
    suffix: None = None


class TextPart(Strict):
    type: Literal["text"]
    text: str


class Message(Strict):
    role: str
    content: str | list[TextPart]
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

    messages: list[Message]
    max_completion_tokens: Int64 | None = None
    logprobs: bool | None = None
    top_logprobs: Int32 | None = None
    response_format: ResponseFormat | None = None
    tools: Annotated[list[Any], Field(max_length=0)] | None = None
    tool_choice: Literal["none", "auto"] | None = None
    modalities: list[Literal["text"]] | None = None
    # Accepted, and without effect here.
    metadata: dict[str, str] | None = None
    store: Literal[False] | None = None
    service_tier: Literal["auto", "default"] | None = None
