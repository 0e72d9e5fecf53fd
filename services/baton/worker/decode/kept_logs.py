"""Logs of requests whose caller is gone: another gateway may go on with them."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable

from baton.rpc.message_size import MAX_ANSWER_BYTES
from baton.rpc.outbox import byte_size
from baton.v1 import decode_pb2
from baton.worker.decode.stream import DecodeStream
from baton.worker.decode.types import Key

KEEP_SECONDS = 60.0
MAX_LOGS = 1024
MAX_BYTES = 64 * 2**20
"""Bytes of all logs of callers that are gone."""

Name = tuple[int, int]
"""The caller's incarnation and its request."""


class KeptLogs:
    """Those of one node. Used on the event loop. What is let go is to be cancelled by who calls."""

    def __init__(self) -> None:
        self._kept: OrderedDict[Name, tuple[DecodeStream, float]] = OrderedDict()  # oldest first

    def keep(self, stream: DecodeStream, now: float) -> set[int]:
        """The stream has ended. Returns its requests that go on: those of a caller that is gone."""
        if stream.error is not None:
            stream.logs.clear()
        for request in stream.logs:
            self._kept[stream.incarnation, request] = (stream, now + KEEP_SECONDS)
        return set(stream.logs)

    def take(self, name: Name, streams: Iterable[DecodeStream]) -> tuple[Key, decode_pb2.DecodeLog] | None:
        """The log of a caller that is gone, or of one of the streams, whose break may not have been noticed
        yet. None: it is not here, or has more than an answer holds."""
        held = self._kept.pop(name, None)
        for stream in (held[0],) if held is not None else streams:
            if stream.incarnation == name[0] and (log := stream.logs.pop(name[1], None)) is not None:
                return (Key(stream, name[1]), log) if byte_size(log) <= MAX_ANSWER_BYTES else None
        return None

    def let_go(self, now: float, incarnation: int = 0) -> list[Key]:
        """Requests that are kept no longer: for too long, as too many, or of a caller with this incarnation,
        which has come back."""
        gone = [name for name, (_, until) in self._kept.items() if until <= now or name[0] == incarnation]
        logs = {name: stream.logs.get(name[1]) for name, (stream, _) in self._kept.items()}
        sizes = {name: byte_size(log) if log is not None else 0 for name, log in logs.items()}
        left, size = len(self._kept), sum(sizes.values())
        for name in self._kept:
            if left <= MAX_LOGS and size <= MAX_BYTES:
                break
            gone.append(name)
            left, size = left - 1, size - sizes[name]
        keys = []
        for name in dict.fromkeys(gone):
            stream, _ = self._kept.pop(name)
            stream.logs.pop(name[1], None)
            keys.append(Key(stream, name[1]))
        return keys

    def __len__(self) -> int:
        return len(self._kept)
