"""Types of the client's arguments and results."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NotRequired, Protocol, TypedDict

DEFAULT_ADDRESS = "127.0.0.1:50050"

FinishReason = Literal["stop", "length", "tool_calls"]
"""tool_calls: the answer has ended, and there are calls in it."""


class Schema(Protocol):
    """A class such as pydantic's models, as far as it is used here."""

    @classmethod
    def model_json_schema(cls) -> dict[str, Any]: ...

    @classmethod
    def model_validate_json(cls, json_data: str) -> Any: ...


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A function that the model asks to be called."""

    id: str
    """Names the call in the conversation: the result's message has it as `tool_call_id`."""
    name: str
    arguments: str
    """A JSON object, as text."""
    model: type[Schema] | None = field(default=None, repr=False)
    """The pydantic model that was given as the tool."""

    @property
    def parsed(self) -> Any:
        """The arguments as an instance of the tool's pydantic model, else as a dict. Raises ValueError for
        arguments that do not fit the model, which a call may have that was neither required nor strict."""
        if self.model is None:
            return json.loads(self.arguments or "{}")
        return self.model.model_validate_json(self.arguments or "{}")


class Message(TypedDict):
    """A chat message. role: "system", "user", "assistant" or "tool"."""

    role: str
    content: NotRequired[str | Sequence[str | bytes] | None]
    """A text; or texts and images, in order: an image is the bytes of its file."""
    name: NotRequired[str]
    """The author's."""
    tool_calls: NotRequired[Sequence[ToolCall]]
    """Calls in an assistant's message."""
    tool_call_id: NotRequired[str]
    """In a tool's message: the call whose result it is."""
    reasoning: NotRequired[str]
    """In an assistant's message: what the model wrote before its answer."""


class Tool(TypedDict):
    """A function that the model may ask to be called. A pydantic model is one as well: its name, its
    docstring and its schema."""

    name: str
    description: NotRequired[str]
    parameters: NotRequired[Mapping[str, Any]]
    """JSON Schema of the arguments; missing: there are none."""
    strict: NotRequired[bool]
    """The arguments fit the schema in every case."""


class ToolName(TypedDict):
    """The one tool to call."""

    name: str


ToolChoice = Literal["auto", "none", "required"] | ToolName


class Grammar(TypedDict, total=False):
    """What an answer must be: one of these. See baton.v1.Grammar."""

    json_schema: Mapping[str, Any] | str
    """A JSON Schema, or its text."""
    json_object: Literal[True]
    """Any JSON object."""
    regex: str
    lark: str
    choice: Sequence[str]
    """One of these strings."""


ResponseFormat = type[Schema] | Mapping[str, Any]


class Options(TypedDict, total=False):
    """Options of a request. Missing ones take the defaults of baton.v1.SamplingParams."""

    model: str
    n: int
    temperature: float
    top_k: int
    top_p: float
    min_p: float
    repetition_penalty: float
    presence_penalty: float
    frequency_penalty: float
    logit_bias: Mapping[int, float]
    seed: int
    max_tokens: int
    min_tokens: int
    stop: str | Sequence[str]
    stop_token_ids: Sequence[int]
    ignore_eos: bool
    logprobs: int
    prompt_logprobs: int
    grammar: Grammar
    response_format: ResponseFormat
    """The answer is JSON: a pydantic model's (`Completion.parsed` is its instance), or that of a schema."""
    timeout: float
    """Seconds; the request then fails with DEADLINE_EXCEEDED."""
    priority: int
    namespace: str
    resume: bool
    """False: fails rather than resume at another decode node, once there is output."""
    hand_off: bool
    """Whether the prompt is computed on a prefill node; missing: the gateway decides. The answer is the
    same."""


class Arguments(Options, total=False):
    """Arguments of a request. Its prompt is a text, or one of these."""

    messages: str | Sequence[Message] | None
    """A chat; a str: one user message."""
    tools: Sequence[Tool | type[Schema]] | None
    """Functions that the answer to messages may call."""
    tool_choice: ToolChoice | None
    """Whether the answer calls any; missing: the model decides. A required call fits its tool's schema."""
    parallel_tool_calls: bool | None
    """False: one call at most."""
    template_arguments: Mapping[str, Any] | None
    """Variables of the model's chat template, such as enable_thinking."""
    token_ids: Sequence[int] | None


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    token_id: int
    logprob: float
    token_bytes: bytes
    """The token's own bytes; they need not be valid UTF-8."""


@dataclass(frozen=True, slots=True)
class PositionLogprobs:
    chosen: TokenLogprob | None
    """None at a prompt's first position, which nothing predicts."""
    top: list[TokenLogprob]
    """The most likely tokens, best first."""


