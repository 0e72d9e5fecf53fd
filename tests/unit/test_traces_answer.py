"""Answers of many traces, which take seconds to make, do not stop the gateway."""

import asyncio
import threading

import httpx
from starlette.applications import Starlette

from baton.api import traces_http
from baton.gateway.traces import MAX_TRACES, Traces, answer
from baton.tracing.recorder import EventKind, Recorder
from baton.v1 import trace_pb2


def many():
    recorder = Recorder()
    for request in range(1, MAX_TRACES + 1):
        recorder.add(EventKind.RECEIVED, 7, request, text="http")
        recorder.add(EventKind.FIRST_TOKEN, 7, request)
    return Traces(7, recorder, dial=None)


async def test_others_have_turns():
    turns = 0

    async def others():
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    task = asyncio.create_task(others())
    found = await answer(many(), trace_pb2.GetTracesRequest(limit=MAX_TRACES, gateway_only=True))
    task.cancel()
    assert len(found.traces) == MAX_TRACES and turns >= 2 * MAX_TRACES


async def test_json_is_made_in_a_thread(monkeypatch):
    threads = set()
    convert = traces_http.MessageToDict

    def recorded(*args, **more):
        threads.add(threading.get_ident())
        return convert(*args, **more)

    monkeypatch.setattr(traces_http, "MessageToDict", recorded)
    app = Starlette(routes=[traces_http.traces_route(many())])
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://test") as http:
        found = (await http.get("/traces?limit=3&gateway_only=1")).json()
    assert len(found["traces"]) == 3 and found["missing"] == []
    assert threads and threading.get_ident() not in threads
