"""An agent with two tools, by the official OpenAI client. Needs `baton up --model smollm2` and `pip install
openai`.

The first step must call a tool, so that its arguments fit the tool's schema whatever the model is; then the
model is free to answer, or to call again.
"""

import argparse
import datetime
import json
from typing import Any, Literal

try:
    from openai import OpenAI
except ImportError:
    raise SystemExit("this example needs OpenAI's client: pip install openai") from None

TEMPERATURES = {"Paris": 21, "Oslo": 12, "Tokyo": 27}
STEPS = 4
TOOLS: list[Any] = [
    {
        "type": "function",
        "function": {
            "name": "get_temperature",
            "description": "The temperature in a city now, in degrees Celsius.",
            "parameters": {
                "type": "object",
                "properties": {"city": {"type": "string", "enum": sorted(TEMPERATURES)}},
                "required": ["city"],
            },
        },
    },
    {
        "type": "function",
        "function": {
            "name": "get_date",
            "description": "The date of today.",
            "parameters": {"type": "object", "properties": {}},
        },
    },
]


def call(name: str, arguments: dict[str, Any]) -> str:
    """Runs a tool."""
    if name == "get_temperature":
        return f"{TEMPERATURES[arguments['city']]} degrees Celsius"
    return datetime.date.today().isoformat()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("question", nargs="?", default="How warm is it in Oslo?")
    parser.add_argument("--address", default="127.0.0.1:8000", help="the gateway's HTTP host:port")
    args = parser.parse_args()

    client = OpenAI(base_url=f"http://{args.address}/v1", api_key="not-needed")
    model = client.models.list().data[0].id
    messages: list[Any] = [{"role": "user", "content": args.question}]
    for step in range(STEPS):
        choice: Literal["required", "auto", "none"] = "required" if step == 0 else "auto"
        if step == STEPS - 1:
            choice = "none"
        answer = client.chat.completions.create(
            model=model,
            messages=messages,
            tools=TOOLS,
            tool_choice=choice,
            parallel_tool_calls=False,
            temperature=0,
            max_tokens=128,
        )
        message = answer.choices[0].message
        messages.append(message.model_dump(exclude_none=True))
        if not message.tool_calls:
            print(f"answer: {message.content}")
            return
        for each in message.tool_calls:
            arguments = json.loads(each.function.arguments)
            result = call(each.function.name, arguments)
            print(f"called {each.function.name}({arguments}): {result}")
            messages.append({"role": "tool", "tool_call_id": each.id, "content": result})


if __name__ == "__main__":
    main()
