"""The stock `openai` client behind HAProxy while one of two gateways is killed, again and again."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import openai
from deployment import Deployment

from proxies import documented, proxy
from stress.gateways import KEY, PROMPTS, kill_in_turn

ANSWER_SECONDS = 120.0


@dataclass
class ProxiedKills:
    """What was seen. problems: empty, if all is well: no answer failed before its first byte, none that began
    ended short without an error, and each text is that of a calm run."""

    kills: int = 0
    whole: int = 0
    """Complete answers in one piece."""
    streams: int = 0
    """Complete streams."""
    broken: int = 0
    """Streams that had begun, and ended with an error of the client."""
    retried: int = 0
    """Requests that the proxy sent again, or to another gateway."""
    longest_wait: float = 0.0
    """Seconds of an answer in one piece, or until a stream's first byte."""
    problems: list[str] = field(default_factory=list)

    @property
    def answers(self) -> int:
        return self.whole + self.streams + self.broken


def requests(count: int, max_tokens: int) -> list[dict[str, Any]]:
    return [
        {
            "model": "demo",
            "prompt": PROMPTS[seed % len(PROMPTS)],
            "seed": seed,
            "max_tokens": max_tokens,
            "temperature": 1.0,
            "n": 1 + seed % 2,
            "extra_body": {"ignore_eos": True},
        }
        for seed in range(count)
    ]


async def kill_behind_proxy(
    deployment: Deployment,
    haproxy: str,
    folder: Path,
    *,
    kills: int,
    clients: int,
    count: int = 10,
    max_tokens: int = 100,
) -> ProxiedKills:
    """haproxy: the program. `clients` ask at any time, of `count` different requests, each whole and as a
    stream in turn. The client's own retries are off."""
    seen, over = ProxiedKills(), asyncio.Event()
    gateways = deployment.of("gateway")
    addresses = [(gateway.info().http_address, gateway.address) for gateway in gateways]
    statistics = folder / "haproxy.socket"
    configuration = f"global\n    stats socket {statistics}\n\n{documented('haproxy')}"
    asked = requests(count, max_tokens)
    async with (
        proxy(haproxy, configuration, folder, addresses) as (port, _),
        openai.AsyncOpenAI(
            base_url=f"http://127.0.0.1:{port}/v1", api_key=KEY, max_retries=0, timeout=ANSWER_SECONDS
        ) as client,
    ):
        calm = [texts(await client.completions.create(**request)) for request in asked]

        async def ask(number: int) -> None:
            while not over.is_set():
                at = number % count
                follow = _stream if number // count % 2 else _whole
                await follow(client, asked[at], calm[at], seen)
                number += clients

        async def pause() -> None:
            """Until each client may have had an answer, and the proxy knows that both gateways live: one that
            meets more deaths than are retried fails, or one that only the dead gateway could have."""
            answers = seen.answers + clients
            async with asyncio.timeout(ANSWER_SECONDS):
                while seen.answers < answers and not seen.problems:  # noqa: ASYNC110
                    await asyncio.sleep(0.05)
                while not all(row["status"] == "UP" for row in await _servers(statistics)):  # noqa: ASYNC110
                    await asyncio.sleep(0.2)

        running = [asyncio.create_task(ask(number)) for number in range(clients)]
        try:
            await kill_in_turn(gateways, kills, seen, pause)
        finally:
            over.set()
            await asyncio.gather(*running)
        seen.retried = sum(int(row["wretr"]) for row in await _servers(statistics))
    return seen


def texts(answer: openai.types.Completion) -> list[str]:
    return [choice.text for choice in answer.choices]


async def _whole(
    client: openai.AsyncOpenAI, request: dict[str, Any], calm: list[str], seen: ProxiedKills
) -> None:
    begun = time.monotonic()
    try:
        got = texts(await client.completions.create(**request))
    except openai.APIError as error:
        seen.problems.append(f"{request}: {error!r} {error.__cause__!r}")
        return
    seen.longest_wait = max(seen.longest_wait, time.monotonic() - begun)
    seen.whole += 1
    if got != calm:
        seen.problems.append(f"{request}: {got} instead of {calm}")


async def _stream(
    client: openai.AsyncOpenAI, request: dict[str, Any], calm: list[str], seen: ProxiedKills
) -> None:
    begun = time.monotonic()
    try:
        chunks = await client.completions.create(**request, stream=True)
    except openai.APIError as error:
        seen.problems.append(f"{request}, before the first byte: {error!r} {error.__cause__!r}")
        return
    seen.longest_wait = max(seen.longest_wait, time.monotonic() - begun)
    got = [""] * len(calm)
    try:
        async for chunk in chunks:
            for choice in chunk.choices:
                got[choice.index] += choice.text
    except (openai.APIError, httpx.TransportError):
        seen.broken += 1
        if not all(map(str.startswith, calm, got)):
            seen.problems.append(f"{request}: {got} is no beginning of {calm}")
        return
    seen.streams += 1
    if got != calm:
        seen.problems.append(f"{request}: {got} instead of {calm}, without an error")


async def _servers(statistics: Path) -> list[dict[str, str]]:
    """HAProxy's own figures of the gateways, for HTTP."""
    reader, writer = await asyncio.open_unix_connection(str(statistics))
    writer.write(b"show stat\n")
    names, *lines = (await asyncio.wait_for(reader.read(), 10)).decode().lstrip("# ").splitlines()
    writer.close()
    rows = [dict(zip(names.split(","), line.split(","), strict=False)) for line in lines if line]
    return [row for row in rows if row["pxname"] == "gateway_http" and row["svname"].startswith("gateway")]
