"""Streams of /v1/responses and /v1/messages go on at another gateway after any of their events."""

import asyncio
import copy
import json
import re

import httpx
import pytest
from gateway_rig import until
from scripted_decode import LENGTH, ScriptedDecode, silent
from test_gateway_lost import KEYS, files, gateways, sse  # noqa: F401 - a fixture
from test_responses_api import CALL, PARSERS, TOOL
from test_resume import speaking

from baton.v1 import decode_pb2

OUTPUT = f"<think>hm — é</think>Let me see.{CALL}{CALL}It is ∀ cold STOP now"
ASK = {"model": "scripted", "stream": True}
USER = [{"role": "user", "content": "Weather?"}]
PARAMETERS = TOOL["parameters"]
BODIES = {
    "responses": {**ASK, "input": USER, "tools": [TOOL], "max_output_tokens": 900},
    "messages": {
        **ASK,
        "messages": USER,
        "tools": [{"name": "weather", "input_schema": PARAMETERS}],
        "max_tokens": 900,
        "stop_sequences": ["STOP"],
    },
}
STEP = 4
"""Tokens more that each broken stream has."""


def going(output, **how):
    """As `speaking`, of a node that says when it has admitted a request: a stream begins at once."""

    async def script(running):
        await running.admitted()
        await speaking([output], **how)(running)

    return script


def merged(events):
    """What they say together: neighbours that add to one text are one; without times and figures."""
    told = []
    for event in copy.deepcopy(events):
        event.pop("sequence_number", None)
        event.pop("usage", None)
        for key in ("created_at", "completed_at", "usage"):
            event.get("response", event.get("message", {})).pop(key, None)
        last = told[-1] if told else {}
        delta = event.get("delta")
        if (
            not event["type"].endswith("delta")
            or event["type"] == "message_delta"
            or {**event, "delta": 0} != {**last, "delta": 0}
        ):
            told.append(event)
        elif isinstance(delta, str):
            last["delta"] += delta
        else:
            (text,) = delta.keys() - {"type"}
            last["delta"][text] += delta[text]
    return told


def renamed(events):
    """The same for every request of the test: with other names for it and its calls."""
    begun = events[0].get("response", events[0].get("message"))["id"].partition("_")[2]
    text = json.dumps(merged(events)).replace(begun, "NAME")
    for number, id in enumerate(dict.fromkeys(re.findall("call_[0-9a-f]{9}", text))):
        text = text.replace(id, f"CALL {number}")
    return json.loads(text)


async def broken(http, rig, path, body, head):
    """The events of a stream until none comes for a while; its ticket."""
    text = ""
    async with http.stream("POST", f"{rig.http}/v1/{path}", json=body, headers=head) as answer:
        pieces = answer.aiter_text()
        try:
            while True:
                text += await asyncio.wait_for(anext(pieces), 0.1)
        except (TimeoutError, StopAsyncIteration):
            pass
        response = httpx.Response(200, text=text.rpartition("\n\n")[0])
        return sse(response), answer.headers["x-baton-resume"]


@pytest.mark.parametrize("path", BODIES)
async def test_a_stream_goes_on_after_any_event(files, path):  # noqa: F811
    body, head = BODIES[path], {"authorization": f"Bearer {KEYS[0]}"}
    async with (
        ScriptedDecode(silent, context=2000) as node,
        gateways(files | PARSERS, [node], [node]) as (one, two),
        httpx.AsyncClient(timeout=60) as http,
    ):
        output = await one.encode(OUTPUT)

        async def ask(rig, **more):
            return await http.post(f"{rig.http}/v1/{path}", json=body, headers=head | more)

        node.script = going(output)
        calm = [event for _, event in sse(await ask(one))]
        assert node.starts[-1].keep_log
        tried = 0
        for known in (*range(1, len(output), STEP), len(output)):
            node.script = going(output, give=(known,), then=silent)
            had, ticket = await broken(http, one, path, body, head)
            node.script = going(output)
            node.log = decode_pb2.DecodeLog()
            end = LENGTH if known == len(output) else 0
            node.log.choices.add(token_ids=output[:known], finish_reason=end)
            for cut in range(tried, len(had)):
                id, last = had[cut]
                answer = await ask(two, **{"x-baton-resume": ticket, "last-event-id": id})
                assert answer.status_code == 200, answer.text
                rest = [event for _, event in sse(answer)]
                both = [event for _, event in had[: cut + 1]] + rest
                assert renamed(both) == renamed(calm), (known, cut, id, last)
                if path == "responses":
                    numbers = [event["sequence_number"] for event in both]
                    assert numbers == list(range(len(both)))
            tried = max(tried, len(had))
        assert tried > 20
        for wrong in (id.partition("/")[0], f"{id}/1", "0.0.0.0.0/x/1"):
            refused = await ask(two, **{"x-baton-resume": ticket, "last-event-id": wrong})
            assert refused.status_code == 400 and "last-event-id" in refused.text, refused.text
        node.log = None
        lost = await ask(two, **{"x-baton-resume": ticket, "last-event-id": id})
        assert "not known any more" in lost.text
        body = body | {"stream": False}
        assert (await ask(two, **{"x-baton-resume": ticket})).status_code == 400
        await one.idle()
        await two.idle()


async def test_the_end_of_a_broken_stream_does_not_end_the_one_that_goes_on(files):  # noqa: F811
    """At the same gateway, which had not noticed that the first is broken."""
    body, head = BODIES["responses"], {"authorization": f"Bearer {KEYS[0]}"}
    async with (
        ScriptedDecode(going((), give=(0,), then=silent), context=2000) as node,
        gateways(files | PARSERS, [node], [node]) as (one, _),
        httpx.AsyncClient(headers=head, timeout=60) as http,
    ):
        url = f"{one.http}/v1/responses"
        async with http.stream("POST", url, json=body) as first:
            ticket = {"x-baton-resume": first.headers["x-baton-resume"]}
            second = asyncio.create_task(http.post(url, json=body, headers=ticket))
            async for line in first.aiter_lines():
                if found := re.search(r"resp_[0-9a-f]+-[0-9]+", line):
                    break
            await until(lambda: len(node.starts) == 2)
        await until(lambda: len(node.cancels) == 1)
        await asyncio.sleep(0.1)  # until the gateway has kept what it keeps of the first
        cancelled = await http.post(f"{url}/{found[0]}/cancel")
        assert cancelled.status_code == 200, cancelled.text
        assert "response.failed" in (await second).text
        assert (await http.get(f"{url}/{found[0]}")).json()["status"] == "cancelled"
