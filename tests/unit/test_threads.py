"""Threads that live as long as their process: what goes wrong in one of them leaves nobody waiting.

The step thread's are in test_step_loop.py, those of the thread that copies pages in test_pull_thread.py.
"""

from __future__ import annotations

import socket
import threading

import pytest
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from baton.grammar.base import GrammarError, GrammarSpec
from baton.grammar.compiler import GrammarCompiler
from baton.tracing.recorder import EventKind, Recorder
from baton.tracing.spans import Spans
from baton.worker.ranks import follower, follower_main
from baton.worker.ranks.channel import Channel
from baton.worker.ranks.followers import EXIT_LOST

PARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


class Panic(BaseException):
    """As libraries in Rust raise it."""


@pytest.fixture
def exits(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The codes with which the process would have ended."""
    codes: list[int] = []
    monkeypatch.setattr("os._exit", codes.append)
    return codes


def test_a_grammar_library_that_panics_while_it_is_loaded_fails_each_grammar() -> None:
    def load() -> None:
        raise Panic("no vocabulary")

    compiler = GrammarCompiler(load)
    for text in ("a", "b"):
        outcome = compiler.submit(GrammarSpec("regex", text)).result(10)
        assert isinstance(outcome, GrammarError) and "no vocabulary" in str(outcome)


def test_spans_that_cannot_be_made_are_lost_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    exporter = InMemorySpanExporter()
    recorder = Recorder()
    recorder.spans = spans = Spans("gateway", "", 1.0, exporter)
    children, failed = spans._children, threading.Event()

    def fail_once(events):
        if not failed.is_set():
            failed.set()
            raise ValueError("not today")
        return children(events)

    monkeypatch.setattr(spans, "_children", fail_once)
    for number in range(2):
        assert recorder.begin_span(7, number, operation="chat", traceparent=PARENT)
        recorder.add(EventKind.RECEIVED, 7, number)
        recorder.add(EventKind.ENDED, 7, number, text="finished")
    spans.close()
    assert failed.is_set() and "chat" in [span.name for span in exporter.get_finished_spans()]


def test_a_host_whose_pages_cannot_be_served_ends(monkeypatch: pytest.MonkeyPatch, exits: list[int]) -> None:
    monkeypatch.setattr(follower, "PAGES_SECONDS", 0.0)
    ours, theirs = socket.socketpair()
    Channel(theirs, 5.0).send_bytes(b"short")
    follower._serve(Channel(ours, 5.0), memoryview(bytearray(64)), 64)
    assert exits == [EXIT_LOST]


def test_a_follower_that_cannot_watch_its_parent_ends(
    monkeypatch: pytest.MonkeyPatch, exits: list[int]
) -> None:
    def fail(parent: int) -> None:
        raise ValueError("filedescriptor out of range in select()")

    monkeypatch.setattr(follower_main, "wait_for_end", fail)
    with pytest.raises(ValueError, match="out of range"):
        follower_main._end_with(1, [])
    assert exits == [EXIT_LOST]
