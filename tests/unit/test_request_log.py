"""Log lines of requests' ends."""

from __future__ import annotations

import asyncio
import contextlib
from types import SimpleNamespace

import pytest
import structlog
from structlog.testing import capture_logs

from baton.gateway import request_log as module
from baton.gateway.recorded_calls import recorded_call
from baton.gateway.request_log import EndedRequest, RequestLog
from baton.rpc.errors import cancelled, internal, unavailable


def ending(name, seconds=0.5):
    return EndedRequest(name, prompt_tokens=10, output_tokens=3, resumed=1, seconds=seconds)


@pytest.fixture
def lines(monkeypatch):
    """A logger keeps its processors from its first line on: the module's may have written one before. And
    what ran before may have configured that only warnings are written."""
    configured, before = structlog.is_configured(), structlog.get_config()
    structlog.reset_defaults()
    monkeypatch.setattr(module, "_log", structlog.get_logger())
    with capture_logs() as found:
        yield found
    structlog.reset_defaults()
    if configured:  # else a process that a later test runs here would not configure it
        structlog.configure(**before)


async def test_each_that_finishes_or_fails_has_a_line_at_once(lines):
    request_log = RequestLog()
    request_log.add("finished", ending("a"), None)
    request_log.add("failed", ending("b"), internal("a node sent 5", "BAD_PEER"))
    common = {"prompt_tokens": 10, "output_tokens": 3, "resumed": 1, "seconds": 0.5, "log_level": "info"}
    assert lines == [
        {"event": "finished", "request": "a", **common},
        {"event": "failed", "request": "b", "reason": "BAD_PEER", "message": "a node sent 5", **common},
    ]


@pytest.mark.parametrize(
    ("error", "outcome", "reason"),
    [
        (None, "finished", ""),
        (unavailable("later", "STOPPING"), "failed", "STOPPING"),
        (KeyError("unforeseen"), "failed", "INTERNAL"),
        (asyncio.CancelledError(), "cancelled", ""),
    ],
)
def test_a_call_is_recorded_as_it_ends(error, outcome, reason):
    added = []
    gateway = SimpleNamespace(
        incarnation=1,
        next_number=lambda: 2,
        call=lambda _: contextlib.nullcontext(),
        model_name="m",
        request_log=SimpleNamespace(
            add=lambda outcome, _, why: added.append((outcome, why.reason if why is not None else ""))
        ),
    )
    key = SimpleNamespace(name="")
    with contextlib.suppress(BaseException), recorded_call(gateway, key, "tokenize", computes=False):
        if error is not None:
            raise error
    assert added == [(outcome, reason)]


async def test_those_cancelled_in_one_turn_share_one(lines):
    request_log = RequestLog()
    for number in range(3):
        request_log.add("cancelled", ending(f"c{number}", seconds=number), cancelled("gone"))
    assert not lines
    await asyncio.sleep(0)
    request_log.add("cancelled", ending("later"), cancelled("gone"))
    await asyncio.sleep(0)
    assert [(line["event"], line["request"], line.get("requests")) for line in lines] == [
        ("cancelled", "c0 c1 c2", 3),
        ("cancelled", "later", None),
    ]
    assert (lines[0]["prompt_tokens"], lines[0]["output_tokens"], lines[0]["seconds"]) == (30, 9, 2)
