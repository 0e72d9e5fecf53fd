"""A request's timeline, from the events of all processes. Pure.

Each process has its own monotonic clock. Its offset to the gateway's has been measured, up to the error of a
message's time; it is then corrected by what is certain: a message arrives after it was sent.

The phases answer what the request waited for. They follow one another without gaps: each event that the
request waited for ends one and begins the next. Chunks and pulls may overlap; they are listed beside them, as
work.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from math import inf

from baton.tracing.recorder import Event, EventKind
from baton.tracing.timeline_parts import (
    GATEWAY,
    Recorded,
    TimedEvent,
    Timeline,
    TimelinePhase,
    TimelineProcess,
)

SHORTEST_SECONDS = 50e-6
"""A shorter phase is counted to the one before it."""
DEPTHS = {"gateway": 0, "tokenizer": 1, "decode": 1, "prefill": 2}
_FROM_TIERS = {EventKind.READ: "read", EventKind.PROMOTED: "promote"}
"""What the request waits for until it is admitted."""
_UPWARDS = (EventKind.TOKENIZED, EventKind.FIRST_TOKEN, EventKind.TOKENS, EventKind.ENDED)
"""Events that a process records before the one that had asked it."""
_ENCODED = (EventKind.ENCODE_ENDED, EventKind.ENDED)
"""An encode node has done what it was asked for, or will not do it."""


def timeline(gateway_events: Sequence[Event], others: Iterable[Recorded], now: float) -> Timeline | None:
    """own: the gateway's events of the request, oldest first; None if its begin is no longer among them. now:
    on the gateway's clock."""
    if not gateway_events or gateway_events[0].kind is not EventKind.RECEIVED:
        return None
    first = gateway_events[0]
    found = Timeline(first.gateway, first.request, first.at)
    for event in gateway_events:
        _summarize(found, event)
    if not found.outcome:
        found.total = max(0.0, now - found.received)
    found.events = _timed(gateway_events, others, found.received)
    path = _Path(found)
    for timed in found.events:
        path.follow(timed)
    found.phases = path.finished()
    found.work = _work(found.events)
    return found


def _summarize(found: Timeline, event: Event) -> None:
    kind = event.kind
    if kind is EventKind.TOKENIZED:
        found.prompt_tokens = event.number
    elif kind is EventKind.FIRST_TOKEN and found.ttft is None:
        found.ttft = event.at - found.received
    elif kind is EventKind.TOKENS:
        found.output_tokens = event.number
    elif kind is EventKind.ENDED:
        found.total = event.at - found.received
        found.output_tokens = event.number
        known = event.text in ("finished", "cancelled")
        found.outcome, found.reason = (event.text, "") if known else ("failed", event.text)


# --- clocks -------------------------------------------------------------------------------------------


def _timed(gateway_events: Sequence[Event], others: Iterable[Recorded], received: float) -> list[TimedEvent]:
    """All events on the gateway's clock, in order."""
    found = [TimedEvent(event.at - received, GATEWAY, event) for event in gateway_events]
    for each in sorted(others, key=lambda recorded: DEPTHS.get(recorded.process.role, 3)):
        offset = _corrected(each, found, received)
        found += [TimedEvent(event.at + offset - received, each.process, event) for event in each.events]
    return sorted(found, key=_order)


def _order(timed: TimedEvent) -> tuple[float, int]:
    """Sort key: of events at one moment, those come first that the others follow from."""
    depth = DEPTHS.get(timed.process.role, 3)
    return timed.at, (10 - depth if timed.event.kind in _UPWARDS else depth)


def _corrected(recorded: Recorded, known: Sequence[TimedEvent], received: float) -> float:
    """The measured offset, within the bounds that messages to and from processes on known clocks set."""
    least, most = -inf, inf
    for event in recorded.events:
        if event.kind is EventKind.RECEIVED:
            asked = _asked(event, recorded.process, known)
            if asked is not None:
                least = max(least, asked + received - event.at)
        elif event.kind in (EventKind.FIRST_TOKEN, EventKind.TOKENIZED):
            answered = _answered(event, recorded.process, known)
            if answered is not None:
                most = min(most, answered + received - event.at)
    if least > most:
        return (least + most) / 2
    return min(max(recorded.offset, least), most)


