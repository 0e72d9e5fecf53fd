"""What the gateway asks other processes about its requests."""

from __future__ import annotations

import asyncio
import itertools

import grpc.aio
import pytest

from baton.api.page.requests import SHOWN, Requests
from baton.gateway import traces as module
from baton.gateway.traces import Traces
from baton.tracing.recorder import EventKind, Recorder
from baton.v1 import node_pb2_grpc, trace_pb2

GATEWAY = 7


class Slow(node_pb2_grpc.NodeServicer):
    async def Recent(self, request, context):
        await asyncio.sleep(0.05)
        return trace_pb2.RecentEvents(incarnation=1)


def record(recorder: Recorder, number: int, *kinds: EventKind, text: str = "") -> None:
    for kind in kinds:
        recorder.add(kind, GATEWAY, number, text=text)


async def test_connections_are_closed_only_when_nobody_waits_for_them(monkeypatch):
    monkeypatch.setattr(module, "MAX_PEERS", 1)
    server = grpc.aio.server()
    node_pb2_grpc.add_NodeServicer_to_server(Slow(), server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    recorder = Recorder()
    for number, address in enumerate(("one", "two", "three")):
        record(recorder, number, EventKind.RECEIVED)
        record(recorder, number, EventKind.SENT, text=address)
    traces = Traces(GATEWAY, recorder, lambda address: grpc.aio.insecure_channel(f"127.0.0.1:{port}"))
    names = [(GATEWAY, number) for number in range(3)]
    found = await asyncio.gather(*(traces.timelines([name]) for name in names))
    assert [missing for _, missing in found] == [[], [], []]
    assert len(traces._peers) == 1
    await traces.close()
    await server.stop(None)


def test_the_latest_and_the_slowest():
    recorder = Recorder(8, iter(map(float, range(100))).__next__)
    traces = Traces(GATEWAY, recorder, lambda address: pytest.fail(address))
    record(recorder, 1, EventKind.RECEIVED)
    record(recorder, 2, EventKind.RECEIVED, EventKind.TOKENS, EventKind.ENDED)
    record(recorder, 3, EventKind.RECEIVED, EventKind.ENDED)
    record(recorder, 4, EventKind.RECEIVED)
    assert [number for _, number in traces.recent(3)] == [4, 3, 2]
    assert [number for _, number in traces.recent(1, slowest=True)] == [1], "the first still runs"
    record(recorder, 5, EventKind.RECEIVED, EventKind.ENDED)  # the begin of the first is forgotten
    assert [number for _, number in traces.recent(9)] == [5, 4, 3, 2]


async def test_a_page_that_was_closed_meanwhile_shows_what_is_now():
    recorder = Recorder()
    traces = Traces(GATEWAY, recorder, lambda address: pytest.fail(address))
    requests = Requests(traces, recorder)

    async def rows() -> dict[str, str]:
        await requests.refresh()
        return {row["id"].split("-")[1]: row["outcome"] for row in requests.rows(whole=True)}

    requests.begin()
    record(recorder, 1, EventKind.RECEIVED)
    assert await rows() == {"1": ""}
    record(recorder, 1, EventKind.ENDED, text="finished")  # no page is open
    recorder.clock = map(float, itertools.count(10**9)).__next__  # long after that one opens
    record(recorder, 2, EventKind.RECEIVED)
    requests.begin()
    assert await rows() == {"1": "finished", "2": ""}
    for number in range(3, 3 + SHOWN):
        record(recorder, number, EventKind.RECEIVED)
    assert set(await rows()) == {str(number) for number in range(3, 3 + SHOWN)}
