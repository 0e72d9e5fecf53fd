"""How large a message may be that a caller receives."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TypeVar

from google.protobuf.message import Message

from baton.rpc.errors import invalid_field
from baton.rpc.outbox import byte_size

MAX_ANSWER_BYTES = 4 * 2**20 - 2**18
"""gRPC's clients read 4 MiB, unless told otherwise. A larger message would end the call with all its
requests."""
PIECE_BYTES = 2**20
"""What is cut is cut into pieces of about this size."""
EMBEDDING_BYTES = 32
"""Bytes that an embedding adds to its message beside its values."""

M = TypeVar("M", bound=Message)


def cut(messages: Sequence[M]) -> Iterator[Sequence[M]]:
    """The messages in runs of at most PIECE_BYTES, or of one message; of no messages one empty run."""
    first, size = 0, 0
    for index, message in enumerate(messages):
        more = byte_size(message)
        if index > first and size + more > PIECE_BYTES:
            yield messages[first:index]
            first, size = index, 0
        size += more
    yield messages[first:]


def check_answer(size: int, field: str, advice: str, most: int = MAX_ANSWER_BYTES) -> None:
    """For a call with one answer, of at least `size` bytes. field: what makes it large. Raises BatonError."""
    if size > most:
        text = f": the answer has more than {most / 2**20:g} MiB: {advice}"
        raise invalid_field(field, text, "ANSWER_TOO_LARGE")


def check_embeddings(count: int, values: int, field: str) -> None:
    """For an answer of so many embeddings of so many values. Raises BatonError."""
    size = 4 * values + EMBEDDING_BYTES
    most = MAX_ANSWER_BYTES // size
    check_answer(count * size, field, f"send at most {most} at a time, or ask for fewer dimensions")
