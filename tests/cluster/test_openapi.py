"""The HTTP API against the OpenAPI document that it serves: schemathesis sends what fits and what does
not, and checks status, content type and form of every answer."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import schemathesis
from deployment import Deployment
from fuzzing import Run
from hypothesis import HealthCheck, Phase, settings
from schemathesis import Case
from schemathesis.specs.openapi import checks

from baton.api.openapi import document

EXAMPLES = 12
"""Of each endpoint."""
MODEL = "model"
ERROR = {"schema": {"$ref": "#/components/schemas/Error"}}
REFUSED = {
    code: {"description": "", "content": {"application/json": ERROR}}
    for code in ("400", "404", "405", "413", "415", "429")
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
    return {"200": {"description": "", "content": good}, **REFUSED}


def served() -> dict[str, Any]:
    """The document that the gateway serves, with answers described more closely."""
    made = document()
    del made["security"]
    schemas = made["components"]["schemas"]
    schemas["Error"]["properties"]["error"]["properties"]["message"]["pattern"] = "^[^\\n]+$"
    kinds = {"CompletionRequest": "text_completion", "ChatRequest": "chat.completion"}
    for model in (*kinds, "TokenizeRequest", "DetokenizeRequest"):
        schemas[model]["properties"]["model"] = {"enum": [MODEL]}
    for path, kind in zip(("/v1/completions", "/v1/chat/completions"), kinds.values(), strict=True):
        made["paths"][path]["post"]["responses"] = answers(kind)
    paths = ("/v1/completions", "/v1/chat/completions", "/tokenize", "/detokenize")
    for path in paths[2:]:
        del made["paths"][path]["post"]["responses"]["default"]
        made["paths"][path]["post"]["responses"] |= REFUSED
    made["paths"] = {path: made["paths"][path] for path in paths}
    return made


schema = schemathesis.openapi.from_dict(served())


@pytest.fixture(scope="module")
def deployment(qwen3, tmp_path_factory, deployments) -> Iterator[Deployment]:
    with Run.open(tmp_path_factory.mktemp("openapi"), qwen3[0]) as deployment:
        deployments.append(deployment)
        yield deployment
        assert not any("Traceback" in process.log.read_text() for process in deployment.processes)


@pytest.mark.timeout(900)
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
        timeout=120,
    )
