"""Asks two deployments the same requests, one with drafts and one without, and compares what clients see.

    baton up --model demo --port 7001 &
    baton up --model demo --port 7002 --draft suffix &
    python benchmarks/draft_identity.py --plain 127.0.0.1:7001 --drafting 127.0.0.1:7002 --requests 10000

Requests are drawn from a seed, over sampling parameters, stop strings and ids, penalties, n, grammars,
priorities and log-probabilities of outputs and prompts; every third was asked before. Texts, tokens and
finish reasons must be equal, log-probabilities within 1e-4. Exits with 1 at the first that differs.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import sys
from typing import Any

from baton.client import AsyncClient, Completion

TOLERANCE = 1e-4


def draw(rng: random.Random, vocabulary: int) -> dict[str, Any]:
    words = [rng.randrange(20, vocabulary) for _ in range(rng.randrange(2, 24))]
    request: dict[str, Any] = {
        "token_ids": [*words, *rng.choice(([], words, words[: len(words) // 2]))],
        "max_tokens": rng.randrange(1, 96),
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
        {"logprobs": rng.randrange(4)},
        {"prompt_logprobs": rng.randrange(3)},
        {"n": rng.randrange(2, 4)},
        {"priority": rng.randrange(-2, 3)},
        {"response_format": {"enum": ["red", "green", "greenish", "blue"]}},
    )
    for option in rng.sample(options, rng.randrange(4)):
        request |= option
    return request


def differs(one: Completion, other: Completion) -> str:
    """What differs; empty: nothing."""
    for a, b in zip(one.choices, other.choices, strict=True):
        for name in ("text", "token_ids", "finish_reason", "stop_matched"):
            if getattr(a, name) != getattr(b, name):
                return f"{name}: {getattr(a, name)!r} and {getattr(b, name)!r}"
        for x, y in zip(a.logprobs, b.logprobs, strict=True):
            if abs(x.chosen.logprob - y.chosen.logprob) > TOLERANCE:
                return f"log-probabilities: {x.chosen} and {y.chosen}"
    return ""


async def compare(options: argparse.Namespace) -> None:
    rng = random.Random(options.seed)
    asked: list[dict[str, Any]] = []
    done = tokens = drafted = right = 0
    async with AsyncClient(options.plain) as plain, AsyncClient(options.drafting) as drafting:

        async def both(request: dict[str, Any]) -> tuple[Completion, Completion]:
            return await asyncio.gather(
                plain.stream(**request).completion(), drafting.stream(**request).completion()
            )

        while done < options.requests:
            some = [
                rng.choice(asked) if asked and rng.random() < 1 / 3 else draw(rng, options.vocabulary)
                for _ in range(min(options.concurrency, options.requests - done))
            ]
            asked = [*asked, *some][-500:]
            for request, (one, other) in zip(some, await asyncio.gather(*map(both, some)), strict=True):
                if problem := differs(one, other):
                    sys.exit(f"after {done} requests: {problem}\n{request}")
                done += 1
                tokens += sum(len(choice.token_ids) for choice in one.choices)
                drafted += other.usage.drafted_tokens if other.usage else 0
                right += other.usage.accepted_drafts if other.usage else 0
            print(f"{done} requests alike, {tokens} tokens, {drafted} drafts, {right} right", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--plain", required=True, help="host:port of a gateway without drafts")
    parser.add_argument("--drafting", required=True, help="host:port of one with drafts")
    parser.add_argument("--requests", type=int, default=1000)
    parser.add_argument("--concurrency", type=int, default=16)
    parser.add_argument("--vocabulary", type=int, default=900, help="prompts have token ids below this")
    parser.add_argument("--seed", type=int, default=1)
    asyncio.run(compare(parser.parse_args()))


if __name__ == "__main__":
    main()