_ASKED = {"tokenizer": EventKind.TOKENIZING, "encode": EventKind.ENCODE_ASKED}


def _asked(event: Event, process: TimelineProcess, known: Sequence[TimedEvent]) -> float | None:
    """When the process was sent the request, the message that this event is about."""
    kind = _ASKED.get(process.role, EventKind.SENT)
    for timed in known:
        sent = timed.event
        if sent.kind is kind and sent.text == process.address and _same(sent, event):
            return timed.at
    return None


def _answered(event: Event, process: TimelineProcess, known: Sequence[TimedEvent]) -> float | None:
    """When the asking process had got what this event says."""
    asking = "decode" if process.role == "prefill" else "gateway"
    waiting = asking == "gateway"
    for timed in known:
        got = timed.event
        if timed.process.role != asking or got.attempt != event.attempt:
            continue
        if asking == "decode" and got.kind in (EventKind.SENT, EventKind.RETRIED):
            waiting = got.kind is EventKind.SENT and got.decode_try == event.decode_try
        elif got.kind is event.kind and waiting:
            return timed.at
    return None


# --- phases -------------------------------------------------------------------------------------------


class _Path:
    """Follows the request through the events of those that it waited for."""

    def __init__(self, found: Timeline) -> None:
        self._found = found
        self._phases: list[TimelinePhase] = []
        self._attempt = -1
        self._decode = self._prefill = TimelineProcess("decode")
        self._try = -1
        self._chunks = 0
        """Launched and not retired, where the prompt is computed."""
        self._first = self._token = self._running = False
        """The attempt's first token is at the gateway, at the decode node; the request has rows there."""
        self._images = 0
        """That are fetched, where the prompt is computed; 0: none are waited for."""
        self._encoding: set[tuple[TimelineProcess, int]] = set()
        """Images that are being encoded: node, and the image's number there."""
        self._recorded = {(p.process, p.event.attempt) for p in found.events if p.process.role == "decode"}

    def finished(self) -> list[TimelinePhase]:
        if self._phases and self._found.outcome:
            self._phases[-1].end = self._found.total
        return self._phases

    def follow(self, timed: TimedEvent) -> None:
        event, role = timed.event, timed.process.role
        if role == "gateway":
            self._at_gateway(timed.at, event)
        elif role == "decode" and timed.process == self._decode and event.attempt == self._attempt:
            self._at_decode(timed.at, event)
        elif role == "prefill" and self._computes(timed):
            self._at_prefill(timed.at, event)
        elif role == "encode" and self._images and event.attempt == self._attempt:
            self._at_encode(timed)

    def _computes(self, timed: TimedEvent) -> bool:
        """Whether the prefill node computes what the request waits for."""
        name = timed.event.attempt, timed.event.decode_try
        return not self._token and timed.process == self._prefill and name == (self._attempt, self._try)

    def _begin(self, at: float, name: str, process: TimelineProcess, detail: str = "") -> None:
        """The phase before ends."""
        found = self._found
        at = max(at, self._phases[-1].start if self._phases else 0.0)
        if found.outcome:
            at = min(at, found.total)  # what a process records later, the request did not wait for
        if self._phases:
            last = self._phases[-1]
            last.end = at
            # Phases end where the first token comes: those before it add up to its time.
            border = found.ttft is not None and last.start == found.ttft
            if at - last.start < SHORTEST_SECONDS and not border and len(self._phases) > 1:
                self._phases.pop()
                self._phases[-1].end = at
                last = self._phases[-1]
            if (last.name, last.process, last.detail) == (name, process, detail) and at != found.ttft:
                last.end = None
                return
        self._phases.append(TimelinePhase(name, process, at, detail=detail))

    def _at_gateway(self, at: float, event: Event) -> None:
        kind = event.kind
        if kind is EventKind.RECEIVED:
            self._begin(at, "admit", GATEWAY)
        elif kind is EventKind.TOKENIZING:
            self._begin(at, "tokenize", TimelineProcess("tokenizer", event.text))
        elif kind is EventKind.TOKENIZED:
            self._begin(at, "route", GATEWAY)
        elif kind is EventKind.SENT:
            self._attempt, self._decode = event.attempt, TimelineProcess("decode", event.text)
            self._first = self._token = self._running = False
            self._chunks, self._try = 0, -1
            known = (self._decode, self._attempt) in self._recorded
            self._begin(at, "send" if known else "unknown", self._decode)
        elif kind is EventKind.FIRST_TOKEN:
            self._first = True
            known = (self._decode, self._attempt) in self._recorded
            self._begin(at, "decode" if self._running or not known else "pull", self._decode)
        elif kind in (EventKind.RETRIED, EventKind.RESUMED):
            self._attempt = -1
            self._begin(at, "resume", GATEWAY, event.text)

    def _at_decode(self, at: float, event: Event) -> None:
        kind, here = event.kind, self._decode
        if self._fetches(at, event, here) or self._chunk(at, event, here):
            return
        if kind in (EventKind.RECEIVED, EventKind.QUEUED, EventKind.ADMITTED):
            self._begin(at, "queue", here)
        elif kind in (EventKind.RETRACTED, EventKind.RETRIED):
            self._running = self._token = False
            self._chunks, self._try = 0, -1
            self._begin(at, "queue", here, event.text or "retracted")
        elif kind is EventKind.SENT:
            self._prefill, self._try, self._chunks = (
                TimelineProcess("prefill", event.text),
                event.decode_try,
                0,
            )
            self._begin(at, "hand-off", here)
        elif kind in _FROM_TIERS:
            self._begin(at, _FROM_TIERS[kind], here, f"{event.number} tokens")
        elif event.decode_try != self._try and self._borrows(at, event, here):
            pass
        elif kind is EventKind.FIRST_TOKEN:
            self._token = True
            self._begin(at, "deliver", here)
        elif kind is EventKind.RUNNING:
            self._running = self._token = True
            if self._first:
                self._begin(at, "decode", here)
        elif kind is EventKind.TOKENS:
            self._count(event)
        elif kind is EventKind.ENDED:
            self._count(event)
            self._begin(at, "deliver", here)

    def _count(self, event: Event) -> None:
        """How many tokens a step of a sequence gave, where some had been guessed."""
        last = self._phases[-1]
        if last.name == "decode" and 0 < event.size < event.number:
            last.detail = f"{event.number / (event.number - event.size):.2f} tokens a step"

    def _at_prefill(self, at: float, event: Event) -> None:
        kind, here = event.kind, self._prefill
        if self._fetches(at, event, here) or self._chunk(at, event, here):
            return
        if kind in (EventKind.RECEIVED, EventKind.QUEUED, EventKind.ADMITTED, EventKind.RETRACTED):
            self._chunks = 0
            self._begin(at, "queue", here)
        elif kind in _FROM_TIERS:
            self._begin(at, _FROM_TIERS[kind], here, f"{event.number} tokens")
        elif kind is EventKind.FIRST_TOKEN:
            self._begin(at, "hand-off", self._decode)
        else:
            self._borrows(at, event, here)

    def _borrows(self, at: float, event: Event, here: TimelineProcess) -> bool:
        """Before a prompt is admitted where it is computed, pages of it may come from another cache."""
        if event.kind is EventKind.PULL_BEGUN:
            self._begin(at, "pull", here, f"cached pages from {event.text}")
        elif event.kind is EventKind.PULL_ENDED:
            self._begin(at, "queue", here)
        return event.kind in (EventKind.PULL_BEGUN, EventKind.PULL_ENDED)

    def _fetches(self, at: float, event: Event, here: TimelineProcess) -> bool:
        """Before a prompt is admitted where it is computed, contents of its images may come."""
        if event.kind is EventKind.IMAGES_BEGUN:
            self._images, self._encoding = event.number, set()
            self._begin(at, "pull images", here, f"{event.number} images")
        elif event.kind is EventKind.IMAGES_ENDED:
            self._images = 0
            self._begin(at, "queue", here)
        return event.kind in (EventKind.IMAGES_BEGUN, EventKind.IMAGES_ENDED, EventKind.ENCODE_ASKED)

    def _at_encode(self, timed: TimedEvent) -> None:
        """While any of the images is not encoded, that is what the request waits for."""
        kind, image = timed.event.kind, (timed.process, timed.event.step)
        if kind is EventKind.RECEIVED:
            self._encoding.add(image)
            if len(self._encoding) == 1:
                self._begin(timed.at, "encode", timed.process)
        elif kind in _ENCODED and image in self._encoding:
            self._encoding.remove(image)
            if not self._encoding:
                here = self._prefill if self._try >= 0 else self._decode
                self._begin(timed.at, "pull images", here, f"{self._images} images")

    def _chunk(self, at: float, event: Event, here: TimelineProcess) -> bool:
        """With overlap the next chunk is launched before the one before it has retired. Between chunks the
        prompt waits for others."""
        if event.kind not in (EventKind.CHUNK_BEGUN, EventKind.CHUNK_ENDED):
            return False
        begins = event.kind is EventKind.CHUNK_BEGUN
        self._chunks = max(0, self._chunks + (1 if begins else -1))
        if not self._token or not self._running:
            if not begins and event.number:
                self._encoded_in_place(at, event.number / 1e6)
            self._begin(at, "prefill" if self._chunks else "queue", here)
        return True

    def _encoded_in_place(self, at: float, seconds: float) -> None:
        """A step's first part was that, now that it has ended."""
        last = self._phases[-1]
        if last.name == "prefill":
            end = min(at, last.start + seconds)
            self._phases.insert(-1, TimelinePhase("encode", last.process, last.start, end))
            last.start = end


