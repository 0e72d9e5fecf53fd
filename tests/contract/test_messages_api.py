"""/v1/messages as Anthropic's clients use it: text, thinking, tools, streams, errors, and counting."""

from __future__ import annotations

import json

import httpx
import pytest
from gateway_rig import gateway, until
from scripted_decode import STOP, ScriptedDecode, endless, saying, silent
from test_inference import say

from baton.rpc.errors import invalid_field

TOOL = {
    "name": "weather",
    "description": "Says how it is there.",
    "input_schema": {"type": "object", "properties": {"city": {"type": "string"}}},
}
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Oslo"}}\n</tool_call>'
PARSERS = {"tool_parser": "hermes", "reasoning_parser": "think"}
FORMAT = {"type": "json_schema", "schema": {"type": "object", "properties": {"x": {"type": "integer"}}}}
ASK = {"model": "scripted", "max_tokens": 100, "messages": [{"role": "user", "content": "Hi"}]}


async def post(rig, body, path="messages", key="none"):
    headers = {"anthropic-version": "2023-06-01", "x-api-key": key}
    async with httpx.AsyncClient(trust_env=False, timeout=60) as http:
        return await http.post(f"{rig.http}/v1/{path}", json=body, headers=headers)


def events_of(answer: httpx.Response) -> list[dict]:
    events = []
    for block in answer.text.strip().split("\n\n"):
        name, data = block.split("\n")
        events.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {events[-1]['type']}"
    return events


async def test_text():
    async with ScriptedDecode(silent) as node, gateway(node) as rig:
        await say(rig, node, text="Hello there.", cached=3, finish=STOP)
        answer = (await post(rig, {**ASK, "system": [{"type": "text", "text": "Be kind."}]})).json()
        assert answer["type"] == "message" and answer["stop_reason"] == "end_turn"
        assert answer["content"][0]["type"] == "text"
        assert answer["usage"]["cache_read_input_tokens"] == 3 and answer["usage"]["input_tokens"] > 0
        counted = (
            await post(rig, {"model": "scripted", "messages": ASK["messages"]}, "messages/count_tokens")
        ).json()
        plain = (await post(rig, ASK)).json()["usage"]
        assert counted == {"input_tokens": plain["input_tokens"] + plain["cache_read_input_tokens"]}
        node.script = saying([40], [41])
        assert (await post(rig, {**ASK, "max_tokens": 2})).json()["stop_reason"] == "max_tokens"
        await say(rig, node, text="one two three", finish=STOP)
        stopped = (await post(rig, {**ASK, "stop_sequences": ["two"]})).json()
        assert (stopped["stop_reason"], stopped["stop_sequence"]) == ("stop_sequence", "two")
        await rig.idle()


async def test_a_call_is_to_be_answered_also_where_a_stop_sequence_follows_it():
    async with ScriptedDecode(silent, context=1024) as node, gateway(node, **PARSERS) as rig:
        await say(rig, node, text=f"{CALL}\none two three", finish=STOP)
        answer = (await post(rig, {**ASK, "tools": [TOOL], "stop_sequences": ["two"]})).json()
        assert [block["type"] for block in answer["content"]] == ["tool_use", "text"]
        assert (answer["stop_reason"], answer["stop_sequence"]) == ("tool_use", None)


async def test_a_tool_that_is_named_is_used_once():
    async with ScriptedDecode(silent, context=1024) as node, gateway(node, **PARSERS) as rig:
        await say(rig, node, text=f"{CALL}\n{CALL}", finish=STOP)
        loose = {**TOOL, "input_schema": {"type": "object", "not": {"required": ["x"]}}}
        for more, count in ({}, 1), ({"disable_parallel_tool_use": False}, 2):
            choice = {"type": "tool", "name": TOOL["name"], **more}
            answer = await post(rig, {**ASK, "tools": [loose], "tool_choice": choice})
            kinds = [block["type"] for block in answer.json()["content"]]
            assert kinds.count("tool_use") == count
            assert answer.headers["x-baton-ignored"] == f"tools.{TOOL['name']}.not"


