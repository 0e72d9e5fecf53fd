"""Takes what a text says into a pydantic model. Needs `baton up --model smollm2`.

The answer is JSON of the model's schema, whatever the language model is; how well it has read the text is the
language model's affair.
"""

import argparse
from typing import Annotated

from pydantic import BaseModel, Field

from baton.client import DEFAULT_ADDRESS, Client

TEXT = "Ada Lovelace was born in London in 1815. She wrote the first program, and was good at mathematics."


class Person(BaseModel):
    """A person in a text."""

    name: str = Field(max_length=40)
    city: str = Field(max_length=40)
    born: int = Field(ge=1000, le=2100)
    skills: list[Annotated[str, Field(max_length=30)]] = Field(max_length=3)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("text", nargs="?", default=TEXT)
    parser.add_argument("--address", default=DEFAULT_ADDRESS, help="the gateway's host:port")
    args = parser.parse_args()

    question = f"{args.text}\n\nWho is this? Answer in JSON with the keys name, city, born and skills."
    with Client(args.address) as client:
        answer = client.generate(messages=question, response_format=Person, temperature=0, max_tokens=300)
    person = answer.parsed
    assert isinstance(person, Person)
    print(f"{person.name}, born {person.born} in {person.city}: {', '.join(person.skills)}")


if __name__ == "__main__":
    main()
