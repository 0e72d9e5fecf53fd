"""Other people's clients, each for two turns with tools where it knows them; runs in .venv/clients.

Arguments: the API's URL and the model's name. Prints a line of JSON for each client.
"""

from __future__ import annotations

import json
import os
import sys
from typing import Any, Literal

os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"  # else it asks the internet

import litellm
from anthropic import Anthropic
from langchain_openai import ChatOpenAI
from llama_index.core.llms import ChatMessage
from llama_index.core.tools import FunctionTool
from llama_index.llms.openai_like import OpenAILike
from pydantic import BaseModel

TOKENS = 40
QUESTION = "How is the weather in Oslo?"
SCHEMA = {
    "type": "object",
    "properties": {"city": {"enum": ["Paris", "Oslo"]}},
    "required": ["city"],
    "additionalProperties": False,
}
TOOLS = [
    {"type": "function", "function": {"name": "get_weather", "description": "Weather", "parameters": SCHEMA}}
]


class Weather(BaseModel):
    """The weather in a city."""

    city: Literal["Paris", "Oslo"]


def get_weather(city: str) -> str:
    """The weather in a city."""
    return "12 C"


def with_litellm(url: str, model: str) -> dict[str, Any]:
    common = {
        "model": f"openai/{model}",
        "api_base": url,
        "api_key": "none",
        "tools": TOOLS,
        "max_tokens": TOKENS,
        "temperature": 0,
    }
    messages: list[Any] = [{"role": "user", "content": QUESTION}]
    first = litellm.completion(messages=messages, tool_choice="required", parallel_tool_calls=False, **common)
    message = first.choices[0].message
    (call,) = message.tool_calls
    messages += [
        message.model_dump(),
        {"role": "tool", "tool_call_id": call.id, "name": "get_weather", "content": "12"},
    ]
    second = litellm.completion(messages=messages, **common)
    return {"arguments": json.loads(call.function.arguments), "second": second.choices[0].finish_reason}


def with_langchain(url: str, model: str) -> dict[str, Any]:
    chat = ChatOpenAI(model=model, base_url=url, api_key="none", max_tokens=TOKENS, temperature=0)
    bound = chat.bind_tools([Weather], tool_choice="any", parallel_tool_calls=False)
    (call,) = bound.invoke(QUESTION).tool_calls
    found: dict[str, Any] = {"bind_tools": call["args"]}
    question = "Which city is the capital of France? Answer in JSON, key city: Paris or Oslo."
    for method in ("function_calling", "json_schema", "json_mode"):
        made = chat.with_structured_output(Weather, method=method).invoke(question)
        found[method] = made.model_dump()
    found["chunks"] = sum(1 for _ in chat.stream("Hello"))
    return found


def with_llama_index(url: str, model: str) -> dict[str, Any]:
    kinds = {"is_chat_model": True, "is_function_calling_model": True}
    chat = OpenAILike(model=model, api_base=url, api_key="none", max_tokens=TOKENS, **kinds)
    answer = str(chat.chat([ChatMessage(role="user", content="Hello")]))
    response = chat.chat_with_tools(
        [FunctionTool.from_defaults(get_weather)], user_msg=QUESTION, tool_required=True
    )
    calls = chat.get_tool_calls_from_response(response)
    return {"answer": answer, "tool": calls[0].tool_name, "arguments": calls[0].tool_kwargs}


def with_anthropic(url: str, model: str) -> dict[str, Any]:
    tool: Any = {"name": "get_weather", "description": "Weather", "input_schema": SCHEMA}
    with Anthropic(base_url=url.removesuffix("/v1"), api_key="none") as client:
        asked: Any = {"model": model, "max_tokens": TOKENS, "tools": [tool], "extra_body": {"temperature": 0}}
        messages: list[Any] = [{"role": "user", "content": QUESTION}]
        counted = client.messages.count_tokens(model=model, messages=messages, tools=[tool]).input_tokens
        choice: Any = {"type": "any", "disable_parallel_tool_use": True}
        with client.messages.stream(messages=messages, tool_choice=choice, **asked) as stream:
            kinds = {event.type for event in stream}
            first = stream.get_final_message()
        (use,) = [block for block in first.content if block.type == "tool_use"]
        result = {"type": "tool_result", "tool_use_id": use.id, "content": "12 C"}
        messages += [{"role": "assistant", "content": first.content}, {"role": "user", "content": [result]}]
        second = client.messages.create(messages=messages, **asked)
    usage = first.usage.input_tokens + (first.usage.cache_read_input_tokens or 0)
    return {
        "arguments": use.input,
        "counted": [counted, usage],
        "events": sorted(kinds),
        "stops": [first.stop_reason, second.stop_reason],
    }


def main() -> None:
    for run in (with_litellm, with_langchain, with_llama_index, with_anthropic):
        print(json.dumps({run.__name__: run(*sys.argv[1:])}))


if __name__ == "__main__":
    main()
