"""Log lines of requests' ends."""

from __future__ import annotations

import asyncio

import pytest
import structlog
from structlog.testing import capture_logs

from baton.gateway import request_log as module
from baton.gateway.request_log import EndedRequest, RequestLog


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
    request_log.add("finished", ending("a"), "")
    request_log.add("failed", ending("b"), "BAD_PEER")
    common = {"prompt_tokens": 10, "output_tokens": 3, "resumed": 1, "seconds": 0.5, "log_level": "info"}
    assert lines == [
        {"event": "finished", "request": "a", **common},
        {"event": "failed", "request": "b", "reason": "BAD_PEER", **common},
    ]


async def test_those_cancelled_in_one_turn_share_one(lines):
    request_log = RequestLog()
    for number in range(3):
        request_log.add("cancelled", ending(f"c{number}", seconds=number), "CANCELLED")
    assert not lines
    await asyncio.sleep(0)
    request_log.add("cancelled", ending("later"), "CANCELLED")
    await asyncio.sleep(0)
    assert [(line["event"], line["request"], line.get("requests")) for line in lines] == [
        ("cancelled", "c0 c1 c2", 3),
        ("cancelled", "later", None),
    ]
    assert (lines[0]["prompt_tokens"], lines[0]["output_tokens"], lines[0]["seconds"]) == (30, 9, 2)
