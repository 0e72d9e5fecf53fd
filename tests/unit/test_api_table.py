"""docs/api.md names every field of the OpenAI API's requests, as the models in code treat it."""

import re
from pathlib import Path

import pytest

from baton.api import (
    anthropic_protocol,
    compaction,
    embeddings_api,
    openai_chat,
    openai_protocol,
    responses_protocol,
    scores_api,
    tokenize_api,
)

TABLE = re.compile(r"^\| ([a-z_., ]+) \| ((?:`\w+`(?:, )?)+) \| (served|hint|refused) \|", re.MULTILINE)
DOCUMENT = Path(__file__).parents[2] / "docs" / "api.md"
MODELS = {
    "chat": openai_chat.ChatRequest,
    "completions": openai_protocol.CompletionRequest,
    "stream_options": openai_protocol.StreamOptions,
    "messages": openai_chat.ChatMessage,
    "messages.content": openai_chat.ContentPart,
    "messages.tool_calls": openai_chat.CalledTool,
    "tools": openai_chat.ChatTool,
    "tools.function": openai_chat.Function,
    "responses": responses_protocol.ResponsesRequest,
    "compact": compaction.CompactRequest,
    "anthropic": anthropic_protocol.MessagesRequest,
    "embeddings": embeddings_api.EmbeddingsRequest,
    "score": scores_api.ScoreRequest,
    "rerank": scores_api.RerankRequest,
    "tokenize": tokenize_api.TokenizeRequest,
    "detokenize": tokenize_api.DetokenizeRequest,
}


def documented(place):
    rows = TABLE.findall(DOCUMENT.read_text(encoding="utf-8"))
    return {
        (field.strip("`"), verdict)
        for places, fields, verdict in rows
        if place in places.split(", ")
        for field in fields.split(", ")
    }


@pytest.mark.parametrize("place", MODELS)
def test_the_table_says_what_the_code_does(place):
    model = MODELS[place]
    verdicts = {"served": model.model_fields, "hint": model.HINTS, "refused": model.REFUSED}
    assert documented(place) == {(field, verdict) for verdict, fields in verdicts.items() for field in fields}
