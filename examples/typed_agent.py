"""An agent with two tools that are pydantic models, by Baton's own client. Needs `baton up --model smollm2`.

The first step must call a tool; its arguments fit the model's schema, so that `parsed` is an instance. Text
is shown as it comes.
"""

import argparse
from typing import Literal

from pydantic import BaseModel, Field

from baton.client import DEFAULT_ADDRESS, Client, Completion, Message, Stream, ToolChoice

STEPS = 4
STOCK = {"apples": 12, "bread": 0, "milk": 3}


class Stock(BaseModel):
    """How many of an article are there."""

    article: Literal["apples", "bread", "milk"]

    def run(self) -> str:
        return f"There are {STOCK[self.article]} of {self.article}."


class Order(BaseModel):
    """Orders an article."""

    article: Literal["apples", "bread", "milk"]
    count: int = Field(ge=1, le=100)

    def run(self) -> str:
        STOCK[self.article] += self.count
        return f"{self.count} of {self.article} are ordered."


def show(stream: Stream) -> Completion:
    for delta in stream:
        print(delta.text, end="", flush=True)
        for call in delta.tool_calls:
            print(f"{call.name}({call.arguments})")
    return stream.completion()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("question", nargs="?", default="Is there any bread?")
    parser.add_argument("--address", default=DEFAULT_ADDRESS, help="the gateway's host:port")
    args = parser.parse_args()

    messages: list[Message] = [{"role": "user", "content": args.question}]
    with Client(args.address) as client:
        for step in range(STEPS):
            choice: ToolChoice = "required" if step == 0 else "auto" if step < STEPS - 1 else "none"
            answer = show(
                client.stream(
                    messages=messages,
                    tools=[Stock, Order],
                    tool_choice=choice,
                    parallel_tool_calls=False,
                    temperature=0,
                    max_tokens=96,
                )
            )
            messages.append(answer.message)
            if not answer.tool_calls:
                print()
                return
            for call in answer.tool_calls:
                try:
                    result = call.parsed.run()
                except ValueError as error:  # a call that was not required may not fit
                    result = f"wrong arguments: {error}"
                print(result)
                messages.append({"role": "tool", "tool_call_id": call.id, "content": result})


if __name__ == "__main__":
    main()
