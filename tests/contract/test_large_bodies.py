"""HTTP bodies that cost much to parse: the event loop goes on, and memory stays in proportion."""

from __future__ import annotations

import asyncio
import http.client
import json
import time
from pathlib import Path

import pytest
from gateway_rig import gateway
from scripted_decode import ScriptedDecode, saying

from baton.api import json_body
from baton.api.json_body import MAX_ESCAPES, MAX_FIELDS, MAX_VALUES
from baton.api.openai_errors import ApiError

LIMIT = 16 * 2**20
LOOP_SECONDS = 0.1
TICK_SECONDS = 0.005
SMALL = 24 * 2**20
"""What the process may take besides: for the client here, for what the allocator keeps."""
MILLION = 10**6


def completion(prompt: str, more: str = "") -> tuple[str, str]:
    return "/v1/completions", f'{{"model": "scripted", "prompt": {prompt}{more}}}'


def chat(messages: str) -> tuple[str, str]:
    return "/v1/chat/completions", f'{{"model": "scripted", "messages": {messages}}}'


def tools(more: str) -> tuple[str, str]:
    messages = '[{"role": "user", "content": "a"}]'
    return "/v1/chat/completions", f'{{"model": "scripted", "messages": {messages}, {more}}}'


def function(name: str, parameters: str = "{}", description: str = "") -> str:
    inner = f'"name": "{name}", "description": "{description}", "parameters": {parameters}'
    return f'{{"type": "function", "function": {{{inner}}}}}'


def call(arguments: str) -> str:
    return f'{{"type": "function", "function": {{"name": "f", "arguments": "{arguments}"}}}}'


def array(element: str, count: int) -> str:
    return f"[{','.join([element] * count)}]"


def members(count: int) -> str:
    return ",".join(f'"{number}": 1' for number in range(count))


