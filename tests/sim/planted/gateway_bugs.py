"""Bugs that can be planted into the gateway's core: see `bugs`."""

from __future__ import annotations

from typing import Any

from baton.gateway.decode_client import DecodeClient
from baton.gateway.request import GatewayRequest
from baton.gateway.resume import ResumeAttempts
from baton.rpc.errors import BatonError
from baton.v1 import decode_pb2
from planted.planting import Wrong, bug

# --- resumes ------------------------------------------------------------------------------------------------

Delivered = tuple[tuple[int, ...] | None, ...]


@bug(
    "late-tokens",
    "tokens of an attempt that has been given up are accepted",
    100,
    DecodeClient,
    "lose",
    seed=29,
)
def _(lose: Wrong, client: DecodeClient, error: BatonError) -> None:
    """Two checks keep them out: the link that forgets whom they were for, and the attempt's number."""
    given_up = dict(client._sinks)
    lose(client, error)
    for request, sink in given_up.items():
        if sink.attempts is not None:
            client._sinks.setdefault(request, sink)
            sink.attempts.current = lambda address, attempt: True  # type: ignore[method-assign]


@bug("sampled-again", "a resume samples the last delivered position again", 50, ResumeAttempts, "delivered")
def _(delivered: Wrong, attempts: ResumeAttempts) -> Delivered:
    return tuple(tokens and tokens[:-1] for tokens in delivered(attempts))


@bug("poison", "nodes that a request has ended are not counted", 200, ResumeAttempts, "ended", seed=33)
def _(ended: Wrong, attempts: ResumeAttempts, error: BatonError, now: float, *, lost: bool) -> None:
    ended(attempts, error, now, lost=lost)
    attempts.failed_steps = 0


@bug(
    "silent-poison",
    "nobody is suspected of a node that is lost without a word",
    200,
    ResumeAttempts,
    "ended",
    seed=15,
)
def _(ended: Wrong, attempts: ResumeAttempts, error: BatonError, now: float, *, lost: bool) -> None:
    attempts.suspect = attempts.has_turn = False
    attempts.failed_steps = 0
    ended(attempts, error, now, lost=lost)


@bug(
    "no-turns",
    "all suspects of a node that is lost count as the cause",
    400,
    ResumeAttempts,
    "begin",
    seed=41,
)
def _(begin: Wrong, attempts: ResumeAttempts, address: str) -> None:
    begin(attempts, address)
    attempts.has_turn = True


@bug(
    "other-choice",
    "a resumed choice continues another choice's output",
    200,
    ResumeAttempts,
    "delivered",
    seed=13,
)
def _(delivered: Wrong, attempts: ResumeAttempts) -> Delivered:
    """Each choice continues from the output of the first."""
    carried: Delivered = delivered(attempts)
    return tuple((tokens and carried[0]) or tokens for tokens in carried)


# --- the gateway's request ----------------------------------------------------------------------------------


@bug(
    "wrong-position",
    "a resume continues from what the client has taken, not from what has come",
    100,
    GatewayRequest,
    "_decode_start",
)
def _(decode_start: Wrong, request: GatewayRequest, *arguments: Any) -> decode_pb2.DecodeStart:
    start: decode_pb2.DecodeStart = decode_start(request, *arguments)
    for carried, choice in zip(start.choices, request.log.choices, strict=False):
        del carried.token_ids[choice._taken_tokens :]
    return start


@bug(
    "counted-twice",
    "tokens that come after a resume are counted twice",
    100,
    GatewayRequest,
    "on_tokens",
    seed=5,
)
def _(on_tokens: Wrong, request: GatewayRequest, address: str, delta: decode_pb2.TokenDelta) -> None:
    on_tokens(request, address, delta)
    if request.attempts.resumed and request.attempts.current(address, delta.attempt):
        request._timing.tokens(delta.choice, len(delta.token_ids))


@bug(
    "forgotten-pause",
    "a paused request is not continued when its client reads",
    100,
    GatewayRequest,
    "_pause",
    seed=3,
)
def _(pause: Wrong, request: GatewayRequest, paused: bool) -> None:
    if paused:
        pause(request, True)
