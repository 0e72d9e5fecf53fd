"""Timelines made from events."""

from __future__ import annotations

import pytest

from baton.rpc.trace_messages import event_to, events_from
from baton.tracing.recorder import MAX_TEXT, Event, EventKind, Recorder
from baton.tracing.timeline import timeline
from baton.tracing.timeline_parts import Recorded, TimelineProcess, parse_id

DECODE, PREFILL = TimelineProcess("decode", "d:1"), TimelineProcess("prefill", "p:1")
GATEWAY_EVENTS = [
    (10.0, EventKind.RECEIVED, {}),
    (10.1, EventKind.TOKENIZING, {"text": "t:1"}),
    (10.3, EventKind.TOKENIZED, {"number": 40}),
    (10.4, EventKind.SENT, {"text": "d:1"}),
    (12.0, EventKind.FIRST_TOKEN, {}),
    (14.0, EventKind.ENDED, {"number": 9, "text": "finished"}),
]
DECODE_EVENTS = [
    (10.5, EventKind.RECEIVED, {}),
    (10.6, EventKind.ADMITTED, {}),
    (10.6, EventKind.SENT, {"text": "p:1"}),
    (11.2, EventKind.PULL_BEGUN, {"number": 3, "text": "p:1"}),
    (11.9, EventKind.FIRST_TOKEN, {}),
    (12.5, EventKind.PULL_ENDED, {"number": 3, "size": 2**20, "text": "shm"}),
    (12.5, EventKind.RUNNING, {}),
    (13.9, EventKind.ENDED, {"text": "finished"}),
]
PREFILL_EVENTS = [
    (10.8, EventKind.RECEIVED, {}),
    (11.2, EventKind.CHUNK_BEGUN, {"step": 7, "number": 30}),
    (11.5, EventKind.CHUNK_ENDED, {"step": 7}),
    (11.6, EventKind.CHUNK_BEGUN, {"step": 8, "number": 10}),
    (11.7, EventKind.CHUNK_ENDED, {"step": 8}),
    (11.7, EventKind.FIRST_TOKEN, {}),
    (12.6, EventKind.ENDED, {"text": "released"}),
]


def events(rows, shift=0.0, **same):
    return [Event(at + shift, kind, 5, 1, **{**same, **more}) for at, kind, more in rows]


def phases(found):
    return [
        (p.name, p.process.role, round(p.start, 6), None if p.end is None else round(p.end, 6))
        for p in found.phases
    ]


WHOLE = [
    ("admit", "gateway", 0.0, 0.1),
    ("tokenize", "tokenizer", 0.1, 0.3),
    ("route", "gateway", 0.3, 0.4),
    ("send", "decode", 0.4, 0.5),
    ("queue", "decode", 0.5, 0.6),
    ("hand-off", "decode", 0.6, 0.8),
    ("queue", "prefill", 0.8, 1.2),
    ("prefill", "prefill", 1.2, 1.5),
    ("queue", "prefill", 1.5, 1.6),
    ("prefill", "prefill", 1.6, 1.7),
    ("hand-off", "decode", 1.7, 1.9),
    ("deliver", "decode", 1.9, 2.0),
    ("pull", "decode", 2.0, 2.5),
    ("decode", "decode", 2.5, 3.9),
    ("deliver", "decode", 3.9, 4.0),
]


