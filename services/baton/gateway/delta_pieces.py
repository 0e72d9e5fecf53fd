"""Deltas that are too large for one message."""

from __future__ import annotations

from collections.abc import Iterator

from baton.rpc.errors import exhausted
from baton.rpc.message_size import MAX_ANSWER_BYTES, PIECE_BYTES, cut
from baton.rpc.outbox import byte_size
from baton.v1 import inference_pb2

CHARACTERS_PER_PIECE = PIECE_BYTES // 4
TOKENS_PER_PIECE = PIECE_BYTES // 8
"""A token id takes up to five bytes."""


def pieces(response: inference_pb2.GenerateResponse) -> Iterator[inference_pb2.GenerateResponse]:
    """The event itself or, if it is too large, deltas that have the same effect one after another.

    Raises BatonError for a call of a tool that fits into no message."""
    if byte_size(response) <= MAX_ANSWER_BYTES:
        yield response
        return
    whole = response.delta
    *first, last = _parts(whole)
    last.finish_reason, last.stop_matched = whole.finish_reason, whole.stop_matched
    for part in (*first, last):
        part.choice = whole.choice
        yield inference_pb2.GenerateResponse(id=response.id, delta=part)


def _parts(whole: inference_pb2.Delta) -> Iterator[inference_pb2.Delta]:
    """Reasoning, text and calls in this order, as within a delta."""
    if whole.prompt_logprobs:
        for run in cut(whole.prompt_logprobs):
            yield inference_pb2.Delta(prompt_logprobs=run)
    for first in range(0, len(whole.reasoning), CHARACTERS_PER_PIECE):
        yield inference_pb2.Delta(reasoning=whole.reasoning[first : first + CHARACTERS_PER_PIECE])
    for first in range(0, len(whole.text), CHARACTERS_PER_PIECE):
        yield inference_pb2.Delta(text=whole.text[first : first + CHARACTERS_PER_PIECE])
    for call in whole.tool_calls:
        if byte_size(call) > MAX_ANSWER_BYTES - PIECE_BYTES:
            text = f"a call of {call.name!r} has {byte_size(call) / 2**20:.1f} MiB, more than a message holds"
            raise exhausted(text, "ANSWER_TOO_LARGE")
        yield inference_pb2.Delta(tool_calls=[call])
    if whole.logprobs:
        first = 0
        for positions in cut(whole.logprobs):
            ids = whole.token_ids[first : first + len(positions)]
            yield inference_pb2.Delta(logprobs=positions, token_ids=ids)
            first += len(positions)
        if rest := whole.token_ids[first:]:  # those of a stop string
            yield inference_pb2.Delta(token_ids=rest)
    else:
        for first in range(0, len(whole.token_ids), TOKENS_PER_PIECE):
            yield inference_pb2.Delta(token_ids=whole.token_ids[first : first + TOKENS_PER_PIECE])
