"""The recorder: a ring of the last events of requests in one process."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Collection
from enum import IntEnum
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from baton.tracing.spans import Spans

CAPACITY = 32_768
"""Events. About 340 bytes each, so 11 MB a process (benchmarks/recorder_cost.py); a request has 10 to 30."""
MAX_TEXT = 200
TOKENS_EVERY = 16
"""Output tokens between two events TOKENS."""


class EventKind(IntEnum):
    """Kind of an event; baton.v1.EventKind says what each one means. The numbers are the same there."""

    RECEIVED = 1
    TOKENIZING = 2
    TOKENIZED = 3
    SENT = 4
    QUEUED = 5
    ADMITTED = 6
    CHUNK_BEGUN = 7
    CHUNK_ENDED = 8
    ANNOUNCED = 9
    PULL_BEGUN = 10
    PULL_ENDED = 11
    FIRST_TOKEN = 12
    TOKENS = 13
    RUNNING = 14
    RETRACTED = 15
    RETRIED = 16
    RESUMED = 17
    WRITTEN = 18
    ENDED = 19
    READ = 20
    PROMOTED = 21
    IMAGES_BEGUN = 22
    IMAGES_ENDED = 23
    ENCODE_ASKED = 24
    ENCODE_BEGUN = 25
    ENCODE_ENDED = 26


_RECEIVED, _ENDED = EventKind.RECEIVED.value, EventKind.ENDED.value


class Event(NamedTuple):
    at: float
    """Seconds of the recorder's clock."""
    kind: EventKind
    gateway: int
    """With `request`: the request's name, the same in all processes."""
    request: int
    attempt: int = 0
    decode_try: int = 0
    number: int = 0
    size: int = 0
    step: int = 0
    text: str = ""


Kept = tuple[float, int, int, int, int, int, int, int, int, str]
"""An event in the ring: the fields of Event."""


def _event(kept: Kept) -> Event:
    at, kind, *rest = kept
    return Event(at, EventKind(kind), *rest)  # type: ignore[arg-type]


class Recorder:
    """Keeps the last `capacity` events; 0: none. Any thread may add: an event is one append to a deque."""

    def __init__(self, capacity: int = CAPACITY, clock: Callable[[], float] = time.monotonic) -> None:
        self.clock = clock
        self.spans: Spans | None = None
        """Makes OpenTelemetry's spans of what is recorded; None: nobody wants them."""
        self._silent = not capacity
        self._ring: deque[Kept] = deque(maxlen=capacity)

    def add(
        self,
        kind: EventKind,
        gateway: int,
        request: int,
        attempt: int = 0,
        decode_try: int = 0,
        number: int = 0,
        size: int = 0,
        step: int = 0,
        text: str = "",
    ) -> None:
        """Records what happens now."""
        if self._silent and self.spans is None:
            return
        if len(text) > MAX_TEXT:
            text = text[:MAX_TEXT]
        # A plain number: the garbage collector need not look at tuples of such again.
        event = (self.clock(), kind._value_, gateway, request, attempt, decode_try, number, size, step, text)
        self._ring.append(event)
        if self.spans is not None:
            self.spans.take(_event(event))

    def begin_span(
        self,
        gateway: int,
        request: int,
        attempt: int = 0,
        decode_try: int = 0,
        *,
        operation: str,
        traceparent: str,
        attributes: dict[str, Any] | None = None,
    ) -> str:
        """The process has got a request; before its event RECEIVED. Returns the trace context for the
        processes that it asks; empty: the request is not traced."""
        if self.spans is None:
            return ""
        return self.spans.begin((gateway, request, attempt, decode_try), operation, traceparent, attributes)

    def of(self, names: Collection[tuple[int, int]]) -> list[Event]:
        """Events of these requests (gateway, request), oldest first. Takes about a millisecond when full."""
        chosen = frozenset(names)
        return [_event(event) for event in list(self._ring) if event[2:4] in chosen]

    def since(self, at: float) -> list[Event]:
        """Events after this time, oldest first. Takes as long as there are such events."""
        ring = list(self._ring)
        first = len(ring)
        while first and ring[first - 1][0] > at:
            first -= 1
        return [_event(event) for event in ring[first:]]

    def requests(self) -> dict[tuple[int, int], tuple[float, float | None]]:
        """When each request whose begin is still recorded was received and has ended, oldest first. None: it
        runs. Takes milliseconds when full."""
        found: dict[tuple[int, int], tuple[float, float | None]] = {}
        for at, kind, gateway, request, *_ in list(self._ring):
            if kind == _RECEIVED:
                found[gateway, request] = at, None
            elif kind == _ENDED and (gateway, request) in found:
                found[gateway, request] = found[gateway, request][0], at
        return found

    def all(self) -> list[Event]:
        """All events, oldest first. Takes tens of milliseconds when full: for tests."""
        return [_event(event) for event in list(self._ring)]