@pytest.mark.parametrize("shift", [0.0, 5.0, -5.0])
@pytest.mark.parametrize("error", [0.0, 0.3, -0.3])
def test_phases_follow_one_another_and_add_up(shift, error):
    """Whatever the clocks are; an error of the measured offset only moves borders between processes."""
    others = [
        Recorded(PREFILL, events(PREFILL_EVENTS, shift), -shift + error),
        Recorded(DECODE, events(DECODE_EVENTS, 2 * shift), -2 * shift + error),
    ]
    found = timeline(events(GATEWAY_EVENTS), others, now=99.0)
    assert (found.ttft, found.total, found.outcome) == (2.0, 4.0, "finished")
    assert (found.prompt_tokens, found.output_tokens) == (40, 9)
    if not error:
        assert phases(found) == WHOLE
    ends = [phase.end for phase in found.phases]
    assert [phase.start for phase in found.phases] == [0.0, *ends[:-1]] and ends[-1] == 4.0
    assert 2.0 in ends
    order = [(p.process.role, p.event.kind) for p in found.events]
    assert order.index(("gateway", EventKind.SENT)) < order.index(("decode", EventKind.RECEIVED))
    assert order.index(("prefill", EventKind.FIRST_TOKEN)) < order.index(("decode", EventKind.FIRST_TOKEN))
    assert sorted((w.name, w.detail, round(w.end - w.start, 6)) for w in found.work) == [
        ("chunk", "step 7, 30 tokens", 0.3),
        ("chunk", "step 8, 10 tokens", 0.1),
        ("pull", "3 pages, 1.0 MiB, shm", 1.3),
    ]


def test_pages_from_another_cache_are_a_phase_where_the_prompt_is_computed():
    pull = [
        (10.9, EventKind.PULL_BEGUN, {"number": 2, "text": "d:2"}),
        (11.1, EventKind.PULL_ENDED, {"number": 2, "text": "shm"}),
    ]
    others = [
        Recorded(DECODE, events(DECODE_EVENTS)),
        Recorded(PREFILL, events(sorted(PREFILL_EVENTS + pull, key=lambda row: row[0]))),
    ]
    found = timeline(events(GATEWAY_EVENTS), others, 20.0)
    (phase,) = (p for p in found.phases if p.name == "pull" and p.process == PREFILL)
    assert (round(phase.start, 6), round(phase.end, 6)) == (0.9, 1.1)
    assert phase.detail == "cached pages from d:2"
    own = [
        (10.5, EventKind.RECEIVED, {}),
        (10.6, EventKind.PULL_BEGUN, {"number": 2, "text": "d:2"}),
        (10.8, EventKind.PULL_ENDED, {"number": 2, "text": "shm"}),
        (10.9, EventKind.ADMITTED, {}),
        (11.0, EventKind.CHUNK_BEGUN, {"step": 1}),
        (11.5, EventKind.CHUNK_ENDED, {"step": 1}),
        (11.9, EventKind.FIRST_TOKEN, {}),
        (11.9, EventKind.RUNNING, {}),
        (13.9, EventKind.ENDED, {"text": "finished"}),
    ]
    local = timeline(events(GATEWAY_EVENTS), [Recorded(DECODE, events(own))], 20.0)
    assert ("pull", "decode", 0.6, 0.8) in phases(local)


def test_pages_from_lower_tiers_are_phases_where_the_prompt_is_computed():
    tiers = [(10.9, EventKind.READ, {"number": 32}), (11.0, EventKind.PROMOTED, {"number": 48})]
    before = [row for row in PREFILL_EVENTS if row[0] < 10.9]
    after = [(11.1, EventKind.ADMITTED, {}), *(row for row in PREFILL_EVENTS if row[0] > 11.1)]
    others = [Recorded(DECODE, events(DECODE_EVENTS)), Recorded(PREFILL, events([*before, *tiers, *after]))]
    found = timeline(events(GATEWAY_EVENTS), others, 20.0)
    waited = [
        (p.name, p.detail, round(p.start, 6), round(p.end, 6)) for p in found.phases if "tokens" in p.detail
    ]
    assert waited == [("read", "32 tokens", 0.9, 1.0), ("promote", "48 tokens", 1.0, 1.1)]
    own = [
        (10.5, EventKind.RECEIVED, {}),
        (10.6, EventKind.PROMOTED, {"number": 16}),
        (10.9, EventKind.ADMITTED, {}),
        (11.0, EventKind.CHUNK_BEGUN, {"step": 1}),
    ]
    local = timeline(events(GATEWAY_EVENTS), [Recorded(DECODE, events(own))], 20.0)
    assert ("promote", "decode", 0.6, 0.9) in phases(local)


ENCODE = [TimelineProcess("encode", address) for address in ("e:1", "e:2")]


