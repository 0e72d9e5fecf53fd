"""Tools with a real language model, split: a call that is required fits its schema, and an agent finishes."""

from __future__ import annotations

import json
from collections.abc import Iterator

import jsonschema
import openai
import pytest
from deployment import Deployment
from test_examples import run

from baton.checkpoint import CheckpointError, resolve

EVENT = {
    "type": "object",
    "properties": {
        "title": {"type": "string", "maxLength": 16},
        "attendees": {
            "type": "array",
            "items": {"type": "string", "maxLength": 8},
            "minItems": 1,
            "maxItems": 2,
        },
        "room": {"enum": ["4.12", "5.01"]},
        "minutes": {"type": "integer", "minimum": 5, "maximum": 240},
    },
    "required": ["title", "attendees", "room", "minutes"],
    "additionalProperties": False,
}
NOTE = {"type": "object", "properties": {"text": {"type": "string", "maxLength": 16}}, "required": ["text"]}
SCHEMAS = {"create_event": EVENT, "save_note": NOTE}
TOOLS = [{"type": "function", "function": {"name": n, "parameters": s}} for n, s in SCHEMAS.items()]
ASKED = [{"role": "user", "content": "Plan a design review with Ana and Bo for an hour, and note it."}]


@pytest.fixture(scope="module")
def deployment(tmp_path_factory, deployments) -> Iterator[Deployment]:
    try:
        resolve("smollm2")
    except CheckpointError as error:
        pytest.skip(str(error))
    with Deployment.split(
        tmp_path_factory.mktemp("tools"), "smollm2", worker=("--kv-tokens", "8192")
    ) as made:
        deployments.append(made)
        yield made


def ask(deployment: Deployment, **more):
    with openai.OpenAI(
        base_url=f"http://{deployment.gateway.http}/v1", api_key="none", max_retries=0
    ) as client:
        body = {"model": "smollm2", "messages": ASKED, "tools": TOOLS, "max_tokens": 120, "seed": 5, **more}
        return client.chat.completions.create(**body).choices[0]


@pytest.mark.slow
@pytest.mark.parametrize("temperature", [0.0, 1.5])
def test_a_required_call_fits_its_schema(deployment: Deployment, temperature: float):
    for choice in ("required", {"type": "function", "function": {"name": "create_event"}}):
        found = ask(deployment, tool_choice=choice, temperature=temperature, parallel_tool_calls=False)
        (call,) = found.message.tool_calls
        assert (found.finish_reason, found.message.content) == ("tool_calls", None)
        assert choice == "required" or call.function.name == "create_event"
        jsonschema.validate(json.loads(call.function.arguments), SCHEMAS[call.function.name])


@pytest.mark.slow
def test_streamed_and_whole_calls_are_one(deployment: Deployment):
    asked = {"tool_choice": "required", "temperature": 1.0, "parallel_tool_calls": False}
    whole = ask(deployment, **asked).message.tool_calls[0].function
    with openai.OpenAI(base_url=f"http://{deployment.gateway.http}/v1", api_key="none") as client:
        body = {"model": "smollm2", "messages": ASKED, "tools": TOOLS, "max_tokens": 120, "seed": 5, **asked}
        parts = [
            part
            for chunk in client.chat.completions.create(**body, stream=True)
            for choice in chunk.choices
            for part in choice.delta.tool_calls or ()
        ]
    assert {part.index for part in parts} == {0}
    assert "".join(part.function.arguments or "" for part in parts) == whole.arguments


@pytest.mark.slow
def test_a_schema_that_cannot_be_enforced_is_refused(deployment: Deployment):
    tools = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object", "not": {}}}}]
    with pytest.raises(openai.BadRequestError) as raised:
        ask(deployment, tools=tools, tool_choice="required")
    assert raised.value.param == "tools"


@pytest.mark.slow
def test_the_agent_finishes(deployment: Deployment):
    said = run("agent.py", "--address", deployment.gateway.http)
    assert said.startswith("called get_") and "\nanswer: " in said


@pytest.mark.slow
def test_typed_examples(deployment: Deployment):
    said = run("typed_agent.py", "--address", deployment.gateway.address).splitlines()
    assert said[0].startswith(("Stock({", "Order({")) and said[1].endswith((".", "ordered."))
    assert said[-1]  # an answer in words
    (person,) = run("extraction.py", "--address", deployment.gateway.address).splitlines()
    assert ", born " in person
