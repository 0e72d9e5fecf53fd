"""Optional fields of answers: absent or empty without a value, null only where the reference says so."""

from __future__ import annotations

import json

import httpx
import pytest
from gateway_rig import gateway
from scripted_decode import STOP, ScriptedDecode, silent
from test_inference import say
from test_messages_api import ASK, CALL, PARSERS, TOOL

CHAT = {"model": "scripted", "messages": ASK["messages"], "stream_options": {"include_usage": True}}
FUNCTION = {"type": "function", "function": {"name": "weather", "parameters": TOOL["input_schema"]}}
RESPONSE = {"error", "incomplete_details", "instructions", "max_output_tokens", "previous_response_id"}
RESPONSE |= {"usage", "user", "completed_at", "max_tool_calls", "safety_identifier", "prompt_cache_key"}
RESPONSE |= {"reasoning.effort", "reasoning.summary", "tools.description", "tools.strict"}
MESSAGE = {"stop_reason", "stop_sequence", "stop_details", "container", "usage.cache_creation"}
MESSAGE |= {"usage.inference_geo", "usage.server_tool_use"}
CHOICE = {"choices.logprobs", "choices.finish_reason", "choices.stop_reason"}
"""stop_reason: vLLM's, whose server sends null."""
CASES = {
    "chat/completions": (
        CHAT | {"tools": [FUNCTION]},
        {*CHOICE, "usage", "choices.message.refusal", "choices.message.content", "choices.delta.content"},
    ),
    "completions": ({"model": "scripted", "prompt": "x", "max_tokens": 99}, {*CHOICE}),
    "messages": (
        ASK | {"tools": [TOOL]},
        {*MESSAGE, *(f"message.{name}" for name in MESSAGE), "delta.stop_sequence"},
    ),
    "responses": (
        {"model": "scripted", "input": "Hi", "tools": [{"type": "function", "name": "weather"}]},
        {*RESPONSE, "tools.parameters", *(f"response.{name}" for name in RESPONSE | {"tools.parameters"})},
    ),
}


def nulls(value, path=()):
    """Paths of the nulls in an answer, without the indices of lists."""
    if value is None:
        yield ".".join(path)
    for key, each in value.items() if isinstance(value, dict) else ():
        yield from nulls(each, (*path, key))
    for each in value if isinstance(value, list) else ():
        yield from nulls(each, path)


async def answers(rig, path, body, stream):
    body = {**body, "stream": stream}
    if not stream:
        body.pop("stream_options", None)
    async with httpx.AsyncClient(trust_env=False, timeout=60) as http:
        answer = await http.post(f"{rig.http}/v1/{path}", json=body)
    assert answer.status_code == 200, answer.text
    if not stream:
        return [answer.json()]
    lines = [line.removeprefix("data: ") for line in answer.text.split("\n") if line.startswith("data: ")]
    return [json.loads(line) for line in lines if line != "[DONE]"]


@pytest.mark.parametrize("path", CASES)
async def test_nulls_are_those_of_the_reference(path):
    body, allowed = CASES[path]
    async with ScriptedDecode(silent, context=2000) as node, gateway(node, **PARSERS) as rig:
        for text in "Hello there.", f"<think>hm</think>Well.{CALL} ", f"{CALL} ":
            await say(rig, node, text=text, finish=STOP)
            for stream in False, True:
                for answer in await answers(rig, path, body, stream):
                    assert set(nulls(answer)) <= allowed, answer


async def test_a_text_of_messages_has_no_citations_and_says_so_by_an_empty_list():
    async with ScriptedDecode(silent, context=2000) as node, gateway(node) as rig:
        await say(rig, node, text="Hello there.", finish=STOP)
        (answer,) = await answers(rig, "messages", ASK, False)
        (block,) = answer["content"]
        assert block == {"type": "text", "text": block["text"], "citations": []}
        started = (await answers(rig, "messages", ASK, True))[1]
        assert started["content_block"] == {"type": "text", "text": "", "citations": []}


async def test_a_stream_of_a_tool_call_has_no_text_of_its_own():
    async with ScriptedDecode(silent, context=2000) as node, gateway(node, **PARSERS) as rig:
        await say(rig, node, text=f"{CALL} ", finish=STOP)
        chunks = await answers(rig, "chat/completions", CHAT | {"tools": [FUNCTION]}, True)
        deltas = [choice["delta"] for chunk in chunks for choice in chunk["choices"]]
        assert deltas[0] == {"role": "assistant", "content": None}
        assert all("content" not in delta for delta in deltas[1:])
        (call,) = [call for delta in deltas for call in delta.get("tool_calls", ())]
        assert call["function"]["name"] == "weather"
