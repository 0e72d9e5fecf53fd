"""What is wrong is refused through HTTP in OpenAI's form, naming the parameter; the connection serves on."""

from __future__ import annotations

import http.client
import json
import socket
import time
from collections.abc import Iterator

import pytest
from deployment import Deployment
from streams import ANSWER_SECONDS

COMPLETION = {"model": "demo", "prompt": "hello", "max_tokens": 3, "temperature": 0, "ignore_eos": True}
CHAT = {**COMPLETION, "messages": [{"role": "user", "content": "hi"}]}
del CHAT["prompt"]
TOO_LONG = "hello " * 3000
NAN, INFINITY = float("nan"), float("inf")

WRONG_COMPLETIONS = [
    ("prompt", [], "prompt"),
    ("prompt", None, "prompt"),
    ("prompt", {}, "prompt"),
    ("prompt", [[]], "prompt"),
    ("prompt", ["a", 5], "prompt[1]"),
    ("prompt", TOO_LONG, "prompt"),
    ("prompt", ["hello", TOO_LONG], "prompt[1]"),
    ("prompt", "hello " * 1_300_000, "prompt"),
    ("prompt", [5] * 2048, "prompt"),
    ("prompt", [4096], "prompt[0]"),
    ("prompt", [5, -1], "prompt[1]"),
    ("prompt", [2**33], "prompt[0]"),
    ("prompt", [5, 1.5], "prompt[1]"),
    ("temperature", -1, "temperature"),
    ("temperature", NAN, "temperature"),
    ("temperature", INFINITY, "temperature"),
    ("temperature", 10**400, "temperature"),
    ("temperature", "hot", "temperature"),
    ("top_p", 0, "top_p"),
    ("top_p", 2, "top_p"),
    ("top_p", NAN, "top_p"),
    ("max_tokens", -1, "max_tokens"),
    ("max_tokens", 10**12, "max_tokens"),
    ("max_tokens", 2**63, "max_tokens"),
    ("max_tokens", 10**400, "max_tokens"),
    ("max_tokens", 2048, "max_tokens"),
    ("max_tokens", 1.5, "max_tokens"),
    ("max_tokens", "3", "max_tokens"),
    ("min_tokens", 4, "min_tokens"),
    ("n", 0, "n"),
    ("n", 1000, "n"),
    ("stop", ["a"] * 17, "stop"),
    ("stop", "", "stop[0]"),
    ("stop", ["a", 5], "stop[1]"),
    ("stop", "a" * 1_000_000, "stop[0]"),
    ("stop_token_ids", [4096], "stop_token_ids[0]"),
    ("logit_bias", {"4096": 1}, "logit_bias[4096]"),
    ("logit_bias", {"-1": 1}, "logit_bias"),
    ("logit_bias", {"1" * 5000: 1}, "logit_bias"),
    ("logit_bias", {"5": NAN}, "logit_bias[5]"),
    ("logit_bias", {"5": 1e39}, "logit_bias[5]"),
    ("logit_bias", {str(i): 1 for i in range(1025)}, "logit_bias"),
    ("logprobs", 21, "logprobs"),
    ("logprobs", True, "logprobs"),
    ("seed", 2**64, "seed"),
    ("priority", 101, "priority"),
    ("stream", "yes", "stream"),
    ("stream_options", {}, "stream_options"),
    ("best_of", 0, "best_of"),
    ("suffix", "x", "suffix"),
    ("no_such_field", 1, "no_such_field"),
    ("model", "", "model"),
    ("model", 5, "model"),
]
TOOL = {"type": "function", "function": {"name": "f"}}


def called(**function):
    """A history with such a call."""
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}", **function}}
    return [{"role": "assistant", "tool_calls": [call]}]