_WORK = {
    EventKind.CHUNK_BEGUN: ("chunk", EventKind.CHUNK_ENDED),
    EventKind.PULL_BEGUN: ("pull", EventKind.PULL_ENDED),
    EventKind.TOKENIZING: ("tokenize", EventKind.TOKENIZED),
    EventKind.IMAGES_BEGUN: ("pull images", EventKind.IMAGES_ENDED),
    EventKind.ENCODE_BEGUN: ("encode", EventKind.ENCODE_ENDED),
}
_BY_STEP = (EventKind.CHUNK_ENDED, EventKind.ENCODE_ENDED)
"""Ends of work of which one process may have several for a request at a time."""


def _work(events: Iterable[TimedEvent]) -> list[TimelinePhase]:
    """Pairs of begin and end in one process."""
    found: list[TimelinePhase] = []
    running: list[tuple[Event, TimelinePhase]] = []
    for timed in events:
        event, process = timed.event, timed.process
        if process is GATEWAY:
            continue
        if event.kind in _WORK:
            phase = TimelinePhase(_WORK[event.kind][0], process, timed.at, detail=_detail(event))
            found.append(phase)
            running.append((event, phase))
            continue
        for begun, phase in list(running):
            if phase.process == process and _ends(event, begun, process):
                running.remove((begun, phase))
                phase.end = timed.at
                phase.detail = _detail(event) or phase.detail
    return found


