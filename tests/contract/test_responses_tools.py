"""Tools of /v1/responses beyond plain functions, and histories of sessions begun elsewhere, as Codex's."""

from __future__ import annotations

import json

import pytest
from gateway_rig import gateway
from scripted_decode import ScriptedDecode, silent
from test_responses_api import PARSERS, TOOL, client, script

from baton.api.json_body import parse_body
from baton.api.openai_errors import ApiError
from baton.api.responses_protocol import ResponsesRequest, response_start
from baton.v1 import tokenizer_pb2

WEATHER = {**TOOL, "name": "get_weather"}
MCP = {"type": "namespace", "name": "mcp__weather", "description": "Of a server.", "tools": [WEATHER]}
GRAMMAR = {"type": "grammar", "syntax": "lark", "definition": 'start: "*** Begin Patch"'}
PATCH = {"type": "custom", "name": "apply_patch", "description": "Edits files.", "format": GRAMMAR}


def read(**fields):
    """A body, as the gateway reads it: what the model is given, and the names of what it is not."""
    body = json.dumps({"model": "m", "input": "Hi", **fields}).encode()
    made = parse_body(bytearray(body), ResponsesRequest, lambda asked: response_start(asked, ()))
    return made.made.chat, made


def written(name, arguments):
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


async def answers(rig, node, api, name, arguments, tools):
    """The item of a call, whole and streamed, and the streamed events."""
    await script(rig, node, written(name, arguments))
    asked = {"model": "scripted", "input": "Go", "tools": tools}
    whole = (await api.responses.create(**asked)).output[0].model_dump(exclude_none=True)
    events = [event async for event in await api.responses.create(**asked, stream=True)]
    done = next(event for event in events if event.type == "response.output_item.done")
    streamed = done.item.model_dump(exclude_none=True)
    for item in (whole, streamed):
        item.pop("id"), item.pop("call_id")
    assert whole == streamed
    return whole, events


async def test_calls_go_back_as_their_tools_were_offered():
    async with (
        ScriptedDecode(silent, context=3000) as node,
        gateway(node, **PARSERS) as rig,
        client(rig) as api,
    ):
        tools, city = [MCP, PATCH, TOOL], {"city": "Oslo"}
        item, _ = await answers(rig, node, api, "mcp__weather__get_weather", city, tools)
        expected = {"type": "function_call", "name": "get_weather", "namespace": "mcp__weather"}
        assert item == {**expected, "arguments": json.dumps(city), "status": "completed"}
        item, _ = await answers(rig, node, api, "weather", city, tools)
        assert item["name"] == "weather" and "namespace" not in item
        text = '*** Begin Patch\n*** "é"'
        item, events = await answers(rig, node, api, "apply_patch", {"input": text}, tools)
        expected = {"type": "custom_tool_call", "name": "apply_patch", "input": text}
        assert item == {**expected, "status": "completed"}
        kinds = [event.type for event in events if "custom_tool_call_input" in event.type]
        assert kinds == [f"response.custom_tool_call_input.{part}" for part in ("delta", "done")]
        await rig.idle()


async def test_references_to_items_of_stored_responses():
    async with (
        ScriptedDecode(silent, context=3000) as node,
        gateway(node, **PARSERS) as rig,
        client(rig) as api,
    ):
        await script(rig, node, "Let me see. " + written("get_weather", {"city": "Oslo"}))
        first = await api.responses.create(model="scripted", input="Go", tools=[MCP, WEATHER])
        items = [{"type": "item_reference", "id": item.id} for item in first.output]
        call = next(item for item in first.output if item.type == "function_call")
        result = {"type": "function_call_output", "call_id": call.call_id, "output": "cold"}
        asked = {"model": "scripted", "tools": [WEATHER]}
        again = {**asked, "input": [{"role": "user", "content": "Go"}, *items, result]}
        raw = await api.responses.with_raw_response.create(**again)
        whole = await api.responses.create(**asked, previous_response_id=first.id, input=[result])
        assert raw.parse().usage.input_tokens == whole.usage.input_tokens
        assert "input.item_reference" not in raw.headers.get("x-baton-ignored", "")
        again["input"].append({"type": "item_reference", "id": "msg_of_elsewhere"})
        raw = await api.responses.with_raw_response.create(**again)
        assert "input.item_reference" in raw.headers["x-baton-ignored"]
        await rig.idle()


