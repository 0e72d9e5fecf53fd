"""Schemas with numbers at every border, by every API that compiles a grammar, while others are answered: the
grammar library dies of some of them if it gets them as numbers.

BATON_NUMBER_SCHEMAS=200 asks for so many. The first goes by every API, the others by each in turn.
"""

from __future__ import annotations

import asyncio
import json
import os
from collections import Counter
from collections.abc import Awaitable, Callable
from fractions import Fraction
from typing import Any

import grpc
import httpx
import jsonschema
import psutil
import pytest
from deployment import Deployment
from process import Process

from baton.client import AsyncClient, BatonError
from number_schemas import nested, without_limits

SCHEMAS = int(os.environ.get("BATON_NUMBER_SCHEMAS", "40"))
SECONDS = 60.0 + 4 * SCHEMAS
AT_A_TIME = 8
TOKENS = 48
CRASHED = "the grammar library crashes on it"

Outcome = str | tuple[str, str]
"""A JSON text, or the field of a refusal and its message; "" for a text that max_tokens has cut."""
Ask = Callable[[httpx.AsyncClient, dict[str, Any], int], Awaitable[Outcome]]


def prompt(seed: int) -> str:
    """It is handed off."""
    return f"These are numbers, one after the other, as they come: {seed}. " * 3


async def posted(http: httpx.AsyncClient, path: str, body: dict[str, Any]) -> Any:
    """The answer, or the field of a refusal and its message."""
    answer = await http.post(path, json={"model": "demo", "temperature": 1.0, **body})
    made: dict[str, Any] = answer.json()
    if answer.status_code == 200:
        return made
    assert answer.status_code == 400, (answer.status_code, answer.text)
    return made["error"].get("param") or "", made["error"]["message"]


async def chat(http: httpx.AsyncClient, schema: dict[str, Any], seed: int) -> Outcome:
    format = {"type": "json_schema", "json_schema": {"name": "n", "strict": True, "schema": schema}}
    messages = [{"role": "user", "content": prompt(seed)}]
    body = {"messages": messages, "response_format": format, "seed": seed, "max_tokens": TOKENS}
    made = await posted(http, "/v1/chat/completions", body)
    if isinstance(made, tuple):
        return made
    choice = made["choices"][0]
    return choice["message"]["content"] if choice["finish_reason"] == "stop" else ""


async def completions(http: httpx.AsyncClient, schema: dict[str, Any], seed: int) -> Outcome:
    body = {"prompt": prompt(seed), "structured_outputs": {"json": schema}, "seed": seed}
    made = await posted(http, "/v1/completions", {**body, "max_tokens": TOKENS})
    if isinstance(made, tuple):
        return made
    choice = made["choices"][0]
    return choice["text"] if choice["finish_reason"] == "stop" else ""


async def responses(http: httpx.AsyncClient, schema: dict[str, Any], seed: int) -> Outcome:
    format = {"type": "json_schema", "name": "n", "strict": True, "schema": schema}
    body = {"input": prompt(seed), "text": {"format": format}, "max_output_tokens": TOKENS}
    made = await posted(http, "/v1/responses", body)
    if isinstance(made, tuple):
        return made
    return made["output"][-1]["content"][0]["text"] if made["status"] == "completed" else ""


async def messages(http: httpx.AsyncClient, schema: dict[str, Any], seed: int) -> Outcome:
    tool = {"name": "note", "input_schema": schema, "strict": True}
    said = [{"role": "user", "content": prompt(seed)}]
    body = {"messages": said, "tools": [tool], "tool_choice": {"type": "tool", "name": "note"}}
    made = await posted(http, "/v1/messages", {**body, "max_tokens": 4 * TOKENS})
    if isinstance(made, tuple):
        field, message = made
        return field or ("tools" if "tools" in message else ""), message
    return json.dumps(made["content"][-1]["input"]) if made["stop_reason"] == "tool_use" else ""