WRONG_CHATS = [
    ("messages", [], "messages"),
    ("messages", "hi", "messages"),
    ("messages", [5], "messages[0]"),
    ("messages", [{"role": "user"}], "messages[0].content"),
    ("messages", [{"role": "user", "content": 5}], "messages[0].content"),
    ("messages", [*CHAT["messages"], {"role": "wizard", "content": "hi"}], "messages[1].role"),
    ("messages", [{"role": "user", "content": "hi", "mood": "good"}], "messages[0].mood"),
    ("messages", [{"role": "user", "content": [{"type": "audio"}]}], "messages[0].content[0].type"),
    ("messages", [{"role": "user", "content": [{"type": "image_url"}]}], "messages[0].content[0].image_url"),
    ("messages", [{"role": "user", "content": TOO_LONG}], "messages"),
    ("max_completion_tokens", 5, "max_tokens"),
    (
        "messages",
        [{"role": "tool", "content": "x", "tool_calls": []}, {"role": "user"}],
        "messages[1].content",
    ),
    ("messages", called(name="no such name"), "messages[0].tool_calls[0].function.name"),
    ("tools", [TOOL, TOOL], "tools[1].function.name"),
    ("tools", [{"type": "function", "function": {"name": ""}}], "tools[0].function.name"),
    ("tools", [{"type": "function", "function": {"name": "é"}}], "tools[0].function.name"),
    (
        "tools",
        [{"type": "function", "function": {"name": "f", "parameters": []}}],
        "tools[0].function.parameters",
    ),
    ("tools", [{"type": "function", "function": {"name": f"f{i}"}} for i in range(1025)], "tools"),
    ("tools", [{"type": "web_search"}], "tools[0].type"),
    ("tool_choice", "required", "tool_choice"),
    ("tool_choice", {"type": "function", "function": {"name": "f"}}, "tool_choice"),
    ("chat_template_kwargs", {"messages": []}, "chat_template_kwargs.messages"),
    ("chat_template_kwargs", [], "chat_template_kwargs"),
    ("reasoning_effort", "great", "reasoning_effort"),
    ("functions", [{"name": "f"}], "functions"),
    ("top_logprobs", 5, "top_logprobs"),
    ("tools", [{}], "tools[0].type"),
    ("response_format", {"type": "yaml"}, "response_format.type"),
    ("response_format", {"type": "json_object"}, "ignore_eos"),  # which the good one has
]
BROKEN = {
    "empty": (b"", "invalid_json"),
    "cut": (b'{"model": "demo",', "invalid_json"),
    "not JSON": (b"model=demo", "invalid_json"),
    "a list": (b"[]", "invalid_type"),
    "a number": (b"1", "invalid_type"),
    "null": (b"null", "invalid_type"),
    "lone surrogate": (b'{"model": "demo", "\\ud800": "a"}', "invalid_json"),
    "swapped surrogates": (b'{"model": "demo", "\\udc00\\ud800": "a"}', "invalid_json"),
    "not UTF-8": (b'{"model": "demo", "prompt": "\xff\xfe"}', "invalid_utf8"),
    "surrogate in UTF-8": (b'{"model": "demo", "prompt": "\xed\xa0\x80"}', "invalid_utf8"),
    "nested lists": (b'{"model": "demo", "prompt": ' + b"[" * 10**4, "invalid_json"),
    "too many nested lists": (b'{"model": "demo", "prompt": ' + b"[" * 10**6, "body_too_complex"),
    "nested objects": (
        b'{"model": "demo", "prompt": "a", "logit_bias": ' + b'{"a":' * 10**4,
        "invalid_json",
    ),
}


class Connection:
    """One keep-alive connection; a second one is never opened."""

    def __init__(self, address: str) -> None:
        self._http = http.client.HTTPConnection(address, timeout=60)
        self._http.connect()
        self._http.auto_open = 0

    def ask(self, method: str, path: str, body: bytes | None, kind: str | None = "application/json"):
        """Status and parsed body; within ANSWER_SECONDS."""
        started = time.monotonic()
        headers = {"Content-Type": kind} if kind is not None else {}
        self._http.request(method, path, body, headers)
        answer = self._http.getresponse()
        parsed = json.loads(answer.read())
        assert time.monotonic() - started < ANSWER_SECONDS
        return answer.status, parsed

    def refuses(self, status: int, param: str | None, *request, code: str | None = None) -> None:
        got, body = self.ask(*request)
        error = body["error"]
        assert (got, error["param"]) == (status, param), error
        assert error["type"] == "invalid_request_error"
        assert "\n" not in error["message"] and len(error["message"]) < 400
        assert code is None or error["code"] == code
        self.serves()

    def serves(self) -> None:
        status, body = self.ask("POST", "/v1/completions", json.dumps(COMPLETION).encode())
        assert status == 200 and body["usage"]["completion_tokens"] == 3

    def close(self) -> None:
        self._http.close()


