"""When a stream over HTTP begins, of each API: as soon as a decode node has admitted its request, or after
some seconds; and what comes while it is silent."""

from __future__ import annotations

import asyncio
import json
import time

import httpx
import pytest
from gateway_rig import gateway
from scripted_decode import ScriptedDecode, silent

from baton.api import openai_answers
from baton.rpc.errors import exhausted, internal, invalid_field
from baton.v1 import inference_pb2

USER = [{"role": "user", "content": "Hi"}]
BODIES = {
    "chat/completions": {"messages": USER},
    "completions": {"prompt": "Hi"},
    "messages": {"messages": USER, "max_tokens": 9},
    "responses": {"input": "Hi"},
}
BEGINNINGS = {
    "chat/completions": 'data: {"id":',
    "completions": ": ping",
    "messages": "event: message_start",
    "responses": "event: response.created",
}
PINGS = dict.fromkeys(BODIES, ": ping") | {"messages": "event: ping"}


def ask(rig, path, **more):
    body = {"model": "scripted", "stream": True, **BODIES[path], **more}
    http = httpx.AsyncClient(trust_env=False, timeout=60)
    return http.stream("POST", f"{rig.http}/v1/{path}", json=body)


def failing(error):
    """An admitted request that fails then."""

    async def script(running):
        await running.admitted()
        await asyncio.sleep(0.05)
        await running.failed(error)

    return script


async def admitting(running):
    await running.admitted()
    await silent(running)


async def late(running):
    """An admitted request, silent for a while before its first token and before its second."""
    await running.admitted()
    await asyncio.sleep(0.5)
    await running.prompt()
    await running.tokens([40])
    await asyncio.sleep(0.5)
    await running.tokens([41], finish=2)
    await running.finished()


@pytest.mark.parametrize("path", BODIES)
async def test_a_stream_begins_when_its_request_is_admitted(path):
    async with ScriptedDecode(admitting) as node, gateway(node) as rig:
        asked = time.monotonic()
        async with ask(rig, path) as stream:
            line = await asyncio.wait_for(anext(stream.aiter_lines()), 4)
            assert line.startswith(BEGINNINGS[path]) and stream.headers["x-accel-buffering"] == "no"
            assert time.monotonic() - asked < 4  # of FIRST_BYTE_SECONDS
        await rig.idle()


@pytest.mark.parametrize("path", BODIES)
async def test_a_stream_begins_after_some_seconds_though_its_request_waits(path, monkeypatch):
    monkeypatch.setattr(openai_answers, "FIRST_BYTE_SECONDS", 0.3)
    error = invalid_field("sampling.grammar", ": unclosed", "INVALID_GRAMMAR")

    async def script(running):
        await asyncio.sleep(0.8)
        await running.failed(error)

    async with ScriptedDecode(script) as node, gateway(node) as rig:
        asked = time.monotonic()
        async with ask(rig, path) as stream:
            assert stream.status_code == 200
            assert 0.25 < time.monotonic() - asked < 0.8
            lines = [line async for line in stream.aiter_lines()]
        assert lines[0].startswith(BEGINNINGS[path])
        # The error names the field of the body, as it would have before the stream.
        assert "sampling.grammar" not in "".join(lines) and "unclosed" in "".join(lines)


@pytest.mark.parametrize("path", BODIES)
async def test_a_stream_begins_though_no_node_takes_its_request(path, monkeypatch):
    monkeypatch.setattr(openai_answers, "FIRST_BYTE_SECONDS", 0.2)
    async with ScriptedDecode(silent) as node, gateway(node, resume_wait_seconds=0.6) as rig:
        node.script = failing(internal("x"))
        async with ask(rig, path) as stream:
            await anext(stream.aiter_lines())  # the model is known now
        await node.die()
        await asyncio.sleep(0.1)
        more = {"echo": True} if path == "completions" else {}
        async with ask(rig, path, **more) as stream:
            assert stream.status_code == 200
            text = "".join([line async for line in stream.aiter_lines()])
        assert "no decode node" in text


