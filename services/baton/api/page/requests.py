"""Running and recent requests for the page: bars of phases of the latest ones, and whole timelines.

The gateway's own events are followed as they come. Other processes are asked when a request's first token has
come, when another decode node takes over, and when it has ended.
"""

from __future__ import annotations

import time

from baton.api.openai_fields import Json
from baton.gateway.traces import TraceName, Traces
from baton.tracing.recorder import Event, EventKind, Recorder
from baton.tracing.timeline import timeline
from baton.tracing.timeline_parts import Timeline, TimelinePhase, parse_id

SHOWN = 16
"""The latest ones; where more come within a second, the others are never seen here."""
ASK_AT = (EventKind.FIRST_TOKEN, EventKind.RETRIED, EventKind.RESUMED, EventKind.ENDED)


class Requests:
    """Used on one event loop, while a page is open."""

    def __init__(self, traces: Traces, recorder: Recorder) -> None:
        self._traces = traces
        self._recorder = recorder
        self._seen = 0.0
        """Events up to this time are known."""
        self._new: list[Event] = []
        """The events that `refresh` has not looked at yet."""
        self._events: dict[TraceName, list[Event]] = {}
        """The gateway's own, of the requests shown, oldest request first."""
        self._asked: set[TraceName] = set()
        """The requests whose row holds what other processes know."""
        self._rows: dict[TraceName, Json] = {}
        self._changed: set[TraceName] = set()

    def begin(self) -> None:
        """Starts anew, with the latest requests that are recorded: a page opens, and none was open."""
        self._seen = self._recorder.clock()
        self._events = {name: [] for name in reversed(self._traces.recent(SHOWN))}
        self._new = self._recorder.of(self._events)
        for known in (self._rows, self._asked, self._changed):
            known.clear()

    async def refresh(self) -> None:
        """Follows what has happened since the last call."""
        ask: set[TraceName] = set()
        touched: set[TraceName] = set()
        new, self._new = [*self._new, *self._recorder.since(self._seen)], []
        for event in new:
            self._seen = max(self._seen, event.at)
            name = event.gateway, event.request
            if event.kind is EventKind.RECEIVED:
                self._events[name] = []
            if name not in self._events:
                continue
            self._events[name].append(event)
            if event.kind in ASK_AT:
                ask.add(name)
            elif event.kind is not EventKind.TOKENS:
                touched.add(name)
        for name in list(self._events)[:-SHOWN]:
            del self._events[name]
            self._rows.pop(name, None)
            self._asked.discard(name)
        ask &= self._events.keys()
        now = self._recorder.clock()
        for name in (touched & self._events.keys()) - self._asked - ask:
            self._put(name, timeline(self._events[name], [], now))
        if ask:
            self._asked |= ask
            for each in (await self._traces.timelines(ask))[0]:
                self._put((each.gateway, each.request), each)

    def _put(self, name: TraceName, found: Timeline | None) -> None:
        if found is not None and name in self._events:
            self._rows[name] = row(found, self._recorder.clock())
            self._changed.add(name)

    def rows(self, *, whole: bool) -> list[Json]:
        """Rows of all requests shown, or of those that have changed since `sent`."""
        names = self._rows if whole else self._changed
        return [self._rows[name] for name in names if name in self._rows]

    def sent(self) -> None:
        self._changed.clear()

    async def life(self, id: str) -> Json | None:
        """A request's whole timeline. None: it is not remembered."""
        name = parse_id(id)
        found, missing = await self._traces.timelines([name]) if name is not None else ([], [])
        if not found:
            return None
        (life,) = found
        events = [
            (_short(at), process.role, process.address, event.kind.name.lower(), _words(event))
            for at, process, event in ((each.at, each.process, each.event) for each in life.events)
        ]
        work = [_phase(phase) for phase in life.work]
        return {
            **row(life, self._recorder.clock()),
            "work": work,
            "events": events,
            "missing": missing,
        }


def row(found: Timeline, now: float) -> Json:
    """now: on the recorder's clock."""
    return {
        "id": found.id,
        "at": time.time() - (now - found.received),
        "total": _short(found.total),
        "ttft": None if found.ttft is None else _short(found.ttft),
        "outcome": found.outcome,
        "reason": found.reason,
        "prompt_tokens": found.prompt_tokens,
        "output_tokens": found.output_tokens,
        "phases": [_phase(phase) for phase in found.phases],
    }


def _phase(phase: TimelinePhase) -> tuple[str, str, str, float, float | None, str]:
    end = None if phase.end is None else _short(phase.end)
    return phase.name, phase.process.role, phase.process.address, _short(phase.start), end, phase.detail


def _words(event: Event) -> str:
    numbers = {
        "{}": event.number,
        "{} bytes": event.size,
        "step {}": event.step,
        "attempt {}": event.attempt,
        "try {}": event.decode_try,
    }
    words = [word.format(number) for word, number in numbers.items() if number]
    return ", ".join([*words, event.text] if event.text else words)


def _short(seconds: float) -> float:
    """In microseconds, which is what recorders say."""
    return round(seconds, 6)
