"""Chat prompts as templates take them: tools, calls and results; what is wrong is named."""

import json

import pytest
from google.protobuf.struct_pb2 import Struct

from baton.rpc.errors import BatonError
from baton.tokenizer.conversation import MAX_TOOLS, Conversation, read, short_id
from baton.v1.tokenizer_pb2 import ChatMessage, ChatPrompt, Tool, ToolCall, ToolChoice

SCHEMA = {"type": "object", "properties": {"z": {"type": "string"}, "a": {"type": "integer"}}}
WEATHER = Tool(name="get_weather", description="Says the weather.", parameters=json.dumps(SCHEMA))
CALL = ToolCall(id="c1", name="get_weather", arguments='{"z": "Paris"}')
HELLO = ChatMessage(role="user", content="Hello")


def prompt(*messages, **fields):
    return ChatPrompt(messages=messages or [HELLO], **fields)


def test_tools_calls_and_results():
    made = read(
        prompt(
            ChatMessage(role="developer", content="Be brief."),
            ChatMessage(role="user", content="Hello", name="Ann"),
            ChatMessage(role="assistant", tool_calls=[CALL], reasoning="Hm."),
            ChatMessage(role="tool", content="20 C", tool_call_id="c1"),
            tools=[WEATHER, Tool(name="time")],
        ),
        "chat",
    )
    assert [message["role"] for message in made.messages] == ["system", "user", "assistant", "tool"]
    assert made.messages[1]["name"] == "Ann"
    (call,) = made.messages[2]["tool_calls"]
    assert call["function"] == {"name": "get_weather", "arguments": {"z": "Paris"}}
    assert made.messages[2]["reasoning_content"] == "Hm."
    assert made.messages[3]["name"] == "get_weather"  # of the call with this id
    parameters = [tool["function"]["parameters"] for tool in made.tools]
    assert parameters == [SCHEMA, {"type": "object", "properties": {}}]
    assert list(parameters[0]["properties"]) == ["z", "a"]  # the client's order
    text = made.with_text_arguments().messages[2]["tool_calls"][0]["function"]["arguments"]
    assert text == '{"z": "Paris"}'


def test_a_template_may_know_developers():
    (message,) = read(prompt(ChatMessage(role="developer")), "chat", developer=True).messages
    assert message["role"] == "developer"


def test_no_tool_is_shown_when_none_is_to_be_called():
    choice = ToolChoice(mode=ToolChoice.MODE_NONE)
    assert read(prompt(tools=[WEATHER], tool_choice=choice), "chat").tools == ()


def test_arguments_of_the_template():
    given = Struct()
    given.update({"enable_thinking": False, "budget": 5, "share": 0.5, "list": [1, "x"]})
    made = read(prompt(template_arguments=given), "chat").arguments
    assert json.dumps(made, sort_keys=True) == (
        '{"budget": 5, "enable_thinking": false, "list": [1, "x"], "share": 0.5}'
    )


def test_a_template_without_tools_gets_them_as_text():
    made = read(
        prompt(
            ChatMessage(role="system", content="Be brief."),
            ChatMessage(role="assistant", content="Let me see.", tool_calls=[CALL]),
            ChatMessage(role="tool", content="20 C", tool_call_id="c1"),
            tools=[WEATHER],
        ),
        "chat",
    ).without_tools()
    system, call, result = made.messages
    assert not made.tools and system["content"].startswith("Be brief.\n\n# Tools")
    assert json.dumps(SCHEMA) in system["content"]
    said = '{"name": "get_weather", "arguments": {"z": "Paris"}}'
    assert call["content"] == f"Let me see.\n<tool_call>\n{said}\n</tool_call>"
    assert result == {"role": "user", "content": "<tool_response>\n20 C\n</tool_response>"}
    assert Conversation([{"role": "user", "content": "x"}]).without_tools().messages == [
        {"role": "user", "content": "x"}
    ]


