"""Responses that clients may continue or retrieve: in memory, with a limit and a time to live."""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from threading import RLock

from baton.v1 import tokenizer_pb2

MESSAGE_BYTES = 600
"""That an empty message takes, about."""


@dataclass(frozen=True, slots=True)
class StoredResponse:
    response: bytes
    """JSON: as Python objects it may take thirty times as much."""
    conversation: list[tokenizer_pb2.ChatMessage]
    """All messages, the answer included; without instructions, which are of one response."""
    key: str
    """Name of the API key that made it; no other sees it."""
    size: int
    """Bytes, about."""
    expires: float


class ResponseStore:
    """The oldest are dropped when there are too many bytes. max_bytes 0: nothing is stored. Threads may share
    it."""

    def __init__(self, max_bytes: int, seconds: float, clock: Callable[[], float] = time.monotonic) -> None:
        self.max_bytes = max_bytes
        self._seconds = seconds
        self._clock = clock
        self._stored: OrderedDict[str, StoredResponse] = OrderedDict()
        self._bytes = 0
        self._lock = RLock()

    def put(self, id: str, response: bytes, conversation: list[tokenizer_pb2.ChatMessage], key: str) -> None:
        size = len(response) + sum(message.ByteSize() + MESSAGE_BYTES for message in conversation)
        if size > self.max_bytes:
            return
        now = self._clock()
        with self._lock:
            stored = StoredResponse(response, conversation, key, size, now + self._seconds)
            self._stored[id] = stored
            self._bytes += size
            while self._stored:
                oldest = next(iter(self._stored))
                if self._bytes <= self.max_bytes and self._stored[oldest].expires > now:
                    break
                self._drop(oldest)

    def get(self, id: str, key: str) -> StoredResponse | None:
        with self._lock:
            found = self._stored.get(id)
            if found is None or found.key != key:
                return None
            if found.expires <= self._clock():
                self._drop(id)
                return None
            return found

    def delete(self, id: str, key: str) -> bool:
        """Whether there was one."""
        with self._lock:
            if self.get(id, key) is None:
                return False
            self._drop(id)
            return True

    def _drop(self, id: str) -> None:
        self._bytes -= self._stored.pop(id).size
