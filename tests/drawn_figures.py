"""What demo-vision says of drawings that it has not been trained on."""

from __future__ import annotations

import asyncio
import random

from baton.client import AsyncClient
from baton.demo.figures import QUESTIONS, draw

AT_ONCE = 16


async def wrong_answers(address: str, alone: int, pairs: int, seed: str) -> dict[str, list[str]]:
    """What a gateway names wrong of so many fresh drawings alone, and of one of each of so many pairs. The
    seeds of training are numbers: no text draws what one of them draws."""
    rng, limit = random.Random(seed), asyncio.Semaphore(AT_ONCE)
    wrong: dict[str, list[str]] = {"alone": [], "one of two": []}

    async def ask(client: AsyncClient, kind, wanted, shown, question):
        content = [*(each.png() for each in shown), question]
        async with limit:
            said = await client.generate(
                messages=[{"role": "user", "content": content}], temperature=0, max_tokens=16, timeout=120
            )
        if said.text != wanted.name:
            wrong[kind].append(f"{wanted.name}: {said.text}")

    async with AsyncClient(address) as client, asyncio.TaskGroup() as group:
        for _ in range(alone):
            one = draw(rng)
            group.create_task(ask(client, "alone", one, [one], rng.choice(QUESTIONS["what"])))
        for number in range(pairs):
            one, two = draw(rng), draw(rng)
            kind, wanted = ("second", two) if number % 2 else ("first", one)
            group.create_task(ask(client, "one of two", wanted, [one, two], rng.choice(QUESTIONS[kind])))
    return wrong