REQUIRED = ToolChoice(mode=ToolChoice.MODE_REQUIRED)
WRONG = [
    (ChatPrompt(), "chat.messages"),
    (prompt(ChatMessage(role="wizard")), "chat.messages[0].role"),
    (prompt(ChatMessage(role="user", tool_calls=[CALL])), "chat.messages[0].tool_calls"),
    (prompt(ChatMessage(role="user", tool_call_id="c1")), "chat.messages[0].tool_call_id"),
    (prompt(ChatMessage(role="user", reasoning="Hm.")), "chat.messages[0].reasoning"),
    (
        prompt(ChatMessage(role="assistant", tool_calls=[ToolCall(name="f g")])),
        "chat.messages[0].tool_calls[0].name",
    ),
    (prompt(tools=[Tool(name="")]), "chat.tools[0].name"),
    (prompt(tools=[Tool(name="a" * 129)]), "chat.tools[0].name"),
    (prompt(tools=[Tool(name="f"), WEATHER, Tool(name="f")]), "chat.tools[2].name"),
    (prompt(tools=[Tool(name="f", parameters="5")]), "chat.tools[0].parameters"),
    (prompt(tools=[Tool(name="f", parameters='{"a": NaN}')]), "chat.tools[0].parameters"),
    (prompt(tools=[Tool(name="f", parameters='{"a": "\\ud800"}')]), "chat.tools[0].parameters"),
    (prompt(tools=[Tool(name="f", parameters='{"a":' * 10**5)]), "chat.tools[0].parameters"),
    (prompt(tools=[Tool(name=f"f{i}") for i in range(MAX_TOOLS + 1)]), "chat.tools"),
    (prompt(tool_choice=REQUIRED), "chat.tool_choice"),
    (prompt(tools=[WEATHER], tool_choice=ToolChoice(name="get_weather")), "chat.tool_choice.name"),
    (
        prompt(tools=[WEATHER], tool_choice=ToolChoice(mode=ToolChoice.MODE_REQUIRED, name="x")),
        "chat.tool_choice.name",
    ),
    (
        prompt(tools=[WEATHER], tool_choice=ToolChoice(allowed=["get_weather", "x"])),
        "chat.tool_choice.allowed[1]",
    ),
    (
        prompt(tools=[WEATHER], tool_choice=ToolChoice(mode=ToolChoice.MODE_NONE, allowed=["get_weather"])),
        "chat.tool_choice.allowed",
    ),
]


@pytest.mark.parametrize(("wrong", "field"), WRONG, ids=lambda value: value if isinstance(value, str) else "")
def test_what_is_wrong_is_named(wrong, field):
    with pytest.raises(BatonError) as raised:
        read(wrong, "chat")
    assert raised.value.field == field and raised.value.message.startswith(field)


@pytest.mark.parametrize(
    ("given", "shown"),
    [
        ("", {}),
        ("null", {}),
        ('{"a": 1}', {"a": 1}),
        ('{"a": "', {"raw_arguments": '{"a": "'}),
        ("[1]", {"raw_arguments": "[1]"}),
        ('{"a": NaN}', {"raw_arguments": '{"a": NaN}'}),
        ('{"a":' * 10**5, {"raw_arguments": '{"a":' * 10**5}),
    ],
    ids=lambda value: str(value)[:20],
)
def test_arguments_of_earlier_calls(given, shown):
    call = ToolCall(name="f" * 128, arguments=given)
    message = read(prompt(ChatMessage(role="assistant", tool_calls=[call])), "chat").messages[0]
    assert message["tool_calls"][0]["function"] == {"name": "f" * 128, "arguments": shown}


@pytest.mark.parametrize(
    "name", ["messages", "tools", "add_generation_prompt", "tokenize", "bos_token", "_x"]
)
def test_reserved_variables_of_templates(name):
    given = Struct()
    given.update({name: 1})
    with pytest.raises(BatonError) as raised:
        read(prompt(template_arguments=given), "chat")
    assert raised.value.field == f"chat.template_arguments.{name}"


def test_ids_for_mistral():
    messages = [
        ChatMessage(role="assistant", tool_calls=[CALL]),
        ChatMessage(role="tool", content="20 C", tool_call_id="c1"),
    ]
    call, result = read(prompt(*messages), "chat").with_short_ids().messages
    assert call["tool_calls"][0]["id"] == result["tool_call_id"] == short_id("c1")
    assert short_id("abcDEF123") == "abcDEF123"
    assert len(short_id("call_1")) == 9 and short_id("call_1").isalnum()
    assert short_id("call_1") != short_id("call_2")