def test_what_the_model_is_shown():
    tools = [MCP, PATCH, {"type": "web_search"}, {"type": "image_generation", "size": "auto"}]
    inner = {"type": "namespace", "name": "multi_agent__", "tools": [TOOL, {"type": "x y"}]}
    chat, made = read(tools=[*tools, inner], tool_choice={"type": "custom", "name": "apply_patch"})
    assert [tool.name for tool in chat.tools] == [
        "mcp__weather__get_weather",
        "apply_patch",
        "multi_agent__weather",
    ]
    assert json.loads(chat.tools[0].parameters) == WEATHER["parameters"]
    patch = json.loads(chat.tools[1].parameters)
    assert patch["properties"] == {"input": {"type": "string"}} and patch["required"] == ["input"]
    assert "Edits files." in chat.tools[1].description and "Begin Patch" in chat.tools[1].description
    assert chat.tool_choice.name == "apply_patch"
    assert made.dropped == {"web_search", "image_generation", "x_y"}
    assert made.ignored == {"tools.description"}
    regex = {"type": "custom", "name": "n", "format": {**GRAMMAR, "syntax": "regex", "definition": "a+|b"}}
    (tool,) = read(tools=[regex])[0].tools
    assert tool.strict and json.loads(tool.parameters)["properties"]["input"]["pattern"] == "^(?:a+|b)$"


CALL = {"type": "function_call", "call_id": "1", "name": "get_weather", "namespace": "mcp__weather"}
FOUND = {"type": "tool_search_output", "call_id": "4", "status": "completed", "execution": "client"}
HISTORY = [
    {"role": "user", "content": "Go"},
    {"type": "reasoning", "summary": [], "encrypted_content": "x"},
    {"type": "web_search_call", "id": "ws", "status": "completed", "action": {"type": "search"}},
    {**CALL, "arguments": "{}"},
    {"type": "custom_tool_call", "call_id": "2", "name": "apply_patch", "input": "é", "status": "completed"},
    {"type": "local_shell_call", "call_id": "3", "action": {"type": "exec", "command": ["ls"]}},
    {"type": "function_call_output", "call_id": "1", "output": "cold"},
    {"type": "custom_tool_call_output", "call_id": "2", "output": [{"type": "input_text", "text": "done"}]},
    {"type": "local_shell_call_output", "id": "3", "output": "a.py"},
    {"type": "tool_search_call", "call_id": "4", "execution": "client", "arguments": {"query": "x"}},
    {**FOUND, "tools": [MCP]},
    {"type": "additional_tools", "role": "developer", "tools": [{**TOOL, "name": "more"}]},
    {"type": "image_generation_call", "id": "ig", "status": "completed", "result": "aGk="},
    {"type": "item_reference", "id": "msg_1"},
    {"type": "agent_message", "author": "/root/a", "recipient": "/root", "content": "found it"},
]


def test_histories_of_sessions_begun_elsewhere():
    chat, made = read(input=HISTORY, tools=[TOOL])
    said = [(message.role, message.content) for message in chat.messages]
    assert said == [
        ("user", "Go"),
        ("assistant", ""),
        ("tool", "cold"),
        ("tool", "done"),
        ("tool", "a.py"),
        ("user", "Message from /root/a:\nfound it"),
    ]
    calls = [(call.id, call.name, json.loads(call.arguments)) for call in chat.messages[1].tool_calls]
    assert calls == [
        ("1", "mcp__weather__get_weather", {}),
        ("2", "apply_patch", {"input": "é"}),
        ("3", "local_shell", {"type": "exec", "command": ["ls"]}),
    ]
    assert [message.tool_call_id for message in chat.messages[2:5]] == ["1", "2", "3"]
    assert [tool.name for tool in chat.tools] == ["weather", "mcp__weather__get_weather", "more"]
    kinds = ("web_search_call", "tool_search_call", "image_generation_call")
    assert {f"input.{kind}" for kind in kinds} <= made.ignored
    # What comes again in `tools` is offered once.
    assert len(read(input=HISTORY, tools=[TOOL, MCP])[0].tools) == 3


@pytest.mark.parametrize("wrong", [{"type": "telepathy"}, {"type": "custom_tool_call", "name": "x"}])
def test_items_that_nobody_knows_are_refused(wrong):
    with pytest.raises(ApiError) as refused:
        read(input=[wrong])
    assert refused.value.status == 400 and "input[0]" in refused.value.message


def test_a_call_without_the_one_argument_goes_back_as_it_was_written():
    asked = ResponsesRequest.model_validate({"model": "m", "tools": [PATCH]})
    for arguments in ("{}", '{"input": 5}', "[]", "not JSON"):
        call = tokenizer_pb2.ToolCall(id="c", name="apply_patch", arguments=arguments)
        assert asked.offered[0].item(call)["input"] == arguments
