"""Errors name fields as each HTTP API does, whatever the text says."""

import pytest

from baton.api.field_names import field_names
from baton.api.openai_errors import from_baton
from baton.rpc.errors import from_status, invalid, invalid_field, to_status

NAMES = [
    ("sampling.temperature", "temperature", "temperature", "temperature"),
    ("sampling.max_tokens", "max_tokens", "max_tokens", "max_output_tokens"),
    ("sampling.stop[3]", "stop[3]", "stop_sequences[3]", "stop[3]"),
    ("sampling.stop_token_ids[0]", "stop_token_ids[0]", "stop_token_ids[0]", "stop_token_ids[0]"),
    ("sampling.grammar.json_schema", "response_format", "output_config.format", "text.format"),
    ("chat", "messages", "messages", "input"),
    ("chat.messages", "messages", "messages", "input"),
    ("chat.messages[1].role", "messages[1].role", "messages[1].role", "input.role"),
    ("chat.tools[2].name", "tools[2].function.name", "tools[2].name", "tools[2].name"),
    ("chat.tools", "tools", "tools", "tools"),
    ("chat.tool_choice.name", "tool_choice.function.name", "tool_choice.name", "tool_choice.name"),
    (
        "chat.tool_choice.allowed[1]",
        "tool_choice.allowed_tools.tools[1]",
        "tool_choice.tools[1]",
        "tool_choice.tools[1]",
    ),
    *[
        (f"chat.template_arguments.{name}", *[f"chat_template_kwargs.{name}"] * 3)
        for name in ("messages", "bos_token")
    ],
    ("namespace", "cache_salt", "cache_salt", "cache_salt"),
    ("model", "model", "model", "model"),
    # Fields of a body stay as they are.
    ("messages[0].content[1].source", *["messages[0].content[1].source"] * 3),
]


@pytest.mark.parametrize(("field", "openai", "anthropic", "responses"), NAMES)
def test_each_api_has_its_own_name(field, openai, anthropic, responses):
    # The text quotes the field's name, which stays: a client may have written that.
    error = from_status(to_status(invalid_field(field, f"is {field!r}; use another")))
    assert error.message == f"{field} is {field!r}; use another"
    paths = "/v1/chat/completions", "/v1/messages/count_tokens", "/v1/responses"
    for path, name in zip(paths, (openai, anthropic, responses), strict=True):
        found = from_baton(error, field_names(path))
        assert (found.param, found.message) == (name, f"{name} is {field!r}; use another"), path


def test_what_is_behind_a_colon_and_what_does_not_name_the_field():
    error = from_status(to_status(invalid_field("inputs[2].text", ": at most 4 entries")))
    error.field = "inputs[2]"
    assert error.message == "inputs[2]: at most 4 entries" == str(error)
    assert from_baton(error, field_names("/v1/embeddings")).message == "input[2]: at most 4 entries"
    error = from_status(to_status(invalid("text", "text has no tokens here")))
    assert from_baton(error).message == "text has no tokens here"


def test_several_prompts_are_told_apart():
    error = from_baton(invalid_field("tokens.token_ids[7]", "is 99"), prompt=2)
    assert (error.param, error.message) == ("prompt[2][7]", "prompt[2][7] is 99")
    error = from_baton(invalid_field("prompt_logprobs", "must be 1"), prompt=2)
    assert error.param == "prompt_logprobs"


def test_kinds_of_items_are_no_fields():
    names = field_names("/v1/messages")
    path = "messages[0].content[1].tool_result.content[2].image.source.base64.data"
    assert names.without_tags(path) == "messages[0].content[1].content[2].source.data"
    assert field_names("/v1/responses").without_tags("input[3].message.role") == "input[3].role"
    assert field_names("/v1/completions").without_tags(path) == path
