"""A stream of baton.client that is closed while it waits for another gateway."""

from __future__ import annotations

import grpc.aio
import pytest

from baton.client.async_client import AsyncStream, CallOfStream
from baton.client.messages import Collector, make_start
from baton.client.resuming import Gateways, Resuming
from baton.client.sync_client import Stream


class ClosedInThePause(Resuming):
    """As another thread or task would."""

    close = staticmethod(lambda: None)

    def again(self, error):
        pause = super().again(error)
        self.close()
        return pause


@pytest.fixture
def parts():
    collector = Collector("0", {})
    start = make_start("0", "hello", {})
    return collector, ClosedInThePause(start, collector, None, Gateways(["a:1", "b:1"]))


def test_no_call_is_opened_behind_the_close(parts):
    collector, resuming = parts
    opened = []
    stream = Stream(iter(()), collector, lambda: None, resuming, lambda: opened.append(1))
    resuming.close = stream.close
    assert list(stream) == []
    assert not opened


async def test_nor_by_tasks(parts):
    collector, resuming = parts
    opened = []

    async def read():
        return grpc.aio.EOF

    call = CallOfStream(read, None, lambda: None)
    stream = AsyncStream(call, collector, resuming, lambda: opened.append(1))

    def close():
        collector.ended = True

    resuming.close = close
    assert [delta async for delta in stream] == []
    assert not opened
