"""Responses that clients may continue or retrieve: in memory, with a limit and a time to live."""

from __future__ import annotations

import time
from collections import Counter, OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from threading import RLock

from baton.v1 import tokenizer_pb2

ENTRY_BYTES = 600
"""That a stored response takes beside its contents, about."""


@dataclass(frozen=True, slots=True)
class StoredResponse:
    response: bytes
    """JSON: as Python objects it may take thirty times as much."""
    chat: bytes | None
    """A ChatPrompt, serialized likewise. None: it failed, so that nothing can follow."""
    owner: bytes
    """`ApiKey.owner` of the key that made it; no other sees it."""
    size: int
    """Bytes, about."""
    expires: float

    @property
    def conversation(self) -> list[tokenizer_pb2.ChatMessage] | None:
        """All messages, the answer included; without instructions, which are of one response."""
        return (
            list(tokenizer_pb2.ChatPrompt.FromString(self.chat).messages) if self.chat is not None else None
        )


class ResponseStore:
    """When there are too many bytes, the owner of most loses its oldest response: nobody who has less than an
    equal share loses any. max_bytes 0: nothing is stored. Threads may share it."""

    def __init__(self, max_bytes: int, seconds: float, clock: Callable[[], float] = time.monotonic) -> None:
        self.max_bytes = max_bytes
        self._seconds = seconds
        self._clock = clock
        self._stored: OrderedDict[str, StoredResponse] = OrderedDict()
        """The oldest first, which expires first."""
        self._ids: dict[bytes, dict[str, None]] = {}
        """Response ids of each owner, the oldest first."""
        self._bytes: Counter[bytes] = Counter()
        """Stored bytes of each owner."""
        self._lock = RLock()

    def put(
        self, id: str, response: bytes, conversation: list[tokenizer_pb2.ChatMessage] | None, owner: bytes
    ) -> bool:
        """Whether there is room for it."""
        chat = None
        if conversation is not None:
            made = tokenizer_pb2.ChatPrompt(messages=conversation)
            for message in made.messages:
                for part in message.parts:
                    part.name = "previous_response_id" if part.image_digest else ""  # for errors
            chat = made.SerializeToString()
        size = ENTRY_BYTES + len(response) + len(chat or b"")
        if size > self.max_bytes:
            return False
        now = self._clock()
        with self._lock:
            if id in self._stored:  # of a stream that the client has gone on with
                self._drop(id)
            self._stored[id] = StoredResponse(response, chat, owner, size, now + self._seconds)
            self._ids.setdefault(owner, {})[id] = None
            self._bytes[owner] += size
            while self._stored and self._stored[oldest := next(iter(self._stored))].expires <= now:
                self._drop(oldest)
            while self._bytes.total() > self.max_bytes:
                ((most, _),) = self._bytes.most_common(1)
                self._drop(next(iter(self._ids[most])))
            return id in self._stored

    def get(self, id: str, owner: bytes) -> StoredResponse | None:
        with self._lock:
            found = self._stored.get(id)
            if found is None or found.owner != owner:
                return None
            if found.expires <= self._clock():
                self._drop(id)
                return None
            return found

    def delete(self, id: str, owner: bytes) -> bool:
        """Whether there was one."""
        with self._lock:
            if self.get(id, owner) is None:
                return False
            self._drop(id)
            return True

    def _drop(self, id: str) -> None:
        dropped = self._stored.pop(id)
        ids = self._ids[dropped.owner]
        del ids[id]
        self._bytes[dropped.owner] -= dropped.size
        if not ids:
            del self._ids[dropped.owner], self._bytes[dropped.owner]
