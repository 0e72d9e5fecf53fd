"""Requests whose answers are known."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from random import Random
from typing import Any

from reference import MIN_GAP, Answer, Reference

from baton.client import AsyncClient

LENGTHS = (5, 12, 30, 48, 90, 150, 260, 400)
"""Of prompts, in tokens: those above 32 are handed off."""
OUTPUT = 128
SHORTEST = 24
SAMPLED = {"temperature": 1.0, "top_p": 0.95, "repetition_penalty": 1.1}


@dataclass(frozen=True)
class Task:
    prompt: tuple[int, ...]
    tokens: tuple[int, ...]
    """What must come."""
    options: dict[str, Any] = field(default_factory=lambda: {"temperature": 0.0})
    text: str = ""
    """What must come; filled in by `record`."""

    @property
    def request(self) -> dict[str, Any]:
        return {"max_tokens": len(self.tokens), "ignore_eos": True, **self.options}


def make_tasks(reference: Reference, count: int, seed: int = 0) -> list[Task]:
    """Greedy requests with the outputs that transformers computes.

    The gap between the two best logits is above MIN_GAP at every position (Reference.answers asserts it), far
    more than the order of additions in another batch can change. Each answer gives many tasks: a prompt with
    the first k tokens of its answer is a prompt whose answer is the rest.
    """
    rng = Random(seed)
    answers = reference.answers(list(LENGTHS), OUTPUT, seed)
    assert min(answer.gap for answer in answers) > MIN_GAP
    return [_part(answers[i % len(answers)], rng) for i in range(count)]


def _part(answer: Answer, rng: Random) -> Task:
    start = rng.randrange(0, OUTPUT - SHORTEST)
    end = rng.randrange(start + SHORTEST, OUTPUT + 1)
    return Task(tuple(answer.prompt + answer.tokens[:start]), tuple(answer.tokens[start:end]))


async def record(address: str, tasks: Sequence[Task], sampled: int = 8) -> list[Task]:
    """Asks everything once, undisturbed. Fails unless the tokens are the reference's. Returns the tasks with
    their texts, and `sampled` more: the same prompts with a temperature and a seed, which no reference knows,
    asked twice: once computed by a prefill node, once from the caches."""
    async with AsyncClient(address) as client, asyncio.timeout(120):
        said = await asyncio.gather(*(client.generate(token_ids=t.prompt, **t.request) for t in tasks))
        for task, completion in zip(tasks, said, strict=True):
            assert tuple(completion.token_ids) == task.tokens, "the undisturbed answer differs"
        known = [replace(task, text=c.text) for task, c in zip(tasks, said, strict=True)]
        for seed, task in enumerate(tasks[:sampled]):
            options = {**SAMPLED, "seed": seed}
            request = {**task.request, **options, "token_ids": task.prompt}
            first, second = [await client.generate(**request, namespace=space) for space in ("sampled", "")]
            assert first.token_ids == second.token_ids and first.text == second.text
            known.append(replace(task, tokens=tuple(first.token_ids), options=options, text=first.text))
    return known
