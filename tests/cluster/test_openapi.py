"""The HTTP API against an OpenAPI document made of its own models: schemathesis sends what fits and what does
not, and checks status, content type and form of every answer."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import schemathesis
from deployment import Deployment
from fuzzing import Run
from hypothesis import HealthCheck, Phase, settings
from pydantic.json_schema import models_json_schema
from schemathesis import Case
from schemathesis.specs.openapi import checks

from baton.gateway.openai_chat import ChatRequest
from baton.gateway.openai_protocol import CompletionRequest

EXAMPLES = 25
"""Of each endpoint."""
MODEL = "model"
OPTIONAL = {"type": ["string", "null"]}
ERROR = {
    "type": "object",
    "required": ["error"],
    "properties": {
        "error": {
            "type": "object",
            "required": ["message", "type", "param", "code"],
            "properties": {
                "message": {"type": "string", "pattern": "^[^\\n]+$"},
                "type": {"type": "string", "minLength": 1},
                "param": OPTIONAL,
                "code": OPTIONAL,
            },
        }
    },
}


def answers(kind: str) -> dict[str, Any]:
    choice = {"type": "object", "required": ["index", "finish_reason"]}
    usage = {"type": "object", "required": ["prompt_tokens", "completion_tokens", "total_tokens"]}
    answer = {
        "type": "object",
        "required": ["id", "object", "created", "model", "choices", "usage"],
        "properties": {
            "object": {"const": kind},
            "model": {"const": MODEL},
            "choices": {"type": "array", "minItems": 1, "items": choice},
            "usage": usage,
        },
    }
    good = {"application/json": {"schema": answer}, "text/event-stream": {}}
    refused = {"description": "", "content": {"application/json": {"schema": ERROR}}}
    codes = dict.fromkeys(("400", "404", "405", "413", "415", "429"), refused)
    return {"200": {"description": "", "content": good}, **codes}


def document() -> dict[str, Any]:
    kinds = {
        "completions": (CompletionRequest, "text_completion"),
        "chat/completions": (ChatRequest, "chat.completion"),
    }
    models = [(model, "validation") for model, _ in kinds.values()]
    _, schemas = models_json_schema(models, ref_template="#/components/schemas/{model}")
    definitions = schemas["$defs"]
    for model, _ in kinds.values():
        definitions[model.__name__]["properties"]["model"] = {"enum": [MODEL]}
    paths = {}
    for path, (model, kind) in kinds.items():
        body = {"application/json": {"schema": {"$ref": f"#/components/schemas/{model.__name__}"}}}
        operation = {"requestBody": {"required": True, "content": body}, "responses": answers(kind)}
        paths[f"/v1/{path}"] = {"post": operation}
    info = {"title": "Baton", "version": "1"}
    return {"openapi": "3.1.0", "info": info, "paths": paths, "components": {"schemas": definitions}}


schema = schemathesis.openapi.from_dict(document())


@pytest.fixture(scope="module")
def deployment(qwen3, tmp_path_factory, deployments) -> Iterator[Deployment]:
    with Run.open(tmp_path_factory.mktemp("openapi"), qwen3[0]) as deployment:
        deployments.append(deployment)
        yield deployment
        assert not any("Traceback" in process.log.read_text() for process in deployment.processes)


@schema.parametrize()
@settings(
    max_examples=EXAMPLES,
    deadline=None,
    database=None,
    phases=[Phase.explicit, Phase.generate],
    suppress_health_check=list(HealthCheck),
)
def test_every_answer_is_as_documented(case: Case, deployment: Deployment):
    case.call_and_validate(
        base_url=f"http://{deployment.gateway.http}",
        checks=[
            schemathesis.checks.not_a_server_error,
            checks.status_code_conformance,
            checks.content_type_conformance,
            checks.response_schema_conformance,
        ],
        timeout=20,
    )
