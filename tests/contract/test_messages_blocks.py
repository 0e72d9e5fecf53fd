"""Content blocks and tools of /v1/messages that a client brings from Anthropic's own servers."""

from __future__ import annotations

import json

import pytest
from gateway_rig import gateway
from scripted_decode import ScriptedDecode, silent
from test_messages_api import ASK, TOOL, post

from baton.api.anthropic_protocol import MessagesRequest, messages_start
from baton.api.json_body import parse_body
from baton.api.openai_errors import ApiError

DOCUMENT = {
    "type": "document",
    "source": {"type": "text", "media_type": "text/plain", "data": "It is cold."},
    "title": "Oslo",
    "context": "Of today.",
    "citations": {"enabled": True},
}
RESULT = {
    "type": "search_result",
    "source": "http://a",
    "title": "A",
    "content": [{"type": "text", "text": "b"}],
}
USE = {"type": "tool_use", "id": "t", "name": "find", "input": {}}
WEB_SEARCH = {"type": "web_search_20250305", "name": "web_search", "max_uses": 5}


def read(messages, **fields):
    """The messages that the model is given, and what was read."""
    body = json.dumps({**ASK, "messages": messages, **fields}).encode()
    made = parse_body(bytearray(body), MessagesRequest, messages_start)
    return [(message.role, message.content) for message in made.made.chat.messages], made


def test_documents_are_texts():
    said, made = read([{"role": "user", "content": [DOCUMENT, {"type": "text", "text": "Where?"}]}])
    assert said == [("user", "Oslo\nOf today.\nIt is cold.\n\nWhere?")]
    assert made.ignored == {"messages.content.citations"}
    content = {
        "type": "content",
        "content": [{"type": "text", "text": "one "}, {"type": "text", "text": "two"}],
    }
    for source, expected in (content, "one two"), ({"type": "content", "content": "one"}, "one"):
        said, _ = read([{"role": "user", "content": [{"type": "document", "source": source}, RESULT]}])
        assert said == [("user", f"{expected}\n\nA\nhttp://a\nb\n\n")]


@pytest.mark.parametrize("source", [{"type": "base64", "media_type": "application/pdf"}, {"type": "url"}])
def test_files_are_refused_by_name(source):
    with pytest.raises(ApiError) as refused:
        read([{"role": "user", "content": [{"type": "document", "source": source}]}])
    assert refused.value.status == 400 and "source" in refused.value.message
    assert "'text'" in refused.value.message, refused.value.message


def test_results_of_tools():
    found = {"type": "tool_reference", "tool_name": "weather"}
    result = {
        "type": "tool_result",
        "tool_use_id": "t",
        "content": [found, {**found, "tool_name": "x"}, DOCUMENT],
    }
    asked = [{"role": "user", "content": "Go"}, {"role": "assistant", "content": [USE]}]
    said, _ = read([*asked, {"role": "user", "content": [result]}])
    assert said[2] == ("tool", "weather\nx\nOslo\nOf today.\nIt is cold.\n\n")


def test_tools_of_the_server_are_left_out_and_named():
    asked = [
        {"role": "user", "content": "Go"},
        {
            "role": "assistant",
            "content": [
                {"type": "server_tool_use", "id": "s", "name": "web_search", "input": {"query": "x"}},
                {"type": "web_search_tool_result", "tool_use_id": "s", "content": [{"url": "http://a"}]},
                {"type": "text", "text": "It is cold."},
            ],
        },
        {"role": "user", "content": "Sure?"},
    ]
    said, made = read(asked, tools=[WEB_SEARCH, TOOL])
    assert said[1] == ("assistant", "It is cold.")
    assert [tool.name for tool in made.made.chat.tools] == ["weather"]
    assert made.dropped == {"web_search_20250305"}
    assert made.ignored == {
        f"messages.content.{kind}" for kind in ("server_tool_use", "web_search_tool_result")
    }


async def test_errors_name_fields_as_they_are_in_the_body():
    document = {"type": "document", "source": {"type": "text", "media_type": "text/html", "data": "x"}}
    result = {"type": "tool_result", "tool_use_id": "t", "content": [document]}
    async with ScriptedDecode(silent) as node, gateway(node) as rig:
        for block, place in (document, ""), (result, ".content[0]"):
            answer = await post(rig, {**ASK, "messages": [{"role": "user", "content": [block]}]})
            message = answer.json()["error"]["message"]
            assert message.startswith(f"messages[0].content[0]{place}.source.media_type must be"), message


@pytest.mark.parametrize("wrong", [{"type": "telepathy"}, {"type": "search_result", "title": "x"}])
def test_blocks_that_nobody_knows_are_refused(wrong):
    with pytest.raises(ApiError) as refused:
        read([{"role": "user", "content": [wrong]}])
    assert "messages[0].content[0]" in refused.value.message