def test_images_are_encoded_and_pulled_before_their_prompt_is_computed():
    images = [
        (10.82, EventKind.IMAGES_BEGUN, {"number": 3}),
        *((10.83, EventKind.ENCODE_ASKED, {"number": 9, "text": node}) for node in ("e:1", "e:1", "e:2")),
        (11.1, EventKind.IMAGES_ENDED, {"number": 3}),
    ]
    at_nodes = [
        [
            (10.84, EventKind.RECEIVED, {"step": 4}),
            (10.85, EventKind.RECEIVED, {"step": 5}),
            (10.86, EventKind.ENCODE_ENDED, {"step": 5, "number": 9}),
            (10.87, EventKind.ENDED, {"step": 5, "text": "finished"}),
            (10.88, EventKind.ENCODE_BEGUN, {"step": 4, "number": 9, "size": 7}),
            (10.98, EventKind.ENCODE_ENDED, {"step": 4, "number": 9}),
            (11.05, EventKind.ENDED, {"step": 4, "text": "finished"}),
        ],
        [(10.9, EventKind.RECEIVED, {"step": 1}), (11.0, EventKind.ENDED, {"step": 1, "text": "INTERNAL"})],
    ]
    prefill = [PREFILL_EVENTS[0], *images, *PREFILL_EVENTS[1:]]
    others = [Recorded(DECODE, events(DECODE_EVENTS)), Recorded(PREFILL, events(prefill))]
    others += [Recorded(node, events(rows)) for node, rows in zip(ENCODE, at_nodes, strict=True)]
    found = timeline(events(GATEWAY_EVENTS), others, 20.0)
    waits = [
        ("pull images", "prefill", 0.82, 0.84),
        ("encode", "encode", 0.84, 1.0),
        ("pull images", "prefill", 1.0, 1.1),
        ("queue", "prefill", 1.1, 1.2),
    ]
    assert [each for each in phases(found) if 0.81 < each[2] < 1.2] == waits
    work = [(w.name, w.process.role, w.detail, round(w.end, 6)) for w in found.work if "c" in w.process.role]
    assert ("encode", "encode", "9 tokens, in a batch of 7", 0.98) in work
    assert ("pull images", "prefill", "3 images", 1.1) in [
        (w.name, w.process.role, w.detail, round(w.end, 6)) for w in found.work
    ]
    # A decode node that computes the prompt waits alike, and knows nothing of nodes that have gone.
    own = [
        (10.5, EventKind.RECEIVED, {}),
        *images,
        (11.1, EventKind.ADMITTED, {}),
        (11.2, EventKind.CHUNK_BEGUN, {"step": 1}),
        (11.6, EventKind.CHUNK_ENDED, {"step": 1, "number": 300_000}),
        (11.9, EventKind.FIRST_TOKEN, {}),
    ]
    local = timeline(events(GATEWAY_EVENTS), [Recorded(DECODE, events(own))], 20.0)
    assert ("pull images", "decode", 0.82, 1.1) in phases(local)
    steps = [("encode", "decode", 1.2, 1.5), ("prefill", "decode", 1.5, 1.6)]
    assert [each for each in phases(local) if 1.2 <= each[2] < 1.6] == steps


def test_while_it_runs_the_last_phase_lasts():
    found = timeline(events(GATEWAY_EVENTS[:4]), [Recorded(DECODE, events(DECODE_EVENTS[:2]))], now=11.0)
    assert (found.outcome, found.total, found.ttft) == ("", 1.0, None)
    assert phases(found)[-1] == ("queue", "decode", 0.5, None)


def test_what_a_dead_process_knew_is_missing_and_nothing_else():
    found = timeline(events(GATEWAY_EVENTS), [], now=99.0)
    assert phases(found)[3:] == [
        ("unknown", "decode", 0.4, 2.0),
        ("decode", "decode", 2.0, 4.0),
    ]