def bodies() -> dict[str, tuple[str, str]]:
    """Name -> path and body; some hundred megabytes."""
    return {
        "nulls": completion(array("null", MILLION)),
        "token ids": completion(array("1", 8 * MILLION)),
        "as many token ids as are allowed": completion(array("300", MAX_VALUES - 2)),
        "prompts of one token": completion(array("[1]", MILLION)),
        "empty prompts": completion(array("[]", MAX_FIELDS - 8)),
        "strings": completion(array('""', MILLION)),
        "one wrong at the end": completion(array('"a"', MAX_VALUES - 8)[:-1] + ",1]"),
        "empty messages": chat(array("{}", MILLION)),
        "as many messages as are allowed": chat(array('{"role":"u","content":""}', MAX_FIELDS // 3 - 3)),
        "1,000 tools": tools(f'"tools": [{",".join(function(f"f{i}") for i in range(1000))}]'),
        "tools without a name": tools(f'"tools": {array("{}", MAX_FIELDS - 16)}'),
        "a tool with many properties": tools(
            f'"tools": [{function("f", f"""{{"properties": [{array("{}", MAX_FIELDS - 64)}]}}""")}]'
        ),
        "a tool of many words": tools(f'"tools": [{function("f", description="a" * (LIMIT - 1024))}]'),
        "a deep schema": tools(
            f'"tools": [{function("f", "{" + chr(34) + "a" + chr(34) + ":1}")}]'.replace(
                ":1", ':{"a"' * 900 + ":1" + "}" * 900
            )
        ),
        "arguments of the template": tools(f'"chat_template_kwargs": {{"a": {array("1", MAX_VALUES - 64)}}}'),
        "arguments of a call": chat(
            f'[{{"role": "assistant", "tool_calls": [{call("1" * (LIMIT - 1024))}]}}]'
        ),
        "stop numbers": completion('"a"', f', "stop": {array("1", MILLION)}'),
        "stop strings": completion('"a"', f', "stop": {array(chr(34) * 2, MAX_VALUES - 8)}'),
        "stop ids": completion('"a"', f', "stop_token_ids": {array("-1", MILLION)}'),
        "unknown fields": completion('"a"', f", {members(MILLION)}"),
        "biases": completion('"a"', f', "logit_bias": {{{members(MILLION)}}}'),
        "as many biases as are allowed": completion('"a"', f', "logit_bias": {{{members(MAX_FIELDS - 8)}}}'),
        "escaped quotes": completion('"' + '\\"' * (LIMIT // 2 - 64) + '"'),
        "escapes": completion('"' + "\\n" * (LIMIT // 2 - 64) + '"'),
        "as many escapes as are allowed": completion(
            '"' + '\\"' * MAX_ESCAPES + "a" * (LIMIT - 2 * MAX_ESCAPES - 64) + '"'
        ),
        "commas in a string": completion('"' + "," * (LIMIT - 128) + '"'),
        "commas": completion("," * (LIMIT - 128)),
        "strings without commas": completion('""' * (LIMIT // 2 - 64)),
        "as many strings as are allowed": completion(array('"a"', MAX_VALUES - 8)),
        "an unknown key": completion('"a"', f', "{"k" * (LIMIT - 256)}": 1'),
        "a long role": chat(f'[{{"role": "{"r" * (LIMIT - 256)}", "content": "a"}}]'),
        "documents": (
            "/v1/rerank",
            f'{{"model": "scripted", "query": "q", "documents": {array(chr(34) * 2, MAX_VALUES - 8)}}}',
        ),
        "nested arrays": completion("[" * (LIMIT - 128)),
        "nested objects": completion('{"a":' * (LIMIT // 5 - 128)),
    }


def post(address: str, path: str, body: bytes, **headers: str) -> tuple[int, dict]:
    connection = http.client.HTTPConnection(address, timeout=60)
    try:
        connection.request("POST", path, body, {"Content-Type": "application/json", **headers})
        answer = connection.getresponse()
        return answer.status, json.loads(answer.read())
    finally:
        connection.close()


async def longest_standstill(work: asyncio.Task) -> float:
    """CPU seconds of this process in which the event loop did nothing: the machine may be busy."""
    longest, before = 0.0, time.process_time()
    while not work.done():
        await asyncio.sleep(TICK_SECONDS)
        now = time.process_time()
        longest, before = max(longest, now - before), now
    return longest


def memory(field: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(field))


def reset_peak() -> None:
    Path("/proc/self/clear_refs").write_text("5")


async def costs(address: str, path: str, body: bytes) -> tuple[int, float, int]:
    """The status, how long the event loop stood still, and how much the process grew."""
    assert len(body) <= LIMIT
    reset_peak()
    before = memory("VmRSS")
    work = asyncio.create_task(asyncio.to_thread(post, address, path, body))
    stood = await longest_standstill(work)
    status, answer = await work
    assert status == 200 or "error" in answer
    assert status == 200 or len(json.dumps(answer)) < 8192, "a client's text is quoted at length"
    return status, stood, memory("VmHWM") - before


@pytest.mark.thorough
async def test_the_loop_goes_on_and_memory_stays_in_proportion():
    exceeded = {}
    async with ScriptedDecode(saying([40])) as decode, gateway(decode, max_message_bytes=LIMIT) as rig:
        address = rig.http.removeprefix("http://")
        await asyncio.to_thread(post, address, "/v1/completions", b"{}")
        for name, (path, text) in bodies().items():
            body = text.encode()
            status, stood, grown = await costs(address, path, body)
            print(f"{name}: {status}, {stood * 1e3:.0f} ms, {grown / len(body):.1f} times the body")
            if status not in (200, 400) or stood >= LOOP_SECONDS or grown >= 10 * len(body) + SMALL:
                exceeded[name] = (status, stood, grown / len(body))
    assert not exceeded


async def test_a_small_body_does_not_wait_for_large_ones():
    """Six that the parser's thread works at for a second or so each, and one of 36 kB."""
    large = bodies()["as many escapes as are allowed"][1].encode()
    small = completion(f'"{"a" * 36_000}"')[1].encode()
    node = ScriptedDecode(saying([40]), context=2**16)
    async with node as decode, gateway(decode, max_message_bytes=LIMIT) as rig:
        address = rig.http.removeprefix("http://")
        slow = [
            asyncio.create_task(asyncio.to_thread(post, address, "/v1/completions", large)) for _ in range(6)
        ]
        await asyncio.sleep(0.5)
        status, _ = await asyncio.to_thread(post, address, "/v1/completions", small)
        waiting = sum(not each.done() for each in slow)
        await asyncio.gather(*slow)
        assert status == 200 and waiting >= 3


def test_quotes_are_counted():
    body = bytearray(completion('""' * (LIMIT // 2 - 64))[1].encode())
    before = time.thread_time()
    with pytest.raises(ApiError):
        json_body._check_amount(body)
    assert time.thread_time() - before < 0.1


@pytest.mark.parametrize(
    ("text", "code", "param"),
    [
        ('{"model": "scripted", "prompt": "a", "prompt": "b"}', "duplicate_parameter", "prompt"),
        ('{"model": "scripted", "prompt": "a", "logit_bias": {"5": 1, "5": 2}}', "duplicate_parameter", "5"),
        ('{"model": "scripted", "prompt": "a", "\\ud800": 1}', "invalid_json", None),
        ('{"model": "scripted", "prompt": ["a", "\\ud800"]}', "invalid_json", None),
    ],
)
async def test_a_key_is_given_once(text, code, param):
    async with ScriptedDecode(saying([40])) as decode, gateway(decode) as rig:
        address = rig.http.removeprefix("http://")
        status, answer = await asyncio.to_thread(post, address, "/v1/completions", text.encode())
        assert (status, answer["error"]["code"], answer["error"]["param"]) == (400, code, param)


async def test_a_compressed_body_is_refused():
    body = b'{"model": "scripted", "prompt": "a"}'
    async with ScriptedDecode(saying([40])) as decode, gateway(decode) as rig:
        address = rig.http.removeprefix("http://")
        for encoding, expected in ("gzip", 415), ("identity", 200):
            headers = {"Content-Encoding": encoding}
            status, _ = await asyncio.to_thread(post, address, "/v1/completions", body, **headers)
            assert status == expected, encoding