@pytest.fixture(scope="module")
def connection(demo: Deployment) -> Iterator[Connection]:
    """One connection for all of these."""
    connection = Connection(demo.gateway.http)
    yield connection
    connection.close()


@pytest.mark.parametrize(
    ("path", "good", "name", "value", "param"),
    [
        *(("/v1/completions", COMPLETION, *case) for case in WRONG_COMPLETIONS),
        *(("/v1/chat/completions", CHAT, *case) for case in WRONG_CHATS),
    ],
    ids=lambda value: value[:30] if isinstance(value, str) else None,
)
@pytest.mark.parametrize("stream", [False, True])
def test_refused_and_the_connection_serves_on(connection: Connection, path, good, name, value, param, stream):
    if stream and name in ("stream", "stream_options"):
        pytest.skip("is about not streaming")
    body = json.dumps({**good, **({"stream": True} if stream else {}), name: value}).encode()
    connection.refuses(400, param, "POST", path, body)


def test_unknown_model(connection: Connection):
    body = json.dumps({**CHAT, "model": "gpt-5"}).encode()
    connection.refuses(404, "model", "POST", "/v1/chat/completions", body, code="model_not_found")
    connection.refuses(404, "model", "GET", "/v1/models/gpt-5", None, code="model_not_found")


def test_wrong_prompts_to_be_echoed(connection: Connection):
    for prompt, param in ([4096], "prompt[0]"), ([[5], [4096]], "prompt[1][0]"):
        body = json.dumps({**COMPLETION, "prompt": prompt, "echo": True}).encode()
        connection.refuses(400, param, "POST", "/v1/completions", body)


@pytest.mark.parametrize("missing", ["model", "prompt"])
def test_missing_parameter(connection: Connection, missing: str):
    body = json.dumps({key: value for key, value in COMPLETION.items() if key != missing}).encode()
    connection.refuses(400, missing, "POST", "/v1/completions", body, code="missing_parameter")


@pytest.mark.parametrize("case", BROKEN)
def test_broken_body(connection: Connection, case: str):
    body, code = BROKEN[case]
    for path in ("/v1/completions", "/v1/chat/completions"):
        connection.refuses(400, None, "POST", path, body, code=code)


@pytest.mark.parametrize("kind", ["text/plain", "application/x-www-form-urlencoded", "", None, "a" * 1000])
def test_wrong_content_type(connection: Connection, kind: str | None):
    connection.refuses(415, None, "POST", "/v1/completions", json.dumps(COMPLETION).encode(), kind)


def test_wrong_method_and_path(connection: Connection):
    connection.refuses(405, None, "GET", "/v1/completions", None)
    connection.refuses(405, None, "DELETE", "/v1/models", None)
    connection.refuses(404, None, "POST", "/v1/images", b"{}")
    connection.refuses(404, None, "GET", "/v1/%ff%00", None)


def test_body_of_100_million_bytes(connection: Connection):
    body = json.dumps({**COMPLETION, "prompt": "a" * 100_000_000}).encode()
    connection.refuses(413, None, "POST", "/v1/completions", body)


def test_clients_that_leave_in_the_middle_of_a_body(demo: Deployment, connection: Connection):
    for sent in (b"", b'{"model"', b"x" * 100_000):
        with socket.create_connection(demo.gateway.http.rsplit(":", 1)) as client:
            head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
            client.sendall(head + b"Content-Length: 200000\r\n\r\n" + sent)
    connection.serves()
