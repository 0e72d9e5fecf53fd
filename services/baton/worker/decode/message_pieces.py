"""Messages of Decode.Generate that are too large for one."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import chain

from baton.rpc.message_size import MAX_ANSWER_BYTES, PIECE_BYTES, cut
from baton.rpc.outbox import byte_size
from baton.v1 import common_pb2, decode_pb2

TOKENS_PER_PIECE = PIECE_BYTES // 8
"""A token id takes up to five bytes."""
ENTRY_BYTES = 8
"""Bytes that a part adds to its message: its tag and its length."""
_BEFORE_TOKENS = ("prompt_logprobs", "prompt")


def pieces(message: decode_pb2.StepEvents) -> Iterator[decode_pb2.StepEvents]:
    """The message itself or, if it is too large, several that have the same effect one after another."""
    if byte_size(message) <= MAX_ANSWER_BYTES:
        yield message
        return
    before = [event for event in message.events if event.WhichOneof("kind") in _BEFORE_TOKENS]
    after = [event for event in message.events if event.WhichOneof("kind") not in _BEFORE_TOKENS]
    piece, size = decode_pb2.StepEvents(step=message.step), 0
    parts: Iterable[decode_pb2.DecodeEvent | decode_pb2.TokenDelta]
    parts = chain(before, chain.from_iterable(map(_cut_tokens, message.tokens)), after)
    for part in parts:
        more = byte_size(part) + ENTRY_BYTES
        if size and size + more > PIECE_BYTES:
            yield piece
            piece, size = decode_pb2.StepEvents(step=message.step), 0
        if isinstance(part, decode_pb2.TokenDelta):
            piece.tokens.append(part)
        else:
            piece.events.append(part)
        size += more
    yield piece


def _cut_tokens(delta: decode_pb2.TokenDelta) -> Iterator[decode_pb2.TokenDelta]:
    if byte_size(delta) <= PIECE_BYTES:
        yield delta
        return
    if delta.logprobs:
        counts = [len(run) for run in cut(delta.logprobs)]
    else:
        counts = [TOKENS_PER_PIECE] * (1 + (len(delta.token_ids) - 1) // TOKENS_PER_PIECE)
    first = 0
    for index, count in enumerate(counts):
        yield decode_pb2.TokenDelta(
            request=delta.request,
            attempt=delta.attempt,
            choice=delta.choice,
            token_ids=delta.token_ids[first : first + count],
            logprobs=delta.logprobs[first : first + count],
            finish_reason=delta.finish_reason if index == len(counts) - 1 else None,
        )
        first += count


def add_prompt(
    message: decode_pb2.StepEvents,
    request: int,
    attempt: int,
    cached_tokens: int,
    logprobs: list[common_pb2.PositionLogprobs],
) -> None:
    """Appends that the prompt is computed, in as many events as its log-probabilities need."""
    *first, last = cut(logprobs)
    for run in first:
        event = message.events.add(request=request, attempt=attempt)
        event.prompt_logprobs.positions.extend(run)
    event = message.events.add(request=request, attempt=attempt)
    event.prompt.cached_tokens = cached_tokens
    event.prompt.prompt_logprobs.extend(last)
