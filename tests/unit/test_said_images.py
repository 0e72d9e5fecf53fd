"""A large image holds the interpreter no longer than it takes to copy it once."""

from __future__ import annotations

import time
from collections.abc import Callable

from baton.api.images import ImageBlock, Words, say
from baton.v1 import tokenizer_pb2

FILE = bytes(32 * 2**20)


class Ready(ImageBlock):
    """Whose file needs no reading."""

    def _read(self, given: str) -> bytes:
        return FILE


def said() -> tokenizer_pb2.ChatMessage:
    source = {"type": "base64", "media_type": "image/png", "data": "x"}
    message = tokenizer_pb2.ChatMessage()
    say(message, [("a", Words("Look: ")), ("b", Ready(type="image", source=source))])
    return message


def copied() -> tokenizer_pb2.ChatMessage:
    message = tokenizer_pb2.ChatMessage()
    message.parts.add().image = FILE
    return message


def seconds(made: Callable[[], object]) -> float:
    begun = time.thread_time()
    made()
    return time.thread_time() - begun


def test_an_image_is_copied_once_into_its_message() -> None:
    message = said()
    assert [part.WhichOneof("kind") for part in message.parts] == ["text", "image"]
    assert message.parts[1].image == FILE and message.parts[1].name == "b.source"
    once = min(seconds(copied) for _ in range(5))
    assert min(seconds(said) for _ in range(5)) < 2 * once