def _ends(event: Event, begun: Event, process: TimelineProcess) -> bool:
    """Whether work that `begun` began has ended with `event`."""
    if event.kind is EventKind.ENDED:  # the process says nothing more of it
        if process.role == "encode":
            return begun.step == event.step
        return begun.attempt == event.attempt and (process.role != "prefill" or _same(begun, event))
    if event.kind is not _WORK[begun.kind][1] or not _same(begun, event):
        return False
    return event.kind not in _BY_STEP or event.step == begun.step


def _same(one: Event, other: Event) -> bool:
    return (one.attempt, one.decode_try) == (other.attempt, other.decode_try)


def _detail(event: Event) -> str:
    if event.kind is EventKind.CHUNK_BEGUN:
        return f"step {event.step}, {event.number} tokens"
    if event.kind is EventKind.TOKENIZED:
        return f"{event.number} tokens"
    if event.kind is EventKind.PULL_BEGUN:
        return f"{event.number} pages from {event.text}"
    if event.kind is EventKind.IMAGES_BEGUN:
        return f"{event.number} images"
    if event.kind is EventKind.ENCODE_BEGUN:
        return f"{event.number} tokens, in a batch of {event.size}"
    if event.kind is EventKind.PULL_ENDED:
        return f"{event.number} pages, {event.size / 2**20:.1f} MiB, {event.text}"
    return ""
