"""Addresses in a file that changes."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

import pytest
from structlog.testing import CapturingLogger

from baton.discovery import address_file
from baton.discovery.finder import Finder
from baton.rpc.errors import BatonError


def test_a_path_that_depends_on_the_current_directory_is_refused():
    with pytest.raises(BatonError, match="file:/PATH") as caught:
        address_file.parse_path("file:decode.nodes", "decode")
    assert caught.value.field == "decode"


async def test_the_finder_follows_a_file_and_keeps_what_it_knows_while_it_cannot_be_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(address_file, "REFRESH_SECONDS", 0.01)
    log = CapturingLogger()
    monkeypatch.setattr(address_file, "_log", log)
    path, changes = tmp_path / "decode.nodes", []
    finder = Finder("decode", ["10.0.0.9:1", f"file:{path}"], None, changes.append)
    assert finder.searches == [f"file:{path}"]
    finder.start()

    async def until(true: Callable[[], bool]) -> None:
        async with asyncio.timeout(10):
            while not true():  # noqa: ASYNC110
                await asyncio.sleep(0.01)

    async def found(*addresses: str) -> None:
        await until(lambda: finder.addresses == sorted(addresses))

    try:
        await until(lambda: len(log.calls) == 1)
        path.write_text("10.0.0.1:1\n\n 10.0.0.2:1 \n")
        await found("10.0.0.1:1", "10.0.0.2:1", "10.0.0.9:1")
        path.write_text("10.0.0.2:1\nnonsense\n")
        await until(lambda: len(log.calls) == 2)
        path.unlink()
        await asyncio.sleep(0.1)
        await found("10.0.0.1:1", "10.0.0.2:1", "10.0.0.9:1")
        assert [call.args for call in log.calls] == [("addresses not read",)] * 2
        path.write_text("10.0.0.2:1")
        await found("10.0.0.2:1", "10.0.0.9:1")
        path.write_text("")
        await found("10.0.0.9:1")
    finally:
        await finder.close()
    assert [(change.joined, change.left) for change in changes][-2:] == [
        ((), ("10.0.0.1:1",)),
        ((), ("10.0.0.2:1",)),
    ]
