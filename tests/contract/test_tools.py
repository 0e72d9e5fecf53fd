"""Tools and reasoning through HTTP and gRPC: streamed and whole answers are one."""

from contextlib import asynccontextmanager

import pytest
from gateway_rig import Stream, tokenizer
from openai import InternalServerError
from scripted_decode import STOP, saying
from test_openai_api import CHAT, api

from baton.demo import model_path
from baton.gateway.parsed_output import ParsedOutput
from baton.rpc.errors import BatonError
from baton.v1 import common_pb2, tokenizer_pb2

SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}}
TOOLS = [{"type": "function", "function": {"name": "get_weather", "parameters": SCHEMA}}]
CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Zürich"}}\n</tool_call>'
SAID = f"<think>\nLet me see.\n</think>\n\nOne moment.\n{CALL}\n{CALL}"
ASKED = {**CHAT, "tools": TOOLS}


@asynccontextmanager
async def saying_to_its_end(say, **config):
    """A gateway of a model that says this, and then ends its answer."""
    async with api(say=say, context=1024, config=config) as rig:
        rig.decode.script = saying(*([id] for id in rig.ids), [0], finish=STOP, pause=0.001)
        yield rig


def thinking(say):
    return saying_to_its_end(say, reasoning_parser="think")


async def streamed(rig, **body):
    text, reasoning, calls, finish = "", "", {}, None
    async for chunk in await rig.openai.chat.completions.create(**body, stream=True):
        for choice in chunk.choices:
            text += choice.delta.content or ""
            reasoning += getattr(choice.delta, "reasoning_content", None) or ""
            for part in choice.delta.tool_calls or ():
                call = calls.setdefault(part.index, {"id": "", "name": "", "arguments": ""})
                call["id"] += part.id or ""
                call["name"] += part.function.name or ""
                call["arguments"] += part.function.arguments or ""
            finish = choice.finish_reason or finish
    assert list(calls) == list(range(len(calls)))
    return text, reasoning, [(call["name"], call["arguments"]) for call in calls.values()], finish


async def whole(rig, **body):
    answer = await rig.openai.chat.completions.create(**body)
    (choice,) = answer.choices
    calls = [(call.function.name, call.function.arguments) for call in choice.message.tool_calls or ()]
    reasoning = getattr(choice.message, "reasoning_content", "")
    return (choice.message.content or "", reasoning, calls, choice.finish_reason), answer


async def test_calls_and_reasoning_streamed_and_whole():
    async with thinking(SAID) as rig:
        call = ("get_weather", '{"city": "Zürich"}')
        expected = ("One moment.", "Let me see.", [call, call], "tool_calls")
        found, answer = await whole(rig, **ASKED)
        assert found == expected == await streamed(rig, **ASKED)
        details = answer.usage.completion_tokens_details
        reasoned = await rig.encode("<think>\nLet me see.\n</think>")
        assert abs(details.reasoning_tokens - len(reasoned)) <= 1
        ids = {call.id for call in answer.choices[0].message.tool_calls}
        assert len(ids) == 2
        text = f"One moment.\n{CALL}\n{CALL}"
        assert (await whole(rig, **CHAT))[0] == (text, "Let me see.", [], "stop")  # without tools
        assert (await whole(rig, **ASKED, tool_choice="none"))[0] == (text, "Let me see.", [], "stop")


async def test_a_parser_that_fails_fails_its_request_alone(monkeypatch):
    """Other requests share the connection that its tokens came by."""
    async with thinking(SAID) as rig:
        with monkeypatch.context() as patch:
            patch.setattr(ParsedOutput, "add", lambda *_args, **_more: 1 / 0)
            with pytest.raises(InternalServerError, match="ZeroDivisionError"):
                await rig.openai.chat.completions.create(**ASKED)
        assert (await rig.openai.chat.completions.create(**ASKED)).choices[0].message.tool_calls


async def test_one_call_at_most():
    async with thinking(SAID) as rig:
        asked = {**ASKED, "parallel_tool_calls": False}
        call = ("get_weather", '{"city": "Zürich"}')
        assert (await whole(rig, **asked))[0] == ("One moment.", "Let me see.", [call], "tool_calls")
        assert (await streamed(rig, **asked)) == ("One moment.", "Let me see.", [call], "tool_calls")
        await rig.idle()


async def test_a_function_that_is_named_is_called_once():
    async with thinking(SAID) as rig:
        call = ("get_weather", '{"city": "Zürich"}')
        named = {**ASKED, "tool_choice": {"type": "function", "function": {"name": "get_weather"}}}
        for more, count in ({}, 1), ({"parallel_tool_calls": False}, 1), ({"parallel_tool_calls": True}, 2):
            assert (await whole(rig, **named, **more))[0][2] == [call] * count
            assert (await streamed(rig, **named, **more))[2] == [call] * count
            most = rig.decode.starts[-1].sampling.grammar.lark.count("{0,15}")
            assert (most > 0) == (count > 1)
        await rig.idle()