async def direct(http: httpx.AsyncClient, schema: dict[str, Any], seed: int, client: AsyncClient) -> Outcome:
    body: Any = {"prompt": prompt(seed), "grammar": {"json_schema": schema}, "seed": seed}
    try:
        made = await client.generate(**body, max_tokens=TOKENS)
    except BatonError as error:
        assert error.code is grpc.StatusCode.INVALID_ARGUMENT, error
        return error.field or "", error.message
    return made.text if made.finish_reason == "stop" else ""


def exact(text: str) -> Any:
    """Numbers with a point or an exponent as fractions, but for whole ones."""

    def number(text: str) -> int | Fraction:
        made = Fraction(text)
        return made.numerator if made.denominator == 1 else made

    return json.loads(text, parse_float=number)


@pytest.mark.timeout(SECONDS + 60)
async def test_numbers_at_every_border_end_no_process_and_no_stream_of_others(demo: Deployment):
    pids = {process.name: process.pid for process in demo.processes}
    outcomes: Counter[str] = Counter()
    over = asyncio.Event()
    async with (
        AsyncClient(demo.gateway.outside) as client,
        httpx.AsyncClient(base_url=f"http://{demo.gateway.http}", timeout=SECONDS, trust_env=False) as http,
        asyncio.timeout(SECONDS),
    ):

        async def grpc_api(http: httpx.AsyncClient, schema: dict[str, Any], seed: int) -> Outcome:
            return await direct(http, schema, seed, client)

        apis: dict[str, tuple[Ask, str]] = {
            "chat": (chat, "response_format"),
            "completions": (completions, "structured_outputs"),
            "responses": (responses, "text.format"),
            "messages": (messages, "tools"),
            "gRPC": (grpc_api, "sampling.grammar"),
        }
        names = list(apis)
        others = [{"prompt": f"{n} " * 40, "max_tokens": 64, "temperature": 0.0} for n in range(6)]
        known = [(await client.generate(**each)).token_ids for each in others]
        await direct(http, {"type": "null"}, 0, client)
        trials = {node.name: _children(node) for node in (demo.decode, demo.prefill)}
        turn = asyncio.Semaphore(AT_A_TIME)

        async def one(seed: int, api: str) -> None:
            schema = nested(seed)
            ask, field = apis[api]
            async with turn:
                found = await ask(http, schema, seed)
            what = (api, seed, json.dumps(schema), found)
            if isinstance(found, tuple):
                assert found[0].startswith(field) and field in found[1], what
                assert CRASHED not in found[1] and "\n" not in found[1], what
                outcomes[f"{api}: refused"] += 1
            elif found:
                jsonschema.validate(exact(found), exact(json.dumps(without_limits(schema))))
                outcomes[f"{api}: fits"] += 1
            else:
                outcomes[f"{api}: cut"] += 1

        async def other(number: int) -> None:
            while not over.is_set():
                assert (await client.generate(**others[number])).token_ids == known[number]
                outcomes["answers to others"] += 1

        async def storm() -> None:
            await asyncio.gather(
                *(one(0, api) for api in apis),
                *(one(seed, names[seed % 5]) for seed in range(1, SCHEMAS + 1)),
            )
            over.set()

        await asyncio.gather(storm(), *(other(number) for number in range(len(others))))
    print(dict(sorted(outcomes.items())))
    assert {process.name: process.pid for process in demo.processes if process.alive} == pids
    assert {node.name: _children(node) for node in (demo.decode, demo.prefill)} == trials
    for api in apis:
        assert outcomes[f"{api}: fits"] >= SCHEMAS // 20, outcomes
    assert sum(count for name, count in outcomes.items() if name.endswith("refused")), outcomes
    assert outcomes["answers to others"] >= len(others)


def _children(node: Process) -> set[int]:
    """The processes in which it tries grammars."""
    return {child.pid for child in psutil.Process(node.pid).children(recursive=True)}
