"""Outputs of a decode node's core to its callers. Plain data; `callers` converts it to messages."""

from __future__ import annotations

from dataclasses import dataclass

from baton.engine.plan import Logprobs
from baton.engine.request import FinishReason
from baton.v1 import decode_pb2


@dataclass(slots=True)
class Tokens:
    """Not frozen, for its number: see `engine.plan`."""

    request: int
    attempt: int
    choice: int
    token: int
    logprobs: Logprobs | None
    finish: FinishReason | None


@dataclass(frozen=True, slots=True)
class Prompt:
    request: int
    attempt: int
    cached_tokens: int
    logprobs: tuple[Logprobs, ...] | None
    """None: not requested."""


@dataclass(frozen=True, slots=True)
class Done:
    """Terminal."""

    request: int
    attempt: int
    stats: decode_pb2.RequestStats
    """`pulled_bytes` is the shell's to set."""


@dataclass(frozen=True, slots=True)
class Failed:
    """Terminal. `code` is the name of a gRPC status code."""

    request: int
    attempt: int
    code: str
    reason: str
    message: str
    field: str | None = None
    retry_after_ms: int | None = None


Output = Tokens | Prompt | Done | Failed