async def test_allowed_tools_are_the_only_ones_that_are_called():
    async with thinking(SAID) as rig:
        other = {"type": "function", "function": {"name": "a" * 128}}
        asked = {**CHAT, "tools": [*TOOLS, other]}

        def allowed(mode, name):
            tools = [{"type": "function", "function": {"name": name}}]
            return {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": tools}}

        for mode in "auto", "required":
            found, _ = await whole(rig, **asked, tool_choice=allowed(mode, "get_weather"))
            assert found[0] == "One moment." and len(found[2]) == 2
            lark = rig.decode.starts[-1].sampling.grammar.lark
            assert "get_weather" in lark and "aaa" not in lark
            found, _ = await whole(rig, **asked, tool_choice=allowed(mode, "a" * 128))
            assert CALL in found[0] and not found[2]
        tokens = rig.decode.starts[-1].token_ids
        await whole(rig, **asked)
        assert rig.decode.starts[-1].token_ids == tokens  # both tools are shown to the model
        for wrong, param in (
            (allowed("auto", "g"), "tool_choice.allowed_tools.tools[0]"),
            (allowed("sometimes", "get_weather"), "tool_choice.allowed_tools.mode"),
            (
                {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": []}},
                "allowed_tools.tools",
            ),
        ):
            response = await rig.plain.post("/v1/chat/completions", json={**asked, "tool_choice": wrong})
            assert response.status_code == 400 and param in response.json()["error"]["param"], response.text


async def test_what_a_call_is_not_held_to_is_named():
    schema = {"type": "object", "properties": {"city": {"type": "array", "uniqueItems": True}}}
    loose = {"type": "function", "function": {"name": "get_weather", "parameters": schema}}
    history = [
        *CHAT["messages"],
        {"role": "assistant", "tool_calls": [{"id": "c", "function": {"name": "f", "arguments": '{"a": "'}}]},
        {"role": "tool", "tool_call_id": "c", "content": "x"},
    ]
    async with thinking(SAID) as rig:
        asked = {**CHAT, "messages": history, "tools": [loose]}
        arguments = "messages.tool_calls.function.arguments"
        for choice, more in (("auto", ""), ("required", ", tools.get_weather.uniqueItems")):
            response = await rig.plain.post("/v1/chat/completions", json={**asked, "tool_choice": choice})
            assert response.status_code == 200, response.text
            assert response.headers["x-baton-ignored"] == arguments + more
        assert '"type":"array"' in rig.decode.starts[-1].sampling.grammar.lark
        loose["function"]["strict"] = True
        for choice in "auto", "required":
            response = await rig.plain.post("/v1/chat/completions", json={**asked, "tool_choice": choice})
            error = response.json()["error"]
            assert (response.status_code, error["param"]) == (400, "tools")
            assert "get_weather: properties.city.uniqueItems" in error["message"]


async def test_over_grpc():
    async with thinking(SAID) as rig:
        tool = tokenizer_pb2.Tool(name="get_weather")
        messages = [tokenizer_pb2.ChatMessage(role="user", content="Hello")]
        chat = tokenizer_pb2.ChatPrompt(messages=messages, tools=[tool])
        stream = Stream(rig)
        await stream.start(chat=chat)
        events = await stream.until_end()
        assert "".join(event.delta.text for event in events) == "One moment."
        assert "".join(event.delta.reasoning for event in events) == "Let me see."
        calls = [call for event in events for call in event.delta.tool_calls]
        assert [(call.name, call.arguments) for call in calls] == [("get_weather", '{"city": "Zürich"}')] * 2
        assert events[-2].delta.finish_reason == common_pb2.FINISH_REASON_TOOL_CALLS
        assert events[-1].finished.usage.reasoning_tokens > 0
        await stream.start("b", chat=chat, raw_output=True)
        assert "".join(event.delta.text for event in await stream.until_end("b")) == SAID
        chat.tools[0].strict, chat.tool_choice.mode = True, tokenizer_pb2.ToolChoice.MODE_NONE
        await stream.start("c", chat=chat, raw_output=True)
        assert "".join(event.delta.text for event in await stream.until_end("c")) == SAID


async def test_a_model_whose_calls_are_not_known(tmp_path):
    """Its template reads tools, in no form that is known."""
    for name in ("tokenizer.json", "tokenizer_config.json", "config.json"):
        (tmp_path / name).write_bytes((model_path() / name).read_bytes())
    (tmp_path / "chat_template.jinja").write_text(
        "{{ tools }}{% for m in messages %}{{ m.content }}{% endfor %}"
    )
    async with tokenizer(model=str(tmp_path)) as address:
        async with saying_to_its_end("x", tokenizer_address=address) as rig:
            response = await rig.plain.post("/v1/chat/completions", json=ASKED)
            assert (response.status_code, response.json()["error"]["param"]) == (400, "tools")
            assert "--tool-parser" in response.json()["error"]["message"]
            assert (await rig.plain.post("/v1/chat/completions", json=CHAT)).status_code == 200
        how = {"tokenizer_address": address, "tool_parser": "hermes"}
        async with saying_to_its_end(CALL, **how) as rig:
            assert (await whole(rig, **ASKED))[0][3] == "tool_calls"


@pytest.mark.parametrize("name", ["tool_parser", "reasoning_parser"])
async def test_unknown_parsers_are_refused(name):
    with pytest.raises(BatonError, match=f"--{name.replace('_', '-')} 'best' is not known"):
        async with api(config={name: "best"}):
            pass
