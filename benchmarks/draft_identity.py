"""Asks a deployment thousands of requests and keeps its answers, or compares them with those kept.

    baton up --model demo --port 7001 &
    baton up --model demo --port 7002 --draft suffix &
    python benchmarks/draft_identity.py --gateway 127.0.0.1:7001 --keep answers --requests 10000
    python benchmarks/draft_identity.py --gateway 127.0.0.1:7002 --compare answers --requests 10000

Requests are drawn from a seed, over sampling parameters, stop strings and ids, penalties, n, grammars, tools,
sessions, priorities and log-probabilities of outputs and prompts; every third was asked before. Texts, tokens
and finish reasons must be equal, log-probabilities within --tolerance. Prints each that differs, and exits
with 1.
(In some 100,000 tokens two logits are equal up to rounding: batches of other sizes, too, then choose others.)
The file of answers is one of continuations, too, as BATON_TEST_ORACLE names it.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import sys
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from baton.client import AsyncClient, Completion
from baton.client.types import PositionLogprobs
from baton.engine.draft.oracle import prompt_digest

MOST_TOP = 3
"""Most likely tokens that are asked for."""
SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 12}, "age": {"type": "integer"}},
    "required": ["name", "age"],
    "additionalProperties": False,
}
TOOL = {"name": "look", "description": "Looks.", "parameters": SCHEMA}
TEXTS = ("The sea is", "Once upon a time", "def add(a, b):", "The name of the cat is", "1, 2, 3, 4,")
Answer = dict[str, Any]


def draw(rng: random.Random, vocabulary: int) -> list[dict[str, Any]]:
    """The turns of a session; of most requests one."""
    turns = [_options(rng, vocabulary) for _ in range(1 if rng.random() < 0.9 else rng.randrange(2, 4))]
    if len(turns) == 1 and rng.random() < 0.1:
        del turns[0]["token_ids"]
        for name in ("response_format", "grammar", "ignore_eos"):
            turns[0].pop(name, None)
        turns[0] |= {"messages": rng.choice(TEXTS), "tools": [TOOL]}
        turns[0]["tool_choice"] = rng.choice(("auto", "required"))
    if len(turns) > 1:
        for turn in turns:
            turn.pop("n", None)
            turn.pop("prompt_logprobs", None)
    return turns


def _options(rng: random.Random, vocabulary: int) -> dict[str, Any]:
    words = [rng.randrange(20, vocabulary) for _ in range(rng.randrange(2, 24))]
    words = [*words, *rng.choice(([], words, words[: len(words) // 2]))]
    request: dict[str, Any] = {
        "token_ids": words * rng.choice((1, 1, 1, 8)),
        "max_tokens": rng.choice((1, 2, *[rng.randrange(3, 96)] * 8)),
        "temperature": rng.choice((0.0, 0.0, 0.3, 0.8, 1.2)),
        "seed": rng.randrange(2**32),
    }
    options: tuple[dict[str, Any], ...] = (
        {"top_k": rng.randrange(1, 50)},
        {"top_p": rng.uniform(0.3, 1.0)},
        {"min_p": rng.uniform(0.0, 0.3)},
        {"repetition_penalty": rng.uniform(1.0, 1.5)},
        {"frequency_penalty": rng.uniform(-1.0, 1.0), "presence_penalty": rng.uniform(-1.0, 1.0)},
        {"logit_bias": {rng.randrange(20, vocabulary): rng.uniform(-5, 5) for _ in range(4)}},
        {"min_tokens": rng.randrange(1, request["max_tokens"] + 1)},
        {"stop": [rng.choice((" the", "e", "\n", "in", "Python"))]},
        {"stop_token_ids": rng.sample(range(20, vocabulary), 30)},
        {"logprobs": rng.randrange(MOST_TOP + 1)},
        {"prompt_logprobs": rng.randrange(MOST_TOP)},
        {"n": rng.randrange(2, 4)},
        {"priority": rng.randrange(-2, 3)},
        {"ignore_eos": True},
        {"response_format": {"enum": ["red", "green", "greenish", "blue"]}},
        {"response_format": SCHEMA},
        {"grammar": {"regex": r"[a-z]{1,9}( [a-z]{1,9}){0,12}\."}},
    )
    for option in rng.sample(options, rng.randrange(5)):
        request |= option
    if "ignore_eos" in request and ("response_format" in request or "grammar" in request):
        del request["ignore_eos"]
    if "grammar" in request:
        request.pop("response_format", None)
    return request


def drawn(seed: int, number: int, vocabulary: int) -> list[dict[str, Any]]:
    rng = random.Random(f"{seed} {number}")
    if number % 3 == 2:
        return drawn(seed, rng.randrange(number), vocabulary)
    return draw(rng, vocabulary)


async def ask(client: AsyncClient, turns: list[dict[str, Any]]) -> list[Completion]:
    if len(turns) == 1:
        return [await client.stream(**turns[0]).completion()]
    async with client.session() as session:
        return [await session.stream(**turn).completion() for turn in turns]


def numbers(positions: list[PositionLogprobs]) -> list[float]:
    """The log-probabilities of each position's token, and of the most likely ones."""
    chosen = [each.chosen.logprob for each in positions if each.chosen is not None]
    return chosen + [top.logprob for each in positions for top in each.top]