@dataclass(frozen=True, slots=True)
class Delta:
    """New output of one choice."""

    choice: int
    text: str
    token_ids: list[int]
    logprobs: list[PositionLogprobs]
    finish_reason: FinishReason | None
    """Set in the choice's last delta."""
    stop_matched: str
    """The stop string that ended the choice, if one did."""
    reasoning: str = ""
    """For chat messages: what the model writes before the answer."""
    tool_calls: list[ToolCall] = field(default_factory=list)
    """Each is whole. In a delta, reasoning comes before text, and text before calls."""


@dataclass(slots=True)
class Choice:
    text: str = ""
    reasoning: str = ""
    tool_calls: list[ToolCall] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[PositionLogprobs] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    stop_matched: str = ""


@dataclass(frozen=True, slots=True)
class Usage:
    prompt_tokens: int
    output_tokens: int
    """Over all choices."""
    cached_tokens: int
    """Leading prompt tokens found in a prefix tree."""
    reasoning_tokens: int = 0
    """Output tokens before the answers."""
    drafted_tokens: int = 0
    """Guessed tokens that were verified (--draft)."""
    accepted_drafts: int = 0
    """Those of them that were right."""
    host_tokens: int = 0
    """Cached tokens that were in a node's host memory."""
    disk_tokens: int = 0
    """Those that were in files."""
    peer_tokens: int = 0
    """Those that were pulled from another node's cache; the others were in the node's KV pool."""


@dataclass(frozen=True, slots=True)
class Stats:
    """Statistics of the request. Times in seconds, measured at the gateway."""

    ttft: float
    total: float
    decode_address: str
    prefill_address: str
    """Empty: the decode node computed the prompt itself."""
    transport: str
    """How pages were pulled; empty: none were."""
    pulled_pages: int
    pulled_bytes: int
    retractions: int
    handoff_retries: int
    resumed: int
    """Times that it went on at a decode node after another one, which ran it, had been lost."""


@dataclass(slots=True)
class Completion:
    """A whole answer."""

    request_id: str = ""
    """The gateway's name for the request, as in its log."""
    seed: int = 0
    """The seed in use: the same again gives the same tokens."""
    choices: list[Choice] = field(default_factory=list)
    prompt_logprobs: list[PositionLogprobs] = field(default_factory=list)
    usage: Usage | None = None
    """None until the request has finished; the same holds for stats."""
    stats: Stats | None = None

    response_format: ResponseFormat | None = None
    """The request's response format."""

    @property
    def text(self) -> str:
        """Text of the first choice."""
        return self.choices[0].text

    @property
    def reasoning(self) -> str:
        """Reasoning of the first choice."""
        return self.choices[0].reasoning

    @property
    def tool_calls(self) -> list[ToolCall]:
        """Tool calls of the first choice."""
        return self.choices[0].tool_calls

    @property
    def message(self) -> Message:
        """The first choice as an assistant's message, to go on with the conversation."""
        return Message(
            role="assistant", content=self.text, reasoning=self.reasoning, tool_calls=self.tool_calls
        )

    @property
    def parsed(self) -> Any:
        """The first choice as an instance of the request's pydantic model, else as Python's values of its
        JSON. Raises ValueError if it is not whole, such as after finish reason "length"."""
        if self.response_format is None or isinstance(self.response_format, Mapping):
            return json.loads(self.text)
        return self.response_format.model_validate_json(self.text)

    @property
    def token_ids(self) -> list[int]:
        """Token ids of the first choice."""
        return self.choices[0].token_ids

    @property
    def finish_reason(self) -> FinishReason | None:
        """Finish reason of the first choice."""
        return self.choices[0].finish_reason


class EmbedOptions(TypedDict, total=False):
    """Options of `embed`. Missing ones take the defaults of baton.v1.EmbedRequest."""

    model: str
    pooling: Literal["last", "mean"]
    """Which final hidden states an embedding is made of; missing: those that the model asks for."""
    normalize: bool
    """Divide each embedding by its length; missing: as the model asks."""
    dimensions: int
    """Keep the first values only."""
    timeout: float
    """Seconds; the request then fails with DEADLINE_EXCEEDED."""
    priority: int
    namespace: str


Input = str | Sequence[int]
"""A text, or its token ids."""


@dataclass(frozen=True, slots=True)
class Embeddings:
    """One vector for each input, in order."""

    vectors: list[list[float]]
    prompt_tokens: int
    """Tokens of all inputs."""
    cached_tokens: int
    """Leading prompt tokens found in prefix trees."""


@dataclass(frozen=True, slots=True)
class Model:
    name: str
    architecture: str
    context_length: int
    vocab_size: int
    parameters: int
    chat: bool
