"""What the HTTP APIs call fields of baton.v1: a table for each API, for its errors."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

RESPONSES_PATH = "/v1/responses"
ANTHROPIC_PATH = "/v1/messages"


@dataclass(frozen=True, slots=True)
class FieldNames:
    """The names that one API has for fields. Fields that only the API has keep theirs."""

    table: Sequence[tuple[str, str]]
    """Regular expressions of baton.v1's paths, and what stands there in a body. The first found holds."""
    grammar: str
    """The field that a grammar comes from."""
    tags: Sequence[str] = ()
    """Regular expressions of paths in a body behind which pydantic puts the kind of an item, which is no
    field."""

    def name(self, field: str) -> str:
        """The field of a body that a path of baton.v1 stands for."""
        if field.startswith("sampling.grammar"):
            return self.grammar
        for pattern, name in self.table:
            found, count = re.subn(f"^{pattern}", name, field, count=1)
            if count:
                return found
        return field

    def without_tags(self, path: str) -> str:
        """A body's path without the kinds of items."""
        for tagged in self.tags:
            path = re.sub(rf"({tagged})\.\w+(?=\.|$)", r"\1", path)
        return path


_ALL = (
    (r"chat\.template_arguments\b", "chat_template_kwargs"),
    (r"chat\.", ""),
    (r"sampling\.", ""),
    (r"namespace$", "cache_salt"),
)
OPENAI = FieldNames(
    (
        (r"(text|tokens\.token_ids)\b", "prompt"),
        (r"chat\.messages(\[\d+\]\.tool_calls\[\d+\])\.(?=(name|arguments)$)", r"messages\1.function."),
        (r"chat(\.messages)?(?=$|\[)", "messages"),
        (r"chat\.tools(\[\d+\])\.", r"tools\1.function."),
        (r"chat\.tool_choice\.name\b", "tool_choice.function.name"),
        (r"chat\.tool_choice\.allowed\b", "tool_choice.allowed_tools.tools"),
        *_ALL,
    ),
    "response_format",
)
EMBEDDINGS = FieldNames(((r"inputs\b", "input"), *_ALL), "")
ANTHROPIC = FieldNames(
    (
        (r"chat$", "messages"),
        (r"chat\.tool_choice\.allowed\b", "tool_choice.tools"),
        (r"sampling\.stop(?=$|\[)", "stop_sequences"),
        *_ALL,
    ),
    "output_config.format",
    (r"^messages\[\d+\]\.content\[\d+\]", r"\.content\[\d+\]\.content\[\d+\]", r"\.source"),
)
RESPONSES = FieldNames(
    (
        (r"(chat$|chat\.messages(\[\d+\](\.tool_calls\[\d+\])?)?)", "input"),
        (r"chat\.tool_choice\.allowed\b", "tool_choice.tools"),
        (r"sampling\.max_tokens$", "max_output_tokens"),
        *_ALL,
    ),
    "text.format",
    (r"^(?:input|tools)\[\d+\]", r"^(?:input|tools)\[\d+\]\.tools\[\d+\]"),
)


def field_names(path: str) -> FieldNames:
    """Those of the API that an HTTP path belongs to."""
    apis = {ANTHROPIC_PATH: ANTHROPIC, RESPONSES_PATH: RESPONSES, "/v1/embeddings": EMBEDDINGS}
    return next((names for prefix, names in apis.items() if f"{path}/".startswith(f"{prefix}/")), OPENAI)
