"""Streams of baton.client while one of two gateways is killed, again and again: every text is compared."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from deployment import Deployment
from process import Process

from baton.client import AsyncClient, BatonError, Choice

SECRET, KEY = "the secret of two gateways", "the-key-of-many-streams"
PROMPTS = (
    "def add(a, b):",
    "Zwölf Boxkämpfer — «jagen» Viktor",
    "日本語のテキスト",
    "import os\nimport sys\n",
)
SHAPES: Sequence[dict[str, Any]] = (
    {"temperature": 1.0},
    {"temperature": 0.0, "n": 2},
    {"temperature": 1.3, "logprobs": 2, "n": 3},
    {"temperature": 1.0, "grammar": {"regex": "(ab|[c-h ]){40,400}"}},
    {"temperature": 1.2, "stop": ["e", "zz"], "min_tokens": 40},
)


class Seen(Protocol):
    kills: int
    problems: list[str]


@dataclass
class Kills:
    """What was seen. problems: empty, if all is well."""

    kills: int = 0
    streams: int = 0
    resumed: int = 0
    longest_pause: float = 0.0
    """Seconds between two deltas of a stream, or before its first."""
    problems: list[str] = field(default_factory=list)


def two_gateways(folder: Path, model: Path | str) -> Deployment:
    deployment = Deployment(folder, model)
    prefill, decode = deployment.add_worker("prefill"), deployment.add_worker("decode")
    for _ in range(2):
        deployment.add_gateway([decode], [prefill])
    return deployment.close_to_strangers(SECRET, KEY)


def requests(count: int, max_tokens: int) -> list[dict[str, Any]]:
    made = []
    for seed in range(count):
        shape = SHAPES[seed % len(SHAPES)]
        prompt, endless = PROMPTS[seed % len(PROMPTS)], "grammar" not in shape
        made.append(
            {"prompt": prompt, "seed": seed, "max_tokens": max_tokens, "ignore_eos": endless, **shape}
        )
    return made


async def kill_gateways(
    deployment: Deployment, *, kills: int, streams: int, count: int = 20, max_tokens: int = 200
) -> Kills:
    """Kills the gateways in turn, each once the other has begun again; `streams` run at any time, of `count`
    different requests."""
    seen, over = Kills(), asyncio.Event()
    gateways = deployment.of("gateway")
    addresses = [gateway.address for gateway in gateways]
    asked = requests(count, max_tokens)
    async with AsyncClient(addresses, api_key=KEY) as client:
        calm = [(await client.generate(**request)).choices for request in asked]

    async def ask(number: int) -> None:
        async with AsyncClient([*addresses[number % 2 :], *addresses[: number % 2]], api_key=KEY) as client:
            while not over.is_set():
                request = asked[number % count]
                number += streams
                await _follow(client, request, calm[(number - streams) % count], seen)

    running = [asyncio.create_task(ask(number)) for number in range(streams)]
    try:
        await kill_in_turn(gateways, kills, seen, lambda: asyncio.sleep(0.5))
    finally:
        over.set()
        await asyncio.gather(*running)
    return seen


async def kill_in_turn(
    gateways: Sequence[Process], kills: int, seen: Seen, pause: Callable[[], Awaitable[None]]
) -> None:
    """Until so many have been killed, or there is a problem. Each is ready again before the next one dies."""
    while seen.kills < kills and not seen.problems:
        await pause()
        gateway = gateways[seen.kills % len(gateways)]
        await asyncio.to_thread(_kill, gateway)
        seen.kills += 1
        await asyncio.to_thread(gateway.wait_ready)


def _kill(gateway: Process) -> None:
    gateway.kill()
    gateway.start()


async def _follow(client: AsyncClient, request: dict[str, Any], calm: list[Choice], seen: Kills) -> None:
    options = dict(request)
    last = time.monotonic()
    try:
        async with client.stream(options.pop("prompt"), **options) as stream:
            async for _ in stream:
                now = time.monotonic()
                seen.longest_pause, last = max(seen.longest_pause, now - last), now
            answer = stream.so_far
    except BatonError as error:
        seen.problems.append(f"{request}: {error!r}")
        return
    seen.streams += 1
    assert answer.stats is not None
    seen.resumed += answer.stats.resumed
    for got, expected in zip(answer.choices, calm, strict=True):
        same = got.token_ids == expected.token_ids and got.text == expected.text
        if not same or got.finish_reason != expected.finish_reason:
            seen.problems.append(f"{request}: {got} instead of {expected}")
