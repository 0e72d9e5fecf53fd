"""The OpenAPI document of the HTTP API, made of the models that read the bodies."""

from __future__ import annotations

import json
from importlib.metadata import version

from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

from baton.api.anthropic_protocol import CountRequest, MessagesRequest
from baton.api.compaction import CompactRequest
from baton.api.embeddings_api import EmbeddingsRequest
from baton.api.openai_chat import ChatRequest
from baton.api.openai_fields import Json
from baton.api.openai_protocol import CompletionRequest
from baton.api.responses_protocol import ResponsesRequest
from baton.api.scores_api import RerankRequest, ScoreRequest
from baton.api.tokenize_api import DetokenizeRequest, TokenizeRequest

_POSTS: dict[str, tuple[type[BaseModel], str, str]] = {
    "/v1/completions": (CompletionRequest, "Continues texts.", "OpenAI"),
    "/v1/chat/completions": (ChatRequest, "Answers a conversation.", "OpenAI"),
    "/v1/responses": (ResponsesRequest, "Answers a conversation, of items, that may be stored.", "OpenAI"),
    "/v1/responses/compact": (
        CompactRequest,
        "Shortens a conversation to a summary.",
        "OpenAI",
    ),
    "/v1/embeddings": (EmbeddingsRequest, "Embeddings of texts.", "OpenAI"),
    "/v1/messages": (MessagesRequest, "Answers a conversation.", "Anthropic"),
    "/v1/messages/count_tokens": (CountRequest, "Counts the tokens of a conversation.", "Anthropic"),
    "/v1/score": (ScoreRequest, "Scores texts by how likely they follow others.", "scores"),
    "/v1/rerank": (RerankRequest, "Sorts documents by how likely a query follows them.", "scores"),
    "/tokenize": (TokenizeRequest, "Token ids of a text or a conversation.", "tokens"),
    "/detokenize": (DetokenizeRequest, "The text of token ids.", "tokens"),
}
"""Path to the model of its body, a summary, and a tag."""
_ALIASES = {
    "/score": "/v1/score",
    "/rerank": "/v1/rerank",
    "/v2/rerank": "/v1/rerank",
    "/ping": "/health",
}
_STREAMS = ("/v1/completions", "/v1/chat/completions", "/v1/responses", "/v1/messages")
_GETS = {
    "/v1/models": ("Models that are served.", "OpenAI"),
    "/v1/models/{name}": ("One model.", "OpenAI"),
    "/v1/responses/{id}": ("A stored response.", "OpenAI"),
    "/health": ("Whether requests are served.", "operation"),
    "/version": ("Baton's version.", "operation"),
    "/openapi.json": ("This document.", "operation"),
    "/metrics": ("Metrics, for Prometheus.", "operation"),
    "/traces": ("What happened to requests: timelines and events.", "operation"),
}
_TRACES_QUERY = {
    "id": {"type": "array", "items": {"type": "string"}},
    "limit": {"type": "integer"},
    "slowest": {"type": "boolean"},
    "gateway_only": {"type": "boolean"},
}
_MODULES = {
    "anthropic_protocol": "Messages",
    "openai_chat": "Chat",
    "responses_items": "Responses",
    "responses_protocol": "Responses",
}
"""Prefixes that tell apart models of the same name."""
_OPENAI_ERROR = {
    "type": "object",
    "required": ["error"],
    "properties": {
        "error": {
            "type": "object",
            "required": ["message", "type", "param", "code"],
            "properties": {
                "message": {"type": "string"},
                "type": {"type": "string"},
                "param": {"type": ["string", "null"]},
                "code": {"type": ["string", "null"]},
            },
        }
    },
}
_ANTHROPIC_ERROR = {
    "type": "object",
    "required": ["type", "error"],
    "properties": {
        "type": {"const": "error"},
        "error": {
            "type": "object",
            "required": ["type", "message"],
            "properties": {"type": {"type": "string"}, "message": {"type": "string"}},
        },
    },
}


def document() -> Json:
    """OpenAPI 3.1."""
    _, made = models_json_schema(
        [(model, "validation") for model, _, _ in _POSTS.values()],
        ref_template="#/components/schemas/{model}",
    )
    text = json.dumps(made["$defs"])
    for module, api in _MODULES.items():
        text = text.replace(f"baton__gateway__{module}__", api)
    schemas = {**json.loads(text), "Error": _OPENAI_ERROR, "AnthropicError": _ANTHROPIC_ERROR}
    paths: Json = {}
    for path, (model, summary, tag) in _POSTS.items():
        schema = {"$ref": f"#/components/schemas/{model.__name__}"}
        operation = _operation(summary, tag, path)
        operation["requestBody"] = {"required": True, "content": {"application/json": {"schema": schema}}}
        if path in _STREAMS:
            operation["responses"]["200"]["content"]["text/event-stream"] = {}
        paths[path] = {"post": operation}
    for path, (summary, tag) in _GETS.items():
        paths[path] = {"get": _operation(summary, tag, path)}
    paths |= {alias: paths[path] for alias, path in _ALIASES.items()}
    metrics = paths["/metrics"]["get"]["responses"]["200"]
    metrics["content"] = {"text/plain": {"schema": {"type": "string"}}}
    paths["/traces"]["get"]["parameters"] = [
        {"name": name, "in": "query", "schema": schema} for name, schema in _TRACES_QUERY.items()
    ]
    paths["/v1/responses/{id}"]["delete"] = _operation("Deletes it.", "OpenAI", "/v1/responses/{id}")
    cancel = "/v1/responses/{id}/cancel"
    paths[cancel] = {"post": _operation("Cancels a response that is streamed.", "OpenAI", cancel)}
    keys = {"bearer": {"type": "http", "scheme": "bearer"}}
    keys["x-api-key"] = {"type": "apiKey", "in": "header", "name": "x-api-key"}
    return {
        "openapi": "3.1.0",
        "info": {"title": "Baton", "version": version("baton-serve")},
        "paths": paths,
        "components": {"schemas": schemas, "securitySchemes": keys},
        "security": [{}, *({name: []} for name in keys)],
    }


def _operation(summary: str, tag: str, path: str) -> Json:
    error = "AnthropicError" if tag == "Anthropic" else "Error"
    refused = {"schema": {"$ref": f"#/components/schemas/{error}"}}
    operation: Json = {
        "summary": summary,
        "tags": [tag],
        "responses": {
            "200": {"description": "The answer.", "content": {"application/json": {}}},
            "default": {"description": "An error.", "content": {"application/json": refused}},
        },
    }
    if "{" in path:
        name = path.partition("{")[2].partition("}")[0]
        parameter = {"name": name, "in": "path", "required": True, "schema": {"type": "string"}}
        operation["parameters"] = [parameter]
    return operation
