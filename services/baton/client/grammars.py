"""What an answer must be, as the client's arguments say it, and as the contract does."""

from __future__ import annotations

import json
from collections.abc import Mapping

from baton.client.types import Grammar, ResponseFormat
from baton.rpc.errors import invalid
from baton.v1 import common_pb2

_INSTEAD = {
    "json_object": 'write grammar={"json_object": True}',
    "json_schema": "give what stands in json_schema.schema itself",
    "text": "leave it out",
}
"""For the types of OpenAI's response_format, none of which is a type of JSON Schema: what is written here."""


def grammar_message(grammar: Grammar) -> common_pb2.Grammar:
    """Raises BatonError, TypeError or ValueError for what the contract cannot express."""
    if len(grammar) != 1:
        kinds = "json_schema, json_object, regex, lark or choice"
        raise invalid("grammar", f"grammar has the keys {sorted(grammar)}: give one of {kinds}")
    ((kind, value),) = grammar.items()
    if kind == "json_schema":
        text = value if isinstance(value, str) else json.dumps(value)
        return common_pb2.Grammar(json_schema=text)
    if kind == "json_object":
        if value is not True:
            raise invalid("grammar", f"grammar: json_object is True or left out, not {value!r}")
        return common_pb2.Grammar(json_object=common_pb2.JsonObject())
    if kind == "choice":
        return common_pb2.Grammar(choice=common_pb2.StringChoice(strings=value))  # type: ignore[arg-type]
    if kind not in ("regex", "lark"):
        raise invalid("grammar", f"grammar: {kind!r} is not known")
    message = common_pb2.Grammar()
    setattr(message, kind, value)
    return message


def format_message(response_format: ResponseFormat) -> common_pb2.Grammar:
    """The grammar of a schema, or of a pydantic model's. Raises BatonError for OpenAI's forms."""
    if isinstance(response_format, Mapping):
        instead = _INSTEAD.get(str(response_format.get("type")))
        if instead is not None:
            text = f"response_format is a JSON Schema or a pydantic model: {instead}"
            raise invalid("response_format", text)
        return grammar_message({"json_schema": response_format})
    return grammar_message({"json_schema": response_format.model_json_schema()})
