"""Tools and reasoning in baton.client: what is given arrives, and what comes back is typed."""

from typing import Literal

import pytest
from gateway_rig import gateway
from pydantic import BaseModel, ValidationError
from scripted_decode import STOP, ScriptedDecode, silent
from test_inference import say

from baton.client import AsyncClient, BatonError, Client
from baton.client.chat import chat_prompt
from baton.v1 import tokenizer_pb2

PARSERS = {"tool_parser": "hermes", "reasoning_parser": "think"}


class Weather(BaseModel):
    """How it is there."""

    city: Literal["Oslo", "Paris"]


NOTE = {"name": "note", "description": "Writes.", "parameters": {"type": "object"}, "strict": True}
CALLS = (
    '<tool_call>\n{"name": "Weather", "arguments": {"city": "Oslo"}}\n</tool_call>'
    '<tool_call>\n{"name": "note", "arguments": {"x": 1}}\n</tool_call>'
    '<tool_call>\n{"name": "Weather", "arguments": {"city": "Bonn"}}\n</tool_call>'
)
ASKED = {"messages": "Hi", "tools": [Weather, NOTE | {"strict": False}], "max_tokens": 500}


def check(answer):
    assert (answer.reasoning, answer.text, answer.finish_reason) == ("hm", "One moment.", "tool_calls")
    first, note, wrong = answer.tool_calls
    assert first.parsed == Weather(city="Oslo") and note.parsed == {"x": 1} and first.id != note.id
    with pytest.raises(ValidationError):  # a ValueError
        _ = wrong.parsed
    assert answer.usage.reasoning_tokens > 0


async def test_calls_are_typed_whole_and_streamed():
    async with (
        ScriptedDecode(silent, context=2000) as node,
        gateway(node, **PARSERS) as rig,
        AsyncClient(rig.node.address) as client,
    ):
        await say(rig, node, text=f"<think>hm</think>One moment.{CALLS} ", finish=STOP)
        whole = await client.generate(**ASKED)
        check(whole)
        stream = client.stream(**ASKED)
        deltas = [delta async for delta in stream]
        assert "".join(delta.reasoning for delta in deltas) == "hm"
        assert [call.arguments for delta in deltas for call in delta.tool_calls] == [
            call.arguments for call in whole.tool_calls
        ]
        check(await stream.completion())
        # The conversation goes on with what has come back.
        result = {"role": "tool", "tool_call_id": whole.tool_calls[0].id, "content": "Snow."}
        history = [{"role": "user", "content": "Hi"}, whole.message, result]
        assert (await client.generate(**{**ASKED, "messages": history})).tool_calls
        async with client.session() as session:
            assert (await session.send(**ASKED)).tool_calls


def test_everything_arrives():
    history = [
        {"role": "user", "content": "Hi", "name": "ann"},
        {"role": "assistant", "content": None, "reasoning": "hm", "tool_calls": []},
        {"role": "tool", "tool_call_id": "c1", "content": "Snow."},
    ]
    more = {"parallel_tool_calls": False, "template_arguments": {"enable_thinking": False}}
    chat = chat_prompt(
        {"messages": history, "tools": [Weather, NOTE], "tool_choice": {"name": "note"}, **more}
    )
    assert [(each.role, each.name, each.tool_call_id, each.reasoning) for each in chat.messages] == [
        ("user", "ann", "", ""),
        ("assistant", "", "", "hm"),
        ("tool", "", "c1", ""),
    ]
    weather, note = chat.tools
    assert (weather.name, weather.description) == ("Weather", "How it is there.")
    assert '"enum": ["Oslo", "Paris"]' in weather.parameters and not weather.HasField("strict")
    assert (note.name, note.description, note.strict) == ("note", "Writes.", True)
    assert chat.tool_choice == tokenizer_pb2.ToolChoice(
        mode=tokenizer_pb2.ToolChoice.MODE_REQUIRED, name="note"
    )
    assert chat.HasField("parallel_tool_calls") and not chat.parallel_tool_calls
    assert not chat.template_arguments["enable_thinking"]


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"type": "json_object"}, 'write grammar={"json_object": True}'),
        ({"type": "json_schema", "json_schema": {"name": "x", "schema": {}}}, "json_schema.schema itself"),
        ({"type": "text"}, "leave it out"),
    ],
)
def test_forms_of_openai_are_refused_with_what_to_write(given, words):
    with Client("127.0.0.1:1") as client, pytest.raises(BatonError) as raised:
        client.generate("x", response_format=given)
    assert raised.value.field == "response_format" and words in raised.value.message


@pytest.mark.parametrize(
    "options, field",
    [
        ({"tools": [NOTE]}, "tools"),
        ({"messages": "Hi", "tool_choice": "note"}, "tool_choice"),
        ({"messages": "Hi", "tools": [NOTE, {"description": "x"}]}, "tools[1]"),
        ({"messages": "Hi", "tools": ["x"]}, "tools[0]"),
        ({"messages": [{"content": "x"}]}, "prompt"),
        ({"messages": [{"role": "assistant", "tool_calls": [{"id": "1"}]}]}, "prompt"),
        ({"messages": "Hi", "response_format": dict}, "response_format"),
        ({"messages": "Hi", "grammar": "x"}, "grammar"),
    ],
)
def test_what_cannot_be_sent_is_named(options, field):
    prompt = None if "messages" in options else "x"
    with Client("127.0.0.1:1") as client, pytest.raises(BatonError) as raised:
        client.generate(prompt, **options)
    assert raised.value.field == field
