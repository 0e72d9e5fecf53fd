"""Names of several nodes."""

from __future__ import annotations

import asyncio
import socket

import pytest
from structlog.testing import CapturingLogger

from baton.discovery import dns
from baton.discovery.finder import Finder
from baton.rpc.errors import BatonError


@pytest.mark.parametrize(
    "text", ["dns:decode", "dns::50071", "dns:decode:", "dns:decode:x", "dns:decode:70000"]
)
def test_a_name_without_host_or_port_is_refused(text):
    with pytest.raises(BatonError, match="dns:HOST:PORT") as caught:
        dns.parse_name(text, "decode")
    assert caught.value.field == "decode"


async def test_a_real_resolver_answers():
    found = await dns.resolve(dns.parse_name("dns:localhost:50071", "decode"))
    assert "127.0.0.1:50071" in found or "[::1]:50071" in found


async def test_the_finder_follows_a_name_and_keeps_what_it_knows_while_none_answers(monkeypatch):
    """The resolver's answers are scripted here; containers and their real DNS are in tests/compose."""
    answers: list[list[str] | OSError] = [
        socket.gaierror(-2, "Name or service not known"),
        ["10.0.0.1:1", "10.0.0.2:1"],
        TimeoutError(),
        ["10.0.0.2:1", "10.0.0.3:1"],
    ]
    asked = asyncio.Event()

    async def resolve(name):
        if not answers:
            asked.set()
            await asyncio.sleep(60)
        answer = answers.pop(0)
        if isinstance(answer, OSError):
            raise answer
        return answer

    monkeypatch.setattr(dns, "resolve", resolve)
    monkeypatch.setattr(dns, "REFRESH_SECONDS", 0.01)
    monkeypatch.setattr(dns, "HOLD_SECONDS", 0.0)
    changes = []
    finder = Finder("decode", ["10.0.0.9:1", "dns:decode:1"], None, changes.append)
    log = CapturingLogger()
    monkeypatch.setattr("baton.discovery.finder._log", log)
    finder.start()
    try:
        await asyncio.wait_for(asked.wait(), 10)
    finally:
        await finder.close()
    # `role` is the process that logs.
    changed = [call.kwargs for call in log.calls if call.args == ("nodes changed",)]
    assert [(line["node_role"], "role" in line) for line in changed] == [("decode", False)] * 2
    assert [(change.joined, change.left) for change in changes] == [
        (("10.0.0.9:1",), ()),
        (("10.0.0.1:1", "10.0.0.2:1"), ()),
        (("10.0.0.3:1",), ("10.0.0.1:1",)),
    ]
    assert finder.addresses == ["10.0.0.2:1", "10.0.0.3:1", "10.0.0.9:1"]
