"""Images: refused with the flag's name, or told to the model where the gateway was started with it."""

import json

import httpx
import pytest
from gateway_rig import gateway
from scripted_decode import STOP, ScriptedDecode, saying

from baton.api.anthropic_protocol import MessagesRequest, messages_start
from baton.api.images import OMITTED
from baton.api.json_body import parse_body
from baton.api.openai_chat import ChatRequest, chat_start
from baton.api.openai_errors import ApiError
from baton.api.responses_protocol import ResponsesRequest, response_start

URL = "data:image/png;base64,iVBORw0KGgo="
CHAT = {"type": "image_url", "image_url": {"url": URL, "detail": "low"}}
INPUT = {"type": "input_image", "image_url": URL, "detail": "auto"}
BLOCK = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "iVBORw0KGgo="}}
LINK = {"type": "image", "source": {"type": "url", "url": "https://example.org/a.png"}}


def chat(part):
    content = [{"type": "text", "text": "Look: "}, part]
    return {"model": "scripted", "messages": [{"role": "user", "content": content}]}


def tokenize(part):
    return chat(part)


def responses(part):
    return {
        "model": "scripted",
        "input": [{"role": "user", "content": [{"type": "input_text", "text": "Look: "}, part]}],
    }


def called(part):
    output = [{"type": "input_text", "text": "Look: "}, part]
    call = {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"}
    result = {"type": "function_call_output", "call_id": "c", "output": output}
    return {"model": "scripted", "input": [{"role": "user", "content": "Go."}, call, result]}


def messages(part):
    return {**chat(part), "max_tokens": 5}


def tool_result(part):
    use = {"type": "tool_use", "id": "t", "name": "f", "input": {}}
    result = {
        "type": "tool_result",
        "tool_use_id": "t",
        "content": [{"type": "text", "text": "Look: "}, part],
    }
    turns = [{"role": "assistant", "content": [use]}, {"role": "user", "content": [result]}]
    return {"model": "scripted", "max_tokens": 5, "messages": [{"role": "user", "content": "Go."}, *turns]}


PLACES = {
    "chat": ("/v1/chat/completions", chat, CHAT, "messages[0].content[1].image_url"),
    "tokenize": ("/tokenize", tokenize, CHAT, "messages[0].content[1].image_url"),
    "responses": ("/v1/responses", responses, INPUT, "input[0].content[1].image_url"),
    "output": ("/v1/responses", called, INPUT, "input[2].output[1].image_url"),
    "compact": ("/v1/responses/compact", responses, INPUT, "input[0].content[1].image_url"),
    "messages": ("/v1/messages", messages, BLOCK, "messages[0].content[1].source"),
    "link": ("/v1/messages", messages, LINK, "messages[0].content[1].source"),
    "tool_result": ("/v1/messages", tool_result, BLOCK, "messages[2].content[0].content[1].source"),
    "count": ("/v1/messages/count_tokens", messages, BLOCK, "messages[0].content[1].source"),
}


async def test_they_are_refused_with_the_name_of_the_flag():
    async with ScriptedDecode(saying([40], [0], finish=STOP)) as node, gateway(node) as rig:
        async with httpx.AsyncClient(trust_env=False, base_url=rig.http) as http:
            for name, (path, body, part, param) in PLACES.items():
                made = body(part)
                if name == "count":
                    del made["max_tokens"]
                answer = await http.post(path, json=made)
                assert answer.status_code == 400, name
                said = answer.json()["error"]["message"]
                assert said.startswith(f"{param} is an image"), (name, said)
                assert "--omit-images" in said and "\n" not in said
        assert not node.starts


async def test_the_model_is_told_that_one_was_there():
    script = saying([40], [0], finish=STOP)
    async with ScriptedDecode(script, context=4000) as node, gateway(node, omit_images=True) as rig:
        async with httpx.AsyncClient(trust_env=False, base_url=rig.http) as http:

            async def read(path, body):
                answer = await http.post(path, json=body)
                assert answer.status_code == 200, (path, answer.text)
                return node.starts[-1].token_ids if path != "/tokenize" else answer.json()["tokens"], answer

            for path, body, part, _ in PLACES.values():
                if "count" in path or "compact" in path:
                    continue
                shown, answer = await read(path, body(part))
                field = "input.content.image" if "responses" in path else "messages.content.image"
                assert field in answer.headers["x-baton-ignored"].split(", "), path
                text = {"type": "input_text" if "responses" in path else "text", "text": OMITTED}
                assert list(shown) == list((await read(path, body(text)))[0]), path
        await rig.idle()


def converted(body, kind, convert):
    return parse_body(bytearray(json.dumps(body).encode()), kind, convert, omit_images=True)


@pytest.mark.parametrize(
    ("kind", "body", "part", "field"),
    [
        ("chat", chat, {"type": "image_url"}, "image_url"),
        ("chat", chat, {"type": "image_url", "image_url": {}}, "image_url.url"),
        ("chat", chat, {"type": "image_url", "image_url": {"url": ""}}, "image_url.url"),
        ("chat", chat, {**CHAT, "surprise": 1}, "surprise"),
        ("chat", chat, {"type": "text", "image_url": {"url": URL}}, "image_url"),
        ("chat", chat, {"type": "input_audio", "input_audio": {}}, "type"),
        ("responses", responses, {"type": "input_image"}, "image_url"),
        ("responses", responses, {"type": "input_image", "image_url": None}, "image_url"),
        ("responses", responses, {"type": "input_image", "image_url": 5}, "image_url"),
        ("responses", responses, {"type": "input_file", "file_id": "x"}, "type"),
        ("messages", messages, {"type": "image"}, "source"),
        ("messages", messages, {"type": "image", "source": {"type": "base64", "data": "x"}}, "media_type"),
        ("messages", messages, {"type": "image", "source": {"type": "url"}}, "url"),
        ("messages", messages, {"type": "image", "source": {"type": "tape"}}, "source"),
        ("messages", tool_result, {"type": "image"}, "source"),
    ],
)
def test_malformed_ones_are_errors_all_the_same(kind, body, part, field):
    with pytest.raises(ApiError) as caught:
        READ[kind](body(part))
    assert caught.value.status == 400 and caught.value.param.endswith(field), caught.value.message


READ = {
    "chat": lambda body: converted(body, ChatRequest, chat_start),
    "responses": lambda body: converted(body, ResponsesRequest, lambda asked: response_start(asked, [])),
    "messages": lambda body: converted(body, MessagesRequest, messages_start),
}


@pytest.mark.parametrize(
    ("kind", "body"),
    [("chat", chat(CHAT)), ("responses", called(INPUT)), ("messages", tool_result(BLOCK))],
)
def test_nothing_of_an_image_is_kept(kind, body):
    read = READ[kind](body)
    assert "iVBOR" not in f"{read.request!r}{read.made}"
    assert f"Look: {OMITTED}" in str(read.made)
