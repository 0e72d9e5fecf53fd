"""A prompt that with its output exceeds the context: errors by which agents recover, max_tokens reduced."""

from __future__ import annotations

import re

import httpx
import pytest
from gateway_rig import gateway
from scripted_decode import STOP, ScriptedDecode, saying

from baton.v1 import inference_pb2

CONTEXT = 64
LONG = "word " * 100
PATHS = {
    "chat/completions": ("messages", "max_tokens"),
    "completions": ("prompt", "max_tokens"),
    "responses": ("input", "max_output_tokens"),
    "messages": ("messages", "max_tokens"),
}
OPENAI = [path for path in PATHS if path != "messages"]
WORDS = (
    r"This model's maximum context length is 64 tokens\. However, you requested (\d+) tokens "
    r"\((\d+) in the messages, (\d+) in the completion\)\. "
    r"Please reduce the length of the messages or completion\.(?: The prompt has \d+ bytes.*\.)? "
    r"\(context_length_exceeded\)$"
)


def rigged(context=CONTEXT, **config):
    node = ScriptedDecode(saying([40], [41], finish=STOP), context=context)
    return node, gateway(node, **config)


async def post(rig, path, text="Hi", tokens=None, **more):
    field, limit = PATHS[path]
    given = [{"role": "user", "content": text}] if field == "messages" else text
    body = {"model": "scripted", field: given, **more}
    if tokens is not None:
        body[limit] = tokens
    async with httpx.AsyncClient(trust_env=False, timeout=60) as http:
        return await http.post(f"{rig.http}/v1/{path}", json=body)


@pytest.mark.parametrize("stream", [False, True])
async def test_openais_paths_say_it_in_openais_words(stream):
    node, made = rigged()
    async with node, made as rig:
        for path in OPENAI:
            for text, tokens in (LONG, None), (LONG, 9), ("Hi", 10_000):
                answer = await post(rig, path, text, tokens, stream=stream)
                error = answer.json()["error"]
                assert (answer.status_code, error["code"]) == (400, "context_length_exceeded"), error
                total, prompt, output = map(int, re.match(WORDS, error["message"]).groups())
                assert total == prompt + output and output == (tokens or 1)
                assert error["type"] == "invalid_request_error"
        assert not node.starts


async def test_messages_says_it_in_anthropics_words():
    node, made = rigged(clamp_max_tokens=False)
    async with node, made as rig:
        answer = (await post(rig, "messages", LONG, 9)).json()
        tokens = int(
            re.fullmatch(r"prompt is too long: (\d+) tokens > 64 maximum", answer["error"]["message"])[1]
        )
        assert (answer["type"], answer["error"]["type"]) == ("error", "invalid_request_error") and tokens > 64
        answer = (await post(rig, "messages", "Hi", 32_000)).json()
        words = r"input length and `max_tokens` exceed context limit: (\d+) \+ 32000 > 64\b.*"
        assert int(re.fullmatch(words, answer["error"]["message"])[1]) < 64
        assert not node.starts


async def test_a_prompt_of_too_many_bytes_is_a_full_context_too():
    node, made = rigged()
    async with node, made as rig:
        text = "word " * 4_000  # 20,000 bytes; a token has 256 at most
        error = (await post(rig, "chat/completions", text)).json()["error"]
        assert error["code"] == "context_length_exceeded" and re.match(WORDS, error["message"])
        error = (await post(rig, "messages", text, 5)).json()["error"]
        assert error["message"] == "prompt is too long: 79 tokens > 64 maximum"


@pytest.mark.parametrize("clamp", [None, True, False])
async def test_max_tokens_beyond_the_room_is_reduced_where_that_is_allowed(clamp):
    node, made = rigged(clamp_max_tokens=clamp)
    async with node, made as rig:
        for path, (_, limit) in PATHS.items():
            allowed = clamp or (clamp is None and path == "messages")
            for stream in False, True:
                answer = await post(rig, path, tokens=32_000, stream=stream)
                assert answer.status_code == (200 if allowed else 400), answer.text
                if allowed:
                    assert answer.headers["x-baton-ignored"] == limit
                    start = node.starts[-1]
                    assert start.sampling.max_tokens == CONTEXT - len(start.token_ids)
            fits = await post(rig, path, tokens=5)
            assert "x-baton-ignored" not in fits.headers and node.starts[-1].sampling.max_tokens == 5
        more = {"max_completion_tokens": 32_000}
        answer = await post(rig, "chat/completions", **more)
        assert answer.headers.get("x-baton-ignored") == ("max_completion_tokens" if clamp else None)
        assert (await post(rig, "messages", LONG, 32_000)).status_code == 400


async def test_over_grpc_where_the_request_says_so():
    node, made = rigged()
    async with node, made as rig:
        start = inference_pb2.GenerateStart(text="Hi", clamp_max_tokens=True)
        start.sampling.max_tokens = 1000
        answer = await rig.stub.Complete(inference_pb2.CompleteRequest(start=start))
        assert answer.accepted.max_tokens == CONTEXT - answer.accepted.prompt_tokens
        start.sampling.max_tokens = 7
        answer = await rig.stub.Complete(inference_pb2.CompleteRequest(start=start))
        assert answer.accepted.max_tokens == 7


async def test_the_default_of_completions_is_never_too_large():
    node, made = rigged()
    async with node, made as rig:
        answer = await post(rig, "completions", list(range(5, 5 + CONTEXT - 3)))
        assert answer.status_code == 200, answer.text
        assert node.starts[-1].sampling.max_tokens == 3 and "x-baton-ignored" not in answer.headers
        assert (await post(rig, "completions", list(range(CONTEXT - 3)), 16)).status_code == 400


async def test_a_prompt_may_fill_the_context_where_no_output_is_wanted():
    node, made = rigged()
    async with node, made as rig:
        full = list(range(5, 5 + CONTEXT))
        node.script = saying([40], finish=STOP)
        answer = await post(rig, "completions", full, 0, echo=True)
        assert answer.status_code == 200, answer.text
        assert answer.json()["choices"][0]["text"] == rig.text(full)
        for tokens in None, 2:
            assert (await post(rig, "completions", full, tokens)).status_code == 400
        assert (await post(rig, "completions", [*full, 5], 0, echo=True)).status_code == 400


async def test_responses_take_no_log_probabilities_as_none():
    node, made = rigged()
    async with node, made as rig:
        assert (await post(rig, "responses", top_logprobs=0)).status_code == 200
        refused = await post(rig, "responses", top_logprobs=2)
        assert refused.json()["error"]["message"] == "top_logprobs must be 0"