async def test_thinking_and_tools_whole_and_streamed():
    async with ScriptedDecode(silent, context=2000) as node, gateway(node, **PARSERS) as rig:
        await say(rig, node, text=f"<think>hm</think>Let me see.{CALL} ", finish=STOP)
        asked = {**ASK, "tools": [TOOL], "tool_choice": {"type": "auto", "disable_parallel_tool_use": True}}
        whole = (await post(rig, asked)).json()
        assert [block["type"] for block in whole["content"]] == ["thinking", "text", "tool_use"]
        assert whole["content"][0]["thinking"] == "hm" and whole["stop_reason"] == "tool_use"
        assert whole["content"][2]["input"] == {"city": "Oslo"}
        events = events_of(await post(rig, {**asked, "stream": True}))
        assert events[0]["type"] == "message_start" and events[-1]["type"] == "message_stop"
        assert events[-2]["delta"]["stop_reason"] == "tool_use"
        blocks: dict[int, dict] = {}
        for event in events:
            if event["type"] == "content_block_start":
                blocks[event["index"]] = {**event["content_block"], "json": ""}
            elif event["type"] == "content_block_delta":
                delta = {**event["delta"]}
                kind = delta.pop("type")
                ((name, value),) = delta.items()
                block = blocks[event["index"]]
                if kind == "input_json_delta":
                    block["json"] += value
                else:
                    block[name] += value
        assert sum(event["type"] == "content_block_stop" for event in events) == len(blocks) == 3
        blocks[2]["input"] = json.loads(blocks[2].pop("json"))
        for index, block in enumerate(whole["content"]):
            blocks[index].pop("json", None)
            assert blocks[index] == {**block, **({"id": blocks[index]["id"]} if "id" in block else {})}


async def test_an_agent_sends_back_what_it_got():
    async with ScriptedDecode(silent, context=2000) as node, gateway(node, **PARSERS) as rig:
        await say(rig, node, text=f"<think>hm</think>{CALL} ", finish=STOP)
        first = (await post(rig, {**ASK, "tools": [TOOL]})).json()
        use = next(block for block in first["content"] if block["type"] == "tool_use")
        result = {
            "type": "tool_result",
            "tool_use_id": use["id"],
            "content": [{"type": "text", "text": "Snow."}],
        }
        history = [
            *ASK["messages"],
            {"role": "assistant", "content": first["content"]},
            {"role": "user", "content": [result, {"type": "text", "text": "Well?"}]},
        ]
        await say(rig, node, text="Snow.", finish=STOP)
        second = await post(rig, {**ASK, "tools": [TOOL], "messages": history})
        assert second.json()["content"][0]["text"], second.text
        with_calls = await post(rig, {**ASK, "tools": [TOOL], "messages": history[:2]})
        assert (with_calls.status_code, with_calls.json()["error"]["type"]) == (400, "invalid_request_error")


async def test_an_answer_goes_on_with_the_assistants_last_message():
    async with ScriptedDecode(silent) as node, gateway(node) as rig:
        await say(rig, node, text=" fine.", finish=STOP)
        asked = {
            "model": "scripted",
            "messages": [*ASK["messages"], {"role": "assistant", "content": "I am"}],
        }
        answer = (await post(rig, {**ASK, **asked})).json()
        prompt = list(node.starts[-1].token_ids)
        assert rig.text(prompt).endswith("<|im_start|>assistant\nI am")
        assert answer["content"][0]["text"] == " fine" and answer["role"] == "assistant"
        assert (await post(rig, asked, "messages/count_tokens")).json() == {"input_tokens": len(prompt)}


@pytest.mark.parametrize(
    "fields, word",
    [
        ({"max_tokens": None}, "max_tokens"),
        ({"messages": []}, "messages"),
        ({"temperature": -1.0}, "temperature"),
        ({"mcp_servers": [{"url": "x"}]}, "mcp_servers"),
        ({"messages": [{"role": "user", "content": [{"type": "image"}]}]}, "messages[0].content[0]"),
        ({"messages": [{"role": "user", "content": [{"type": "thinking", "thinking": "x"}]}]}, "assistant"),
        ({"messages": [*ASK["messages"], {"role": "assistant", "content": " "}]}, "no text to go on with"),
        ({"tool_choice": {"type": "tool"}}, "tool_choice.name"),
        ({"tools": [TOOL], "tool_choice": {"type": "tool", "name": "g"}}, "tool_choice.name is 'g'"),
        ({"tools": [TOOL, TOOL]}, "tools[1].name is"),
        ({"stop_sequences": [""]}, "stop_sequences[0] must not be empty"),
        ({"surprise": 1}, "surprise"),
        ({"output_config": {"format": {"type": "json_schema"}}}, "output_config.format.schema"),
        ({"output_config": {"format": FORMAT}, "output_format": FORMAT}, "output_format"),
        ({"output_config": {"effort": "huge"}}, "output_config.effort"),
    ],
)
async def test_errors_have_its_form(fields, word):
    async with ScriptedDecode(silent) as node, gateway(node) as rig:
        answer = await post(rig, {**ASK, **fields})
        error = answer.json()
        assert (answer.status_code, error["type"]) == (400, "error"), answer.text
        assert error["error"]["type"] == "invalid_request_error" and word in error["error"]["message"]
        other = await post(rig, {**ASK, "model": "other"})
        assert (other.status_code, other.json()["error"]["type"]) == (404, "not_found_error")
        assert not node.starts