@pytest.mark.parametrize("path", BODIES)
async def test_what_is_refused_before_has_its_own_status(path):
    async def full(running):
        await running.failed(exhausted("the queue is full", retry_after_ms=2500))

    async with ScriptedDecode(full) as node, gateway(node, resume_wait_seconds=0.2) as rig:
        async with ask(rig, path) as stream:
            assert (stream.status_code, stream.headers["retry-after"]) == (429, "3")
        async with ask(rig, path, temperature=-1.0) as stream:
            assert stream.status_code == 400
        await node.die()
        await asyncio.sleep(0.1)
        async with ask(rig, path) as stream:
            assert stream.status_code == 503 and "retry-after" in stream.headers


@pytest.mark.parametrize("path", BODIES)
async def test_a_failure_after_admission_is_an_event(path):
    async with ScriptedDecode(failing(internal("it broke"))) as node, gateway(node) as rig:
        async with ask(rig, path) as stream:
            assert stream.status_code == 200
            lines = [line async for line in stream.aiter_lines() if line]
        last = json.loads(lines[-1].removeprefix("data: "))
        assert lines[-1].startswith("data: ") and "[DONE]" not in lines
        error = last["response"]["error"] if path == "responses" else last["error"]
        assert error["message"] == "it broke", last
        assert last.get("type") == {"messages": "error", "responses": "response.failed"}.get(path)
        await rig.idle()


@pytest.mark.parametrize("path", BODIES)
async def test_a_silent_stream_gets_pings_between_tokens_too(path):
    async with ScriptedDecode(late) as node, gateway(node, stream_ping_seconds=0.2) as rig:
        async with ask(rig, path) as stream:
            lines = [line async for line in stream.aiter_lines() if line]
        pings = [number for number, line in enumerate(lines) if line == PINGS[path]]
        text = [number for number, line in enumerate(lines) if rig.text([40]) in line or '"text":"I' in line]
        assert 4 <= len(pings) <= 6, lines
        assert any(number > text[0] for number in pings), lines
        if path == "messages":
            assert all(lines[number + 1] == 'data: {"type":"ping"}' for number in pings)


async def test_no_pings_where_none_are_wanted():
    async with (
        ScriptedDecode(late) as node,
        gateway(node, stream_ping_seconds=0.0) as rig,
        ask(rig, "chat/completions") as stream,
    ):
        assert not [line async for line in stream.aiter_lines() if line.startswith(":")]


async def test_all_prompts_must_be_admitted_and_an_echo_comes_with_the_first_output():
    async def first_alone(running):
        if len(node.starts) == 1:
            await running.admitted()
            await silent(running)
        await asyncio.sleep(0.6)
        await running.prompt()
        await running.tokens([40], finish=2)
        await running.finished()

    async with ScriptedDecode(first_alone) as node, gateway(node) as rig:
        asked = time.monotonic()
        async with ask(rig, "completions", prompt=["one", "two"], echo=True) as stream:
            lines = stream.aiter_lines()
            assert await anext(lines) == ": ping" and time.monotonic() - asked > 0.5
            texts = []
            while len(texts) < 3:
                line = await anext(lines)
                if line.startswith("data: "):
                    texts.append(json.loads(line[6:])["choices"][0]["text"])
            assert texts[:2] == ["one", "two"]


async def test_only_http_asks_to_be_told():
    async with ScriptedDecode(admitting) as node, gateway(node) as rig:
        async with ask(rig, "completions") as stream:
            await anext(stream.aiter_lines())
        call = rig.stub.Generate()
        start = inference_pb2.GenerateStart(id="a", text="x")
        await call.write(inference_pb2.GenerateRequest(start=start))
        await call.read()
        assert [start.announce_admission for start in node.starts] == [True, False]
