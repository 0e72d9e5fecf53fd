"""One prompt through every API of a split deployment: all give the text that gRPC's client gives."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import httpx
import pytest

from baton.client import Completion

pytestmark = pytest.mark.main_path

MESSAGES = [{"role": "user", "content": "def main():\n" + "    print('hello')\n" * 12}]
"""Long enough to be handed off."""
TOKENS = 24
SAME = {"model": "demo", "temperature": 0.0}
CHAT = {**SAME, "messages": MESSAGES, "max_tokens": TOKENS}

APIS: dict[str, tuple[dict[str, Any], Callable[[Any], str], Callable[[Any], str]]] = {
    "chat/completions": (
        CHAT,
        lambda answer: answer["choices"][0]["message"]["content"],
        lambda event: "".join(choice["delta"].get("content") or "" for choice in event["choices"]),
    ),
    "messages": (
        CHAT,
        lambda answer: answer["content"][0]["text"],
        lambda event: event["delta"]["text"] if event["type"] == "content_block_delta" else "",
    ),
    "responses": (
        {**SAME, "input": MESSAGES, "max_output_tokens": TOKENS},
        lambda answer: answer["output"][0]["content"][0]["text"],
        lambda event: event["delta"] if event["type"] == "response.output_text.delta" else "",
    ),
}
"""Path -> request, the text of an answer, the text of an event of a stream."""


@pytest.fixture(scope="module")
def expected(demo) -> Completion:
    return demo.client().generate(messages=MESSAGES, max_tokens=TOKENS, temperature=0.0)


def test_grpc_streams_what_it_says_as_a_whole_and_prompts_are_handed_off(demo, expected):
    assert expected.text and expected.usage.output_tokens
    assert expected.stats.prefill_address == demo.prefill.address and expected.stats.pulled_pages
    with demo.client().stream(messages=MESSAGES, max_tokens=TOKENS, temperature=0.0) as stream:
        assert "".join(delta.text for delta in stream) == expected.text


@pytest.mark.parametrize("api", APIS)
def test_chats_over_http(demo, expected, api):
    request, text_of, text_in = APIS[api]
    url = f"http://{demo.gateway.http}/v1/{api}"
    assert text_of(httpx.post(url, json=request, timeout=60).json()) == expected.text
    streamed = httpx.post(url, json={**request, "stream": True}, timeout=60).text
    data = [line.removeprefix("data: ") for line in streamed.splitlines() if line.startswith("data: {")]
    assert len(data) > 2
    assert "".join(text_in(json.loads(each)) for each in data) == expected.text


def test_a_completion_over_http(demo):
    prompt = MESSAGES[0]["content"]
    expected = demo.client().generate(prompt, max_tokens=TOKENS, temperature=0.0)
    url = f"http://{demo.gateway.http}/v1/completions"
    request = {**SAME, "prompt": prompt, "max_tokens": TOKENS}
    assert httpx.post(url, json=request, timeout=60).json()["choices"][0]["text"] == expected.text != ""