async def test_counting_refuses_what_a_request_would_be_refused_for():
    async with ScriptedDecode(silent) as node, gateway(node, max_prompt_bytes=100) as rig:
        asked = {"model": "scripted", "messages": ASK["messages"]}
        other = await post(rig, {**asked, "model": "other"}, "messages/count_tokens")
        assert (other.status_code, other.json()["error"]["type"]) == (404, "not_found_error")
        long = {**asked, "messages": [{"role": "user", "content": "word " * 100}]}
        refused = await post(rig, long, "messages/count_tokens")
        assert refused.status_code == 400 and "more than the 100 allowed here" in refused.text
        twice = {**asked, "output_format": FORMAT, "output_config": {"format": FORMAT}}
        refused = await post(rig, twice, "messages/count_tokens")
        assert refused.status_code == 400 and "output_format is another name" in refused.text


async def test_schemas_and_effort_reach_the_model():
    async with ScriptedDecode(saying([40], [0], finish=STOP)) as node, gateway(node) as rig:
        for more in ({"output_format": FORMAT}, {"output_config": {"format": FORMAT, "effort": "low"}}):
            answer = await post(rig, {**ASK, **more, "thinking": {"type": "adaptive"}})
            assert answer.status_code == 200, answer.text
            assert json.loads(node.starts[-1].sampling.grammar.json_schema) == FORMAT["schema"]
        assert set(answer.headers["x-baton-ignored"].split(", ")) == {"output_config.effort", "thinking"}


async def test_a_schema_that_cannot_be_compiled_is_named():
    async def refuse(running):
        await running.failed(invalid_field("sampling.grammar", ": unclosed", "INVALID_GRAMMAR"))

    async with ScriptedDecode(refuse, context=2000) as node, gateway(node, **PARSERS) as rig:
        refused = (await post(rig, {**ASK, "output_format": FORMAT})).json()["error"]
        assert refused == {"type": "invalid_request_error", "message": "output_config.format: unclosed"}
        text = {"format": {"type": "json_schema", "name": "x", "schema": {}}}
        response = await post(rig, {"model": "scripted", "input": "x", "text": text}, "responses")
        assert response.json()["error"]["param"] == "text.format", response.text
        strict = {"tools": [{**TOOL, "strict": True}]}
        refused = (await post(rig, {**ASK, **strict})).json()["error"]
        assert refused == {"type": "invalid_request_error", "message": "tools: unclosed"}
        refused = (await post(rig, {**ASK, **strict, "output_format": FORMAT})).json()["error"]
        assert refused["message"] == "output_config.format or tools: unclosed"
        strict["tool_choice"] = {"type": "any"}  # so that no answer has a form
        refused = (await post(rig, {**ASK, **strict, "output_format": FORMAT})).json()["error"]
        assert refused["message"] == "tools: unclosed"


async def test_keys_and_their_limits_in_its_form(tmp_path):
    (tmp_path / "keys").write_text(f"{'k' * 20} prompt_tokens=5\n")
    (tmp_path / "keys").chmod(0o600)
    async with ScriptedDecode(silent) as node, gateway(node, api_keys=str(tmp_path / "keys")) as rig:
        for path in ("messages", "messages/count_tokens", "messages/nowhere"):
            refused = await post(rig, ASK, path)
            assert refused.status_code == 401, refused.text
            error = refused.json()
            assert (error["type"], error["error"]["type"]) == ("error", "authentication_error")
        asked = {"model": "scripted", "messages": [{"role": "user", "content": "one two three four five"}]}
        long = await post(rig, asked, "messages/count_tokens", key="k" * 20)
        assert long.status_code == 400 and "5 are allowed here" in long.json()["error"]["message"]
        nowhere = await post(rig, asked, "messages/nowhere", key="k" * 20)
        assert (nowhere.status_code, nowhere.json()["error"]["type"]) == (404, "not_found_error")


async def test_what_no_template_shows_is_named():
    result = {"type": "tool_result", "tool_use_id": "a", "content": "x", "is_error": True}
    asked = {"model": "scripted", "messages": [{"role": "user", "content": [result]}]}
    async with ScriptedDecode(silent) as node, gateway(node) as rig:
        counted = await post(rig, asked, "messages/count_tokens")
        assert counted.headers["x-baton-ignored"] == "messages.content.is_error", counted.text


async def test_a_client_that_leaves():
    async with ScriptedDecode(endless, context=200_000) as node, gateway(node) as rig:
        async with (
            httpx.AsyncClient(trust_env=False) as http,
            http.stream("POST", f"{rig.http}/v1/messages", json={**ASK, "stream": True}) as stream,
        ):
            await anext(stream.aiter_lines())
        await until(lambda: node.cancels)
        await rig.idle()
