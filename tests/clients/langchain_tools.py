"""LangChain's clients in a loop of tools, whose first call is forced; then a full context.

Arguments: the server's URL and a question. Prints a line of JSON for each client.
"""

from __future__ import annotations

import json
import sys
from typing import Any, Literal

from langchain_anthropic import ChatAnthropic
from langchain_core.exceptions import ContextOverflowError
from langchain_core.messages import HumanMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI


@tool
def bash(command: Literal["cat note.txt"], description: Literal["Look"]) -> str:
    """Runs a command."""
    return "the word is quartz"


@tool
def weather_get_weather(city: str) -> str:
    """The weather in a city."""
    return f"It is sunny in {city}."


TOOLS = [bash, weather_get_weather]


def drive(chat: Any, question: str) -> dict[str, Any]:
    messages: list[Any] = [HumanMessage(question)]
    calls: list[Any] = []
    for turn in range(4):
        bound = chat.bind_tools(TOOLS, **({} if turn else {"tool_choice": "bash"}))
        messages.append(answer := bound.invoke(messages))
        for call in answer.tool_calls:
            calls.append([call["name"], call["args"]])
            messages.append(next(each for each in TOOLS if each.name == call["name"]).invoke(call))
        if not answer.tool_calls:
            break
    full = {}
    for kind, ask in ("whole", chat.invoke), ("streamed", lambda text: list(chat.stream(text))):
        try:
            ask("word " * 100_000)
        except ContextOverflowError as error:
            full[kind] = type(error).__name__
    return {"calls": calls, "answer": answer.text, "full": full}


def main() -> None:
    url, question = sys.argv[1:]
    openai = {"model": "mine", "base_url": f"{url}/v1", "api_key": "none"}
    for name, chat in {
        "chat": ChatOpenAI(**openai),
        "responses": ChatOpenAI(**openai, use_responses_api=True),
        "messages": ChatAnthropic(model="claude-mine", base_url=url, api_key="none"),
    }.items():
        print(json.dumps({name: drive(chat, question)}))


if __name__ == "__main__":
    main()
