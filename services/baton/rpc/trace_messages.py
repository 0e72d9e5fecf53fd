"""Recorded events as messages, and back."""

from __future__ import annotations

from collections.abc import Iterable

from baton.rpc.errors import invalid
from baton.rpc.message_size import check_answer
from baton.rpc.outbox import byte_size
from baton.tracing.recorder import Event, EventKind, Recorder
from baton.v1 import trace_pb2

MAX_NAMES = 4096
_KINDS: dict[EventKind, trace_pb2.EventKind] = {
    kind: getattr(trace_pb2, f"EVENT_{kind.name}") for kind in EventKind
}


def recent(recorder: Recorder, request: trace_pb2.RecentRequest) -> trace_pb2.RecentEvents:
    """The answer of Node.Recent, without the process's name. Raises BatonError."""
    if len(request.requests) > MAX_NAMES:
        text = f"{len(request.requests)} requests are named; ask for {MAX_NAMES} at a time"
        raise invalid("requests", text)
    names = [(name.gateway, name.request) for name in request.requests]
    events = recorder.of(names) if names else []
    found = trace_pb2.RecentEvents(events=map(event_to, events))
    found.clock_us = _microseconds(recorder.clock())  # last, so that making the answer is not in its way
    check_answer(byte_size(found), "requests", "name fewer at a time")
    return found


def event_to(event: Event) -> trace_pb2.RecordedEvent:
    return trace_pb2.RecordedEvent(
        kind=_KINDS[event.kind],
        clock_us=_microseconds(event.at),
        request=trace_pb2.RequestName(gateway=event.gateway, request=event.request),
        attempt=event.attempt,
        decode_try=event.decode_try,
        number=event.number,
        size=event.size,
        step=event.step,
        text=event.text,
    )


def events_from(messages: Iterable[trace_pb2.RecordedEvent]) -> list[Event]:
    """Kinds that this version does not know are left out."""
    known = {int(kind) for kind in EventKind}
    return [
        Event(
            each.clock_us / 1e6,
            EventKind(each.kind),
            each.request.gateway,
            each.request.request,
            each.attempt,
            each.decode_try,
            each.number,
            each.size,
            each.step,
            each.text,
        )
        for each in messages
        if each.kind in known
    ]


def _microseconds(seconds: float) -> int:
    return max(0, int(seconds * 1e6))