def answers(number: int, turns: list[dict[str, Any]], completions: list[Completion]) -> Iterator[Answer]:
    """One of each choice of each turn."""
    for turn, (request, completion) in enumerate(zip(turns, completions, strict=True)):
        known = request.get("token_ids") if turn == 0 else None
        for index, choice in enumerate(completion.choices):
            yield {
                "name": f"{number} {turn} {index}",
                "prompt": prompt_digest(known) if known else "",
                "tokens": choice.token_ids,
                "text": choice.text,
                "calls": [[call.name, call.arguments] for call in choice.tool_calls],
                "finish": choice.finish_reason,
                "stop": choice.stop_matched,
                "logprobs": numbers(choice.logprobs),
                "prompt_logprobs": numbers(completion.prompt_logprobs),
            }


def differs(one: Answer, other: Answer, tolerance: float) -> str:
    """What differs; empty: nothing."""
    for name, value in one.items():
        if not name.endswith("logprobs"):
            if value != other[name]:
                return f"{name}: {value!r} and {other[name]!r}"
        elif len(value) != len(other[name]):
            return f"{name}: {len(value)} and {len(other[name])} of them"
        else:
            most = max((abs(a - b) for a, b in zip(value, other[name], strict=True)), default=0.0)
            if most > tolerance:
                return f"{name}: up to {most:.2g} apart"
    return ""


async def run(options: argparse.Namespace) -> None:
    known: dict[str, Answer] = {}
    if options.compare:
        lines = options.compare.read_text().splitlines()
        known = {answer["name"]: answer for answer in map(json.loads, lines)}
    kept = options.keep.open("w") if options.keep else None
    places, counts, wrong = asyncio.Semaphore(options.concurrency), Counter[str](), list[str]()
    began = time.monotonic()

    async with AsyncClient(options.gateway) as client:

        async def one(number: int) -> None:
            async with places:
                turns = drawn(options.seed, number, options.vocabulary)
                completions = await ask(client, turns)
            for answer in answers(number, turns, completions):
                if kept is not None:
                    print(json.dumps(answer), file=kept)
                elif problem := differs(known[answer["name"]], answer, options.tolerance):
                    wrong.append(problem)
                    print(f"{answer['name']}: {problem}\n{turns}", flush=True)
                counts["choices"] += 1
                counts["tokens"] += len(answer["tokens"])
            for completion in completions:
                usage, stats = completion.usage, completion.stats
                if usage is not None and stats is not None:
                    counts["drafts"] += usage.drafted_tokens
                    counts["right"] += usage.accepted_drafts
                    counts["handed off"] += bool(stats.prefill_address)
                    counts["retractions"] += stats.retractions
                    counts["resumed"] += stats.resumed
            counts["requests"] += 1
            if not counts["requests"] % 100 or counts["requests"] == options.requests:
                said = ", ".join(f"{count} {name}" for name, count in counts.items())
                print(f"{time.monotonic() - began:.0f} s: {said}, {len(wrong)} differ", flush=True)

        async with asyncio.TaskGroup() as tasks:
            for number in range(options.first, options.first + options.requests):
                tasks.create_task(one(number))
    if kept is not None:
        kept.close()
    if wrong:
        sys.exit(1)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--gateway", required=True, help="host:port")
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--keep", type=Path, help="file that gets the answers")
    what.add_argument("--compare", type=Path, help="file of answers that these must equal")
    parser.add_argument("--requests", type=int, default=1000)
    parser.add_argument("--first", type=int, default=0, help="number of the first request")
    parser.add_argument("--concurrency", type=int, default=64)
    parser.add_argument("--vocabulary", type=int, default=900, help="prompts have token ids below this")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument(
        "--tolerance", type=float, default=1e-4, help="of log-probabilities; 0 for --batch-invariant"
    )
    asyncio.run(run(parser.parse_args()))


if __name__ == "__main__":
    main()