def test_a_resume_begins_another_attempt():
    first = events(
        [
            *GATEWAY_EVENTS[:5],
            (12.2, EventKind.RESUMED, {"text": "DECODE_LOST"}),
            (12.4, EventKind.SENT, {"text": "d:2", "attempt": 1}),
            (13.0, EventKind.FIRST_TOKEN, {"attempt": 1}),
            (14.0, EventKind.ENDED, {"text": "CANCELLED_BY_NOBODY"}),
        ]
    )
    second = [
        (12.5, EventKind.RECEIVED, {}),
        (12.6, EventKind.CHUNK_BEGUN, {"step": 1, "number": 9}),
        (12.9, EventKind.CHUNK_ENDED, {"step": 1}),
        (12.9, EventKind.FIRST_TOKEN, {}),
        (12.9, EventKind.RUNNING, {}),
    ]
    others = [
        Recorded(DECODE, events(DECODE_EVENTS)),
        Recorded(TimelineProcess("decode", "d:2"), events(second, attempt=1)),
    ]
    found = timeline(first, others, now=99.0)
    assert (found.outcome, found.reason) == ("failed", "CANCELLED_BY_NOBODY")
    assert phases(found)[-7:] == [
        ("pull", "decode", 2.0, 2.2),
        ("resume", "gateway", 2.2, 2.4),
        ("send", "decode", 2.4, 2.5),
        ("queue", "decode", 2.5, 2.6),
        ("prefill", "decode", 2.6, 2.9),
        ("deliver", "decode", 2.9, 3.0),
        ("decode", "decode", 3.0, 4.0),
    ]


def test_a_request_whose_begin_is_forgotten_has_none():
    assert timeline(events(GATEWAY_EVENTS[1:]), [], now=99.0) is None


def test_names():
    found = timeline(events(GATEWAY_EVENTS), [], now=99.0)
    assert parse_id(found.id) == (5, 1)
    for wrong in ("", "x-1", "5", "0-1", "5-0", "-1", "5-1-1", f"{2**64:x}-1"):
        assert parse_id(wrong) is None, wrong


def test_a_recorder_keeps_the_last_events():
    now = iter(range(100))
    recorder = Recorder(3, lambda: next(now))
    for number in range(5):
        recorder.add(EventKind.TOKENS, 5, number % 2 + 1, number=number)
    assert [event.number for event in recorder.all()] == [2, 3, 4]
    assert [event.number for event in recorder.of([(5, 1)])] == [2, 4]
    recorder.add(EventKind.ENDED, 5, 1, text="x" * 1000)
    assert len(recorder.all()[-1].text) == MAX_TEXT
    silent = Recorder(0)
    silent.add(EventKind.TOKENS, 5, 1)
    assert not silent.all()


def test_events_survive_a_message():
    given = [Event(1.5, kind, 2**64 - 1, 3, 4, 5, 6, 7, 8, "text") for kind in EventKind]
    assert events_from(map(event_to, given)) == given


def test_events_since_a_time():
    times = iter((1.0, 2.0, 2.0, 3.0))
    recorder = Recorder(3, lambda: next(times))
    for number in range(4):
        recorder.add(EventKind.TOKENS, 1, 1, number=number)
    assert [event.number for event in recorder.since(1.0)] == [1, 2, 3], "the ring holds three"
    assert [event.number for event in recorder.since(2.0)] == [3]
    assert recorder.since(3.0) == []


def test_tokens_a_step_where_guesses_were_right():
    """Of 9 tokens 5 were guessed: 4 steps. Without right guesses nothing is said."""
    for right, detail in ((5, "2.25 tokens a step"), (0, "")):
        decode = events(DECODE_EVENTS)
        decode[-1] = decode[-1]._replace(number=9, size=right)
        found = timeline(events(GATEWAY_EVENTS), [Recorded(DECODE, decode)], 20.0)
        (phase,) = [phase for phase in found.phases if phase.name == "decode"]
        assert phase.detail == detail
    running = [*events(DECODE_EVENTS)[:-1], Event(13.0, EventKind.TOKENS, 5, 1, number=16, size=8)]
    found = timeline(events(GATEWAY_EVENTS)[:-1], [Recorded(DECODE, running)], 13.5)
    assert found.phases[-1].detail == "2.00 tokens a step"
